"""`spark-abs doctor`, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest
from click.testing import CliRunner

from spark_abs.cli import doctor as doctor_module
from spark_abs.cli.doctor import Verdict, examine
from spark_abs.cli.main import main
from spark_abs.cli.output import Output
from spark_abs.errors import CommitConflict
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

WITHOUT = "import sys; sys.modules.update(pyspark=None, py4j=None)\n"
DOCTOR = "from spark_abs.cli.main import main; main(['doctor', *sys.argv[1:]], prog_name='spark-abs')"


def doctor(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def test_all_parts_work_here_and_a_directory_that_was_not_there_is_told(tmp_path: Path) -> None:
    root = tmp_path / "mistyped/root"
    ran = doctor(f"import sys\n{DOCTOR}", str(root), "--output", "json")
    found = {one["part"]: one for one in json.loads(ran.stdout)}
    assert {one["verdict"] for one in found.values()} == {"works"}, ran.stdout
    assert found.keys() >= {"commits in the root", "session", "Delta in Spark", "a job"}
    assert f"written and read at {root}/_doctor-" in found["Delta in Spark"]["says"]
    assert f"{root} was not there before" in found["what is left in the root"]["says"]
    assert ran.returncode == 0
    assert list(tmp_path.iterdir()) == [], "nothing stays"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            WITHOUT,
            "pyspark: jobs need it, and pyspark is not installed: pip install 'spark-abs[spark]'; commands",
        ),
        (
            "import sys; sys.modules.update(py4j=None)\n",
            "pyspark: jobs need it, and there is pyspark-client, which is for Spark Connect only",
        ),
    ],
    ids=["without pyspark", "pyspark without py4j"],
)
def test_without_spark_it_says_what_still_works_and_what_to_install(program: str, says: str) -> None:
    ran = doctor(program + DOCTOR)
    assert ran.returncode == 1
    assert says in ran.stdout
    assert "untried  a job: needs pyspark" in ran.stdout


def test_each_part_is_told_when_it_has_been_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The session never answers: all before it has been printed by then, and the command goes on."""
    told: list[str] = []
    monkeypatch.setattr(Output, "line", lambda self, text: told.append(text))
    monkeypatch.setattr(doctor_module, "_STARTS_S", 0.2)
    hang = Event()

    def end(code: int) -> NoReturn:
        raise SystemExit(code + 10)

    monkeypatch.setattr(os, "_exit", end)  # of the process, which is that of the tests here

    def session(started: list[object], scratch: object) -> str:
        assert [line.split()[1] for line in told[-2:]] == ["commits", "pyspark:"]
        hang.wait()
        return ""

    monkeypatch.setattr(doctor_module, "_session", session)
    assert CliRunner().invoke(main, ["doctor", str(tmp_path)]).exit_code == 11
    hang.set()
    assert told[-4:] == [
        "fails    session: no answer within 0 s",
        "untried  Delta in Spark: needs a session",
        "untried  a job: needs a session",
        "works    what is left in the root: nothing",
    ]


def test_a_store_that_takes_two_commits_of_one_version_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writers are let through, as a store without an atomic create lets them."""
    strict = Table.commit_next

    def lax(self: Table, commit: object) -> object:
        try:
            return strict(self, commit)  # type: ignore[arg-type]
        except CommitConflict:
            return self.version

    monkeypatch.setattr(Table, "commit_next", lax)
    found = next(one for one in examine(str(tmp_path)) if one.part == "commits in the root")
    assert found.verdict is Verdict.FAILS
    assert "took 4 commits of version 1: the store does not create" in found.says


def test_what_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program writes into the directory that the trial made."""
    real = doctor_module._race

    def also(scratch: Place) -> str:
        said = real(scratch)
        (tmp_path / "new/other").touch()
        return said

    monkeypatch.setattr(doctor_module, "_race", also)
    monkeypatch.setattr(doctor_module, "_with_spark", lambda scratch: ())
    left = list(examine(str(tmp_path / "new")))[-1]
    assert left.verdict is Verdict.FAILS
    assert "the trials may have left" in left.says
    assert str(tmp_path / "new") in left.says


@pytest.mark.parametrize(
    ("root", "says"),
    [("dbfs:/roots/shop", "can be in dbfs:/roots/shop"), ("/proc/shop", "no table can be created at")],
)
def test_a_root_that_cannot_be_is_a_part_that_fails_with_its_reason(root: str, says: str) -> None:
    found = next(one for one in examine(root) if one.part == "commits in the root")
    assert (found.verdict, says in found.says) == (Verdict.FAILS, True), found.says
