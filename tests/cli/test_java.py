"""Commands that need Spark where there is no Java: one error, and nothing half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.root_support import SmallJob
from tests.unit.observe.test_state_at import AGGREGATION, Jobs


def without_java(*command: str) -> str:
    """Run a command in a process of its own, as this one may have a JVM; return its last line."""
    done = subprocess.run(
        [sys.executable, "-c", "from spark_abs.cli.main import main; main()", *command],
        env={**os.environ, "JAVA_HOME": "/nowhere/jdk"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.count("Traceback"), done.stderr.count("Traceback")) == (1, 0, 0)
    said = done.stderr.splitlines()[-1]
    assert "Java 17 is missing, or JAVA_HOME is wrong (JAVA_HOME is /nowhere/jdk)" in said
    return said


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_restore_that_needs_spark_changes_nothing(job: SmallJob, output: str) -> None:
    job.checkpoint(1)
    job.step(2)
    DeltaTable(job.table).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    before = job.state
    said = without_java("restore", job.root.uri, "--to", "1", "--yes", "--output", output)
    if output == "json":
        error = json.loads(said)
        assert (error["error"], error["exit_code"]) == ("SparkNotStarted", 1)
    assert job.state == before
    assert job.rows() == [1, 2]


def test_state_says_it(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    jobs.checkpoint(AGGREGATION)
    without_java("state", jobs.root.uri, "match")
