"""Jars that are known are named; what others configure is theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_abs.spark.gateway import KnownJars, may_name_jars, quiet_log

OPTIONS = "SPARK_SUBMIT_OPTS"


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (OPTIONS, "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_jars_are_known_while_all_of_them_are_there(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jar", tmp_path / "a two.jar"
    one.write_bytes(b"1")
    two.write_bytes(b"22")
    known = KnownJars(["4.2.0", "4.4.0"])
    assert known.find() == ()
    known.keep(f"{one.as_uri()},{two.as_uri()}")
    assert known.find() == (str(one), str(two))
    assert KnownJars(["4.2.0", "4.5.0"]).find() == ()
    two.write_bytes(b"2")  # not whole
    assert known.find() == ()
    two.unlink()
    assert known.find() == ()


def test_a_list_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    known = KnownJars([])
    known.keep("file:///is/not/there.jar")
    assert known.find() == ()
    (tmp_path / "cache/spark_abs").mkdir(parents=True)
    for text in ("{", "[1]"):
        known._path.write_text(text)
        assert known.find() == ()


def test_whoever_says_something_about_jars_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert may_name_jars({"spark.master": "local"})
    assert not may_name_jars({"spark.jars.ivy": "/elsewhere"})
    (tmp_path / "spark-defaults.conf").write_text("spark.jars /mine.jar\n")
    assert not may_name_jars({})
    (tmp_path / "spark-defaults.conf").write_text("spark.master local\n")
    assert may_name_jars({})
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--jars mine.jar pyspark-shell")
    assert not may_name_jars({})


def test_a_configuration_of_the_log_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OPTIONS, "-Dmine=1")
    with quiet_log():
        assert os.environ[OPTIONS].startswith("-Dmine=1 -Dlog4j2.configurationFile=file:///")
    with quiet_log(structured=True):
        assert os.environ[OPTIONS].endswith("/log4j2-json.properties")
        assert os.environ[OPTIONS].count(",file:///") == 1
    assert os.environ[OPTIONS] == "-Dmine=1"
    (tmp_path / "log4j2.properties").touch()
    with quiet_log():
        assert os.environ[OPTIONS] == "-Dmine=1"
