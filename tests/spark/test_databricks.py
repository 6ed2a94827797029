"""The notebook for Databricks runs with what Databricks puts into a notebook, and as a plain script.

Nothing of Databricks runs here: `spark` is a session of Spark, `dbutils` a stand-in that remembers its calls.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_abs.errors import UsageError
from spark_abs.spark.session import AT_START
from tests.jvm import java_options

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SCRIPT = NOTEBOOKS / "databricks.py"


def amounts(base: Path, table: str) -> Counter[int]:
    return Counter(DeltaTable(str(base / table)).to_pyarrow_table()["cents"].to_pylist())


def is_right(base: Path) -> bool:
    sales, totals = Counter([250, 300, 400]), Counter([550, 950])
    return (amounts(base, "sales"), amounts(base, "totals")) == (sales, totals)


def cells() -> list[str]:
    """Return the cells of code as Databricks splits a source file."""
    text = SCRIPT.read_text(encoding="utf-8")
    first, newline, rest = text.partition("\n")
    assert (first, newline) == ("# Databricks notebook source", "\n")
    found = [cell.strip("\n") for cell in re.split(r"^# COMMAND -{10}$", rest, flags=re.MULTILINE)]
    prose = [cell for cell in found if cell.startswith("# MAGIC %md")]
    assert all(line.startswith("# MAGIC") for cell in prose for line in cell.splitlines())
    code = [cell for cell in found if cell not in prose]
    assert not any("# MAGIC" in cell for cell in code)
    return code


class Stopped(BaseException):
    """Raised where Databricks ends a notebook."""


class Utilities:
    """A stand-in for `dbutils`: the widgets that were made, and what the notebook ended with."""

    def __init__(self, **given: str) -> None:
        self.made, self.result = dict[str, str](), ""
        self.widgets = SimpleNamespace(text=self._text, get=lambda name: given.get(name, self.made[name]))
        self.notebook = SimpleNamespace(exit=self._exit)

    def _text(self, name: str, default: str, label: str = "") -> None:
        self.made[name] = default

    def _exit(self, result: str) -> None:
        self.result = result
        raise Stopped


def test_in_a_notebook_it_takes_the_session_that_is_there(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, utilities = spark.newSession(), Utilities(base=f"{tmp_path}/")
    before = {name: own.conf.get(name, None) for name in AT_START}
    names: dict[str, Any] = {"spark": own, "dbutils": utilities}
    *first, last = cells()
    for cell in first:
        exec(cell, names)
    with pytest.raises(Stopped):
        exec(last, names)
    assert utilities.made == {"base": ""}
    assert utilities.result == "{'sales': [250, 300, 400], 'totals': [550, 950]}"
    assert is_right(tmp_path)
    assert names["spark"] is own
    assert {name: own.conf.get(name, None) for name in AT_START} == before
    assert own.range(1).count() == 1, "the session goes on"
    assert "after the bad release: sales [250, 300, 40000], totals [550, 40550]" in capsys.readouterr().out


def test_without_a_base_it_does_not_run_on_a_cluster(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "master", "spark://host:7077")
    with pytest.raises(ValueError, match="s3://BUCKET/PATH"):
        exec(cells()[0], {"spark": spark, "dbutils": Utilities()})


@pytest.mark.parametrize("base", ["", "s3://bucket/shop"])
def test_without_a_jvm_it_names_dedicated_compute_before_it_asks_for_anything_else(base: str) -> None:
    with pytest.raises(UsageError, match="use compute with dedicated access mode"):
        exec(cells()[0], {"spark": SimpleNamespace(), "dbutils": Utilities(base=base)})


def test_as_a_script_it_makes_a_session_and_ends(tmp_path: Path) -> None:
    surroundings = {"SHOP_BASE": "", "TMPDIR": str(tmp_path), "SPARK_LOCAL_IP": "127.0.0.1"}
    env = {**os.environ, **surroundings, "SPARK_SUBMIT_OPTS": java_options()}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    (base,) = tmp_path.glob("spark-abs-*")
    assert is_right(base)
    assert "before-release" in done.stdout


def test_the_tour_takes_the_session_that_is_there_and_leaves_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tour = json.loads((NOTEBOOKS / "tour.ipynb").read_text(encoding="utf-8"))
    code = {cell["id"]: "".join(cell["source"]) for cell in tour["cells"]}
    monkeypatch.setenv("TOUR_DIRECTORY", str(tmp_path))
    names: dict[str, Any] = {}
    exec(code["session"], names)
    assert names["spark"] is SparkSession.getActiveSession()
    assert Path(names["root"]).is_relative_to(tmp_path)
    exec(code["end"], names)
    assert spark.range(1).count() == 1
