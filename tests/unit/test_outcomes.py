"""What a run of pytest leaves of its tests for the support matrix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spark_abs.spark.versions import PYSPARK
from tests.markdown_support import HERE
from tests.versions.matrix import Outcomes, Result, code_digest, line_of

TESTS = """
import pytest

def test_passes(): pass

def test_fails(): assert False

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_fails_at_its_end(broken): pass

def test_is_skipped(): pytest.skip()

def test_ran_elsewhere(record_property):
    record_property("spark", "4.1")
    record_property("spark", "4.0")
"""


def test_only_a_test_whose_every_phase_passed_has_passed(tmp_path: Path) -> None:
    """Also where another process runs the test."""
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "below" / "outcomes.json"
    options = ["-q", "-n", "1", "-p", "tests.versions.recorder", "--outcomes", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = Outcomes.from_json(file.read_text())
    here = (line_of(PYSPARK),)
    assert {test.rpartition("::")[2]: result for test, result in found.tests.items()} == {
        "test_passes": Result("passed", here),
        "test_fails": Result("failed", here),
        "test_fails_at_its_end": Result("failed", here),
        "test_is_skipped": Result("not run", here),
        "test_ran_elsewhere": Result("passed", ("4.0", "4.1")),
    }
    assert (found.environment.spark, found.code) == (PYSPARK, code_digest())
