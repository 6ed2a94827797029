"""Requests to a job that runs: pause its sources, restart a stage, trigger and cancel checkpoints."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from spark_abs.cli.main import main
from spark_abs.errors import AbortReason, Refused
from spark_abs.model import AttemptId, StageId
from spark_abs.observe.client import asker
from spark_abs.stages.native import NativeLog
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import events, eventually, files_read, hold_until, manifests
from tests.spark.conftest import Start
from tests.spark.test_job_life import Line


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_a_paused_source_holds_its_batch_over_a_restart_while_checkpoints_go_on(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Each row is there once, and each cut is exact: the held batch is in none of them."""
    line = Line(spark, tmp_path)
    native = NativeLog(Root(line.root).native("native", AttemptId(1), StageId("numbers")))
    line.write(2)
    run = start(line.job())
    eventually(run, line.has_all, "all rows before the pause")
    assert call("pause", line.root).stdout == "paused: numbers\n"
    line.write(2)
    eventually(run, lambda: native.newest_planned() == 2, "a batch is planned")
    taken = call("checkpoint", line.root)
    assert (taken.exit_code, taken.stdout) == (0, "checkpoint 1 is complete\n")
    first = call("status", line.root).stdout.splitlines()[0]
    assert (first.startswith("PAUSED: numbers for "), f"by {asker()}; job line runs" in first) == (True, True)
    assert call("health", line.root).exit_code == 1
    run.stop()
    with pytest.raises(Refused, match=r"sources are paused: numbers .* `spark-abs resume"):
        start(line.job(), available_now=True)

    again = start(line.job())
    assert again.checkpoint() == 2
    before = again.query("numbers").runId
    assert call("restart", line.root, "numbers").stdout == "stage 'numbers' runs again\n"
    assert again.query("numbers").runId != before
    assert (native.newest_committed(), len(line.rows("numbers"))) == (1, 6)
    with pytest.raises(Refused, match="'twice' is no source of the job; its sources are: numbers"):
        again.pause("twice")
    assert again.resume() == "resumed: numbers"
    eventually(again, line.has_all, "all rows after the pause")
    assert again.restart("twice") == "stage 'twice' runs again"
    line.write(1)
    eventually(again, line.has_all, "all rows after the restart")
    assert again.checkpoint() == 3
    again.stop()
    assert call("health", line.root, "--max-age", "1h").exit_code == 1  # it was stopped
    assert call("resume", line.root).stdout == "no source was paused\n"
    assert [files_read(manifest, "numbers") for manifest in manifests(line.root)] == [2, 2, 5]
    line.assert_all_once()
    line.assert_cuts()
    asked = [(row["kind"], row["reason"], row["by"]) for row in events(line.root, HistoryEvent.COMMAND)]
    kinds = ["pause", "checkpoint", "checkpoint", "restart", "pause", "resume"]
    kinds += ["restart", "checkpoint", "resume"]
    reasons = ["refused" if n == 4 else "done" for n in range(len(kinds))]
    assert asked == [(kind, why, asker()) for kind, why in zip(kinds, reasons, strict=True)]


def test_an_open_checkpoint_is_cancelled_and_the_next_one_completes(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    line = Line(spark, tmp_path)
    line.write(1)
    hold, copies = hold_until("capture.twice.copy.before", lambda: 1 in line.aborted()), count()
    line.failpoint = lambda at: hold(at) if at == "capture.twice.copy.before" and not next(copies) else None
    run = start(line.job(interval="300ms"))
    eventually(run, line.claimed, "a checkpoint is open")
    said = call("cancel", line.root, "1")
    assert (said.exit_code, said.stdout) == (0, "checkpoint 1 is cancelled\n")
    assert line.aborted() == {1: AbortReason.CANCELLED}
    eventually(run, lambda: manifests(line.root), "the next checkpoint")
    late = call("cancel", line.root, "1")
    assert (late.exit_code, "checkpoint 1 is aborted already" in late.stderr) == (1, True)
    run.stop()
    assert "no run of job 'line' is alive" in call("pause", line.root).stderr
    (row,) = (row for row in events(line.root, HistoryEvent.ABORTED) if row["checkpoint"] == 1)
    assert (row["reason"], row["detail"]) == ("cancelled", f"by {asker()}")
    assert Control.open(Root(line.root)).state.paused == ()
    line.assert_all_once()
