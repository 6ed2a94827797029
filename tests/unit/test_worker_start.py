"""How Python processes find pyspark that are started as Spark does it, with its zip file at the head."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from spark_abs.spark import worker_start

HOME = Path(pyspark.__file__).parent
ZIP = HOME / "python/lib/pyspark.zip"
START = Path(worker_start.__file__).parent


def run(*path: Path, code: str = "import pyspark; print(pyspark.__file__)") -> str:
    """Start a process with a path; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_pyspark_comes_from_its_directory_where_it_would_come_from_its_zip_file() -> None:
    assert run(ZIP) == str(ZIP / "pyspark/__init__.py")
    assert Path(run(ZIP, START)).samefile(HOME / "__init__.py")


def test_the_path_is_otherwise_as_it_was(tmp_path: Path) -> None:
    code = "import sys; print(sys.path)"
    assert run(ZIP, tmp_path, START, code=code) == run(tmp_path, code=code)


def test_another_pyspark_does_not_take_the_place_of_the_zip_file(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark/__init__.py").touch()
    assert run(ZIP, tmp_path, START) == str(ZIP / "pyspark/__init__.py")


def test_a_zip_file_of_another_spark_stays(tmp_path: Path) -> None:
    other = tmp_path / "pyspark/python/lib/pyspark.zip"
    other.parent.mkdir(parents=True)
    other.write_bytes(ZIP.read_bytes())
    assert run(other, START) == str(other / "pyspark/__init__.py")


@pytest.mark.parametrize("code", ["print('mine')", "import sys; sys.exit(3)"])
def test_a_sitecustomize_of_the_users_own_is_run(tmp_path: Path, code: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    with_ours = subprocess.run(
        [sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (START, tmp_path)))},
        capture_output=True,
        text=True,
        check=False,
    )
    alone = subprocess.run(
        [sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (with_ours.returncode, with_ours.stdout) == (alone.returncode, alone.stdout)


def test_what_is_handed_to_spark_meanwhile_gets_the_path_and_the_variables() -> None:
    before = {"PYTHONPATH": "mine", "SET": "by the user"}
    context: Any = SimpleNamespace(environment=dict(before))
    with worker_start.quick_start(context, {"SET": "", "NEW": ""}):
        seen = dict(context.environment)
    assert seen == {"PYTHONPATH": os.pathsep.join(["mine", str(START)]), "SET": "by the user", "NEW": ""}
    assert context.environment == before


def test_the_environment_is_as_it_was_after_an_error() -> None:
    context: Any = SimpleNamespace(environment={})
    with pytest.raises(OSError, match="no schema"), worker_start.quick_start(context):
        raise OSError("no schema")
    assert context.environment == {}
