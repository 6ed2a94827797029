"""Every block of Python in README and guide runs: the blocks of a page one after the other, in one namespace.

Blocks within a comment, which readers do not see, set up and check what the others need. Names that pages
take for granted are those of `namespace`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.spark import session as session_module
from tests.markdown_support import GUIDE, HERE, README, blocks

SCRIPT = GUIDE / "bad-release.md"
"""Its output is compared with the page."""

IN_A_PROCESS = {GUIDE / "quick-start.md"}
"""`test_newcomer.py` runs it, with signals."""

DIRECTORY = re.compile(r"/\S*/spark-abs-\w+")
"""The directory of the script, new in each run."""

PAGES = [
    page
    for page in (README, *sorted(GUIDE.glob("*.md")))
    if page not in IN_A_PROCESS and any(block.language == "python" for block in blocks(page))
]


def write_input(base: Path) -> None:
    """Write the input of all pages below a directory."""
    rows: dict[str, list[dict[str, object]]] = {
        "clicks": [{"user": f"u{n}"} for n in range(4)],
        "orders": [{"item": "tea", "cents": n} for n in (1, 2)],
    }
    for name, lines in rows.items():
        (base / name).mkdir(parents=True, exist_ok=True)
        (base / name / "a.json").write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture(scope="module")
def root(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The root of a job that is stopped, with the savepoint that pages go back to."""

    def count(key: tuple[str], rows: Iterator[object], state: spark_abs.GroupState) -> tuple[str, int]:
        total = (state.get[0] if state.exists else 0) + sum(1 for _ in rows)
        state.update((total,))
        return key[0], total

    def counted(frame: DataFrame) -> DataFrame:
        return spark_abs.map_groups_with_state(frame, "user", count, "total long", "user string, total long")

    def totals(frame: DataFrame) -> DataFrame:
        return frame.groupBy("user").agg(F.count("*").alias("clicks"))

    base = tmp_path_factory.mktemp("guide")
    write_input(base)
    clicks = spark.readStream.schema("user string").json(f"{base}/clicks")
    job = spark_abs.Job("attribution", root=f"{base}/root", spark=spark)
    job.sink("counted", job.stage("count", [clicks], counted), table=f"{base}/counted")
    job.sink("totals", job.stage("totals", [clicks], totals, output_mode="update"), table=f"{base}/totals")
    run = job.start()
    for stage in ("count", "totals"):
        run.query(stage).processAllAvailable()
    run.stop(savepoint="before-release")
    return f"{base}/root"


@pytest.fixture
def namespace(
    spark: SparkSession, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What a page may take for granted; jobs that it leaves behind are stopped."""
    write_input(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Functions of the module `__main__` travel to Python workers by value.
    # Pages start a session with packages; here it is there, and no block reads from their systems.
    monkeypatch.setattr(session_module, "require_packages", lambda session, packages: None)
    names: dict[str, Any] = {"__name__": "__main__", "spark_abs": spark_abs, "F": F, "spark": spark}
    names.update(base=str(tmp_path), root=root)
    yield names
    run = names.get("run")
    if isinstance(run, spark_abs.Run) and run.is_active:
        run.stop()
    for query in spark.streams.active:
        query.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))
def test_the_code_of_a_page_runs(
    page: Path, namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    base, printed = namespace["base"], ""
    for block in blocks(page):
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code.replace('"/data/', f'"{base}/')
            exec(compile(code, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
        elif page == SCRIPT and printed:
            assert DIRECTORY.sub("DIRECTORY", printed) == DIRECTORY.sub("DIRECTORY", block.code)
            return
