"""A Python process that comes up too slowly for Spark costs a restart of its stage, and no job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_abs.job import Job
from spark_abs.store.history import History, HistoryEvent
from spark_abs.store.root import Root
from tests.crash.small_job import totals_in_python
from tests.job_support import Feed
from tests.spark.conftest import Start

SLOW = """#!/bin/sh
case "$*" in *transform_with_state_driver_worker*) mkdir "{once}" 2>/dev/null && sleep 11 ;; esac
exec "{python}" "$@"
"""
"""Starts Python; once it keeps a process that Spark waits for longer than Spark waits."""


def test_a_function_whose_process_comes_up_too_slowly_is_started_again(
    spark: SparkSession, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, once = tmp_path / "python", tmp_path / "once"
    python.write_text(SLOW.format(once=once, python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    feed = Feed(spark, tmp_path / "pairs", "key string, amount long")
    feed.write({"key": "a", "amount": 1}, {"key": "b", "amount": 2}, {"key": "a", "amount": 3})

    job = Job("slow", root=str(tmp_path / "root"), spark=spark)
    totals = job.stage("totals", [job.source("pairs", feed.stream())], totals_in_python, output_mode="update")
    job.sink("totals", totals, table=str(tmp_path / "totals"))
    assert start(job, available_now=True).await_termination(240)

    assert once.exists()
    found = spark.read.format("delta").load(str(tmp_path / "totals")).collect()
    assert sorted(tuple(row) for row in found) == [("a", 2, 4), ("b", 1, 2)]
    events = History(Root(str(tmp_path / "root"))).read().to_pylist()
    (restarted,) = (row for row in events if row["event"] == HistoryEvent.STAGE_RESTARTED)
    assert restarted["stage"] == "totals"
    assert "Python worker to connect back" in restarted["detail"]
