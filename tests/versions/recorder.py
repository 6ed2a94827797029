"""A plugin of pytest that records what became of each test, for the support matrix.

    pytest -p tests.versions.recorder --outcomes FILE [--keep-outcomes] …

Tests of features that this Spark lacks are left out, and with `--keep-outcomes` those that have passed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from spark_abs.spark.versions import PYSPARK, rewrites_state
from tests.versions.features import feature_of
from tests.versions.matrix import PASSED, Environment, Outcomes, Result, code_digest, line_of

SPARK = "spark"
"""The property by which a test says that it ran on a version of Spark that is not this process's."""

_PHASES = {"setup", "call", "teardown"}


class Recorder:
    """Hears of each phase of each test, and writes the outcomes at the end."""

    def __init__(self, file: Path, kept: Mapping[str, Result]) -> None:
        self._file = file
        self._kept = kept
        self._code = code_digest()
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid, []).append(report)

    def pytest_sessionfinish(self) -> None:
        tests = {test: _result(reports) for test, reports in self._reports.items()}
        environment = Environment(PYSPARK, platform.python_version(), pd.__version__, java_release())
        code = self._code if self._code == code_digest() else "changed in between"
        outcomes = Outcomes(environment, code, rewrites_state(), {**self._kept, **tests})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(outcomes.to_json(), encoding="utf-8")


def _result(reports: list[pytest.TestReport]) -> Result:
    told = {str(value) for report in reports for name, value in report.user_properties if name == SPARK}
    lines = tuple(sorted(told)) or (line_of(PYSPARK),)
    outcomes = {report.outcome for report in reports}
    if "failed" in outcomes:
        return Result("failed", lines)
    whole = {report.when for report in reports} == _PHASES
    return Result(PASSED if whole and outcomes == {"passed"} else "not run", lines)


def java_release() -> str:
    """Return the release of the Java that pyspark starts."""
    home = os.environ.get("JAVA_HOME")
    command = [str(Path(home, "bin/java")) if home else "java", "-version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r'version "([^"]+)"', said)
    assert found is not None, said
    return found[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="where to write what became of each test")
    parser.addoption("--keep-outcomes", action="store_true", help="keep those of tests that do not run now")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(file, _kept(config)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests as said above."""
    if config.getoption("--outcomes") is None:
        return
    passed = {test for test, result in _kept(config).items() if result.outcome == PASSED}
    wanted = [item for item in items if item.nodeid not in passed and _is_there(item.nodeid)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


def _is_there(test: str) -> bool:
    feature = feature_of(test)
    return feature is None or not feature.rewrites_state or rewrites_state()


def _kept(config: pytest.Config) -> Mapping[str, Result]:
    """Return the recorded outcomes of this code, if they are to be kept."""
    file: Path = config.getoption("--outcomes")
    if not config.getoption("--keep-outcomes") or not file.exists():
        return {}
    found = Outcomes.from_json(file.read_text(encoding="utf-8"))
    return found.tests if found.code == code_digest() else {}
