"""`spark-abs doctor`, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spark_abs.cli.doctor import Verdict, examine
from spark_abs.errors import CommitConflict
from spark_abs.store.table import Table

WITHOUT = "import sys; sys.modules.update(pyspark=None, py4j=None)\n"
DOCTOR = "from spark_abs.cli.main import main; main(['doctor', *sys.argv[1:]], prog_name='spark-abs')"


def doctor(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def test_all_parts_work_here(tmp_path: Path) -> None:
    ran = doctor(f"import sys\n{DOCTOR}", str(tmp_path), "--output", "json")
    found = {one["part"]: one for one in json.loads(ran.stdout)}
    assert {one["verdict"] for one in found.values()} == {"works"}, ran.stdout
    assert found.keys() >= {"commits in the root", "session", "Delta in Spark", "a job"}
    assert ran.returncode == 0
    assert list(tmp_path.iterdir()) == [], "nothing stays in the root"


def test_without_spark_it_says_what_still_works_and_what_to_install() -> None:
    ran = doctor(WITHOUT + DOCTOR)
    assert ran.returncode == 1
    assert "pip install 'spark-abs[spark]'" in ran.stdout
    assert "untried  a job: needs pyspark" in ran.stdout


def test_a_store_that_takes_two_commits_of_one_version_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second writer is let through, as a store without an atomic create lets it."""
    strict = Table.commit_next

    def lax(self: Table, commit: object) -> object:
        try:
            return strict(self, commit)  # type: ignore[arg-type]
        except CommitConflict:
            return self.version

    monkeypatch.setattr(Table, "commit_next", lax)
    found = next(one for one in examine(str(tmp_path)) if one.part == "commits in the root")
    assert found.verdict is Verdict.FAILS
    assert "took two commits of one version" in found.says


@pytest.mark.parametrize(
    ("root", "says"),
    [("dbfs:/roots/shop", "cannot be in dbfs:/roots/shop"), ("/proc/shop", "no table can be created at")],
)
def test_a_root_that_cannot_be_is_a_part_that_fails_with_its_reason(root: str, says: str) -> None:
    found = next(one for one in examine(root) if one.part == "commits in the root")
    assert (found.verdict, says in found.says) == (Verdict.FAILS, True), found.says
