"""A bounded run ends when its sinks outside have all rows, however long they take, or are out of reach."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.errors import CheckpointsFailed, SinkUnreachable
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink
from spark_abs.store.failpoint import Failpoint, no_failpoint
from tests.job_support import Feed

PATIENCE = 500
"""The setting `stopTimeout`, in milliseconds."""


class Slow(TwoPhaseSink):
    """Keeps ids in memory, and takes rows when it may."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        self.newest: Mark | None = None
        self.ids: list[int] = []
        self.away = False

    def mark(self, owner: Owner) -> Mark | None:
        return self.newest

    def recover(self, owner: Owner) -> Mark | None:
        return self.newest

    def commit(self, epoch: Epoch, rows: Rows) -> None:
        self.asked.set()
        if self.away:
            raise SinkUnreachable("no route")
        assert self.may.wait(60)
        self.ids += [number for batch in rows for number in batch.column("id").to_pylist()]
        self.newest = epoch.mark

    def abort(self, owner: Owner, back: Mark, *, keep: bool) -> None:
        raise NotImplementedError


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    made = Feed(spark, tmp_path / "in")
    for number in range(3):
        made.write({"id": number})
    return made


def bounded(spark: SparkSession, tmp_path: Path, failpoint: Failpoint = no_failpoint) -> spark_abs.Job:
    """Return a job that takes a checkpoint only at its end."""
    root = str(tmp_path / "root")
    job = spark_abs.Job("sending", root=root, spark=spark, interval="1d", stop_timeout=f"{PATIENCE}ms")
    job.failpoint = failpoint
    return job


def begin(
    spark: SparkSession,
    tmp_path: Path,
    feed: Feed,
    sink: TwoPhaseSink,
    failpoint: Failpoint = no_failpoint,
) -> spark_abs.Run:
    job = bounded(spark, tmp_path, failpoint)
    job.sink("out", job.source("numbers", feed.stream()), two_phase=sink)
    return job.start(available_now=True)


def stop_while_it_commits(run: spark_abs.Run, sink: Slow) -> None:
    assert sink.asked.wait(60)
    with pytest.raises(SinkUnreachable, match=r"rows were not sent: sink 'out' .* start the job again"):
        run.stop()


def test_a_bounded_run_waits_for_a_sink_that_takes_longer_than_a_stop_may(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    sink = Slow()
    run = begin(spark, tmp_path, feed, sink)
    assert sink.asked.wait(60), "the last checkpoint is complete"
    assert not run.await_termination(4 * PATIENCE / 1000)
    sink.may.set()
    assert run.await_termination(60)
    assert sorted(sink.ids) == [0, 1, 2]


def test_a_stop_ends_the_wait_and_the_next_run_sends_the_rest(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    sink = Slow()
    stop_while_it_commits(begin(spark, tmp_path, feed, sink), sink)
    assert not sink.ids
    other = Slow()
    other.may.set()
    assert begin(spark, tmp_path, feed, other).await_termination(60)
    assert sorted(other.ids) == [0, 1, 2]


def test_a_sink_out_of_reach_for_as_long_as_a_stop_may_take_fails_a_bounded_run(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    sink = Slow()
    sink.away = True
    run = begin(spark, tmp_path, feed, sink)
    with pytest.raises(SinkUnreachable, match="no route"):
        run.await_termination(60)


def test_a_sink_that_still_commits_for_a_run_before_is_waited_for(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    """The job is started again with the same object: two runs must not use it at once."""
    sink = Slow()
    stop_while_it_commits(begin(spark, tmp_path, feed, sink), sink)
    threading.Timer(2, sink.may.set).start()
    assert begin(spark, tmp_path, feed, sink).await_termination(60)
    assert sink.ids == [0, 1, 2]


def test_a_sink_out_of_reach_does_not_end_the_wait_for_another(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    """The one that sends has all the time that it needs; then the run fails with the one that cannot."""
    away, slow = Slow(), Slow()
    away.away = True
    job = bounded(spark, tmp_path)
    source = job.source("numbers", feed.stream())
    job.sink("away", source, two_phase=away)
    job.sink("slow", source, two_phase=slow)
    run = job.start(available_now=True)
    assert slow.asked.wait(60)
    assert not run.await_termination(8 * PATIENCE / 1000)
    slow.may.set()
    with pytest.raises(SinkUnreachable, match=r"rows were not sent: sink 'away' .* no route; start"):
        run.await_termination(60)
    assert sorted(slow.ids) == [0, 1, 2]


def test_a_bounded_run_fails_if_its_sinks_lack_the_last_checkpoint(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    def no_room(at: str) -> None:
        if at == "capture.numbers.copy.before":
            raise OSError("no room")

    sink = Slow()
    sink.may.set()
    run = begin(spark, tmp_path, feed, sink, no_room)
    with pytest.raises(
        CheckpointsFailed, match=r"at the end of input: .* no room; .* the new run sends them"
    ):
        run.await_termination(60)
    assert not sink.ids
    assert begin(spark, tmp_path, feed, sink).await_termination(60)
    assert sorted(sink.ids) == [0, 1, 2]
