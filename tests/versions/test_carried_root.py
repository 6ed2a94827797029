"""A root that is started on one Spark goes on on every other one, forth and back."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_abs.model import StageId
from spark_abs.spark.versions import STATE_REWRITER_SINCE
from tests.job_support import manifests
from tests.versions.recorder import SPARK
from tests.versions.run import python_of, variables_of

HERE = Path(__file__).parents[2]
KEYS, ROWS, FILES = 5, 20, 6
ROW = tuple[int, int, int]


def live(base: Path, line: str, life: str, code: int = 0) -> str:
    savepoint = f"{life}-{line}".replace(".", "-")
    done = subprocess.run(
        [python_of(line), "-m", "tests.versions.carried", str(base), life, savepoint],
        cwd=HERE,
        env={**variables_of(line), "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert code or f"lived with Spark {line}." in done.stdout
    return done.stdout + done.stderr


class Input:
    """Files of both streams, and what their tables must be: counted here, without Spark."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.left: list[ROW] = []
        self.right: list[ROW] = []

    def write(self, files: int) -> None:
        for _ in range(files):
            first = len(self.left)
            for name, rows, factor in (("left", self.left, 1), ("right", self.right, 10)):
                new = [(n, n * 7 % KEYS, n * factor) for n in range(first, first + ROWS)]
                (self.base / name).mkdir(exist_ok=True)
                unseen = self.base / f".{name}"
                objects = ({"id": ident, "k": key, "v": value} for ident, key, value in new)
                unseen.write_text("\n".join(map(json.dumps, objects)))
                os.utime(unseen, (1_700_000_000 + first, 1_700_000_000 + first))
                unseen.rename(self.base / name / f"{first:06}.json")
                rows += new

    def assert_tables(self) -> None:
        """Compare each table with what the whole input gives, every row once."""
        n, total, running = Counter[int](), Counter[int](), []
        for ident, key, value in self.left:
            n[key] += 1
            total[key] += value
            running.append((key, ident, n[key], total[key]))
        assert self.rows("running", "k", "id", "n", "total") == sorted(running)
        assert self.rows("sums", "k", "n", "total") == sorted((k, n[k], total[k]) for k in n)
        joined = [(one[0], one[2], other[2]) for one, other in zip(self.left, self.right, strict=True)]
        assert self.rows("pairs", "id", "v", "w") == sorted(joined)

    def rows(self, table: str, *columns: str) -> list[tuple[int, ...]]:
        found = DeltaTable(str(self.base / table)).to_pyarrow_table(columns=list(columns)).to_pylist()
        return sorted(tuple(row[c] for c in columns) for row in found)


def partitions(base: Path, stage: str) -> int:
    snapshot = manifests(str(base / "root"))[-1].stage(StageId(stage))
    assert snapshot is not None
    return snapshot.shuffle_partitions


@pytest.mark.timeout(1500)
def test_a_root_is_carried_from_4_0_to_4_2_and_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Killed between table and commit on 4.0, repeated by 4.1; rescaled by 4.2, gone on with on 4.0."""
    for line in ("4.0", "4.1", "4.2"):
        record_property(SPARK, line)
    given = Input(tmp_path)
    given.write(FILES)
    live(tmp_path, "4.0", "kill", code=-9)
    given.write(1)
    live(tmp_path, "4.1", "on")
    given.assert_tables()

    control = sorted((tmp_path / "root/control/_delta_log").iterdir())
    refused = live(tmp_path, "4.1", "rescale", code=1)
    assert "Refused: another number of shuffle partitions for stage" in refused
    assert f"needs Spark {STATE_REWRITER_SINCE}" in refused
    assert "Nothing was changed" in refused
    assert sorted((tmp_path / "root/control/_delta_log").iterdir()) == control

    given.write(1)
    live(tmp_path, "4.2", "rescale")
    given.assert_tables()
    assert partitions(tmp_path, "sums") == 5
    given.write(2)
    live(tmp_path, "4.0", "on")
    given.assert_tables()
    assert partitions(tmp_path, "running") == 5
