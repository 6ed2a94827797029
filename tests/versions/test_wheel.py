"""The wheel brings no Spark where commands are all that is wanted, and replaces none that is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_abs.spark.versions import SUPPORTED
from tests.root_support import SmallJob
from tests.versions.recorder import SPARK
from tests.versions.run import python_of
from tests.versions.test_carried_root import HERE

SHIPPED = ("spark_abs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        copy = shutil.copytree if (HERE / name).is_dir() else shutil.copy
        copy(HERE / name, source / name)
    pip(Path(sys.executable), "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(source))
    (made,) = target.glob("*.whl")
    return made


def pip(python: Path | str, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_answer_where_there_is_no_spark(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    pip(python, "install", "--quiet", str(wheel))
    installed = {package["name"] for package in json.loads(pip(python, "list", "--format", "json"))}
    assert not installed & {"pyspark", "py4j", "delta-spark"}
    job = SmallJob(tmp_path / "job")
    job.checkpoint(1)
    job.step(2)
    root = job.root.uri
    for call in (["list", root], ["verify", root], ["restore", root, "--to", "1", "--yes"]):
        subprocess.run([tmp_path / "env/bin/spark-abs", *call], check=True, env={"PATH": "/nowhere"})
    assert job.rows() == [1]


def test_a_spark_that_is_there_stays(wheel: Path, record_property: Callable[[str, object], None]) -> None:
    for line in SUPPORTED:
        record_property(SPARK, line)
        planned = pip(python_of(line), "install", "--quiet", "--dry-run", "--report", "-", f"{wheel}[spark]")
        names = {one["metadata"]["name"].lower().replace("_", "-") for one in json.loads(planned)["install"]}
        assert names <= {"spark-abs"}
