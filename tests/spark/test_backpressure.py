"""Bounded channels on Spark: a producer waits for its consumer, barriers do not, and a stop gets through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_abs.channels.follow import Follower
from spark_abs.errors import StageFailed
from spark_abs.job import Job
from spark_abs.model import AttemptId, Branch, Entry, StageId, Version
from spark_abs.observe.listing import event_rows
from spark_abs.stages.native import NativeLog
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import Feed, assert_tables_at_every_cut, eventually, hold_until, read_table
from tests.spark.conftest import Start

ROOM = 3
"""Entries that the channel takes."""


@dataclass
class Pair:
    """A source, a channel with little room, and a stage after it that can be held: `numbers` -> `slow`."""

    spark: SparkSession
    tmp: Path
    hold: Callable[[str], None] = lambda _: None
    backlogs: list[int] = field(default_factory=list)
    """What the channel held, each time that the source had written to it."""

    def __post_init__(self) -> None:
        self.root = Root(str(self.tmp / "root"))
        self.table = self.tmp / "tables/slow"
        self.feed = Feed(self.spark, self.tmp / "in", "id long")

    def write(self, files: int) -> None:
        for _ in range(files):
            self.feed.write({"id": len(self.feed.files)})

    def job(self) -> Job:
        job = Job(
            "pair", root=self.root.uri, spark=self.spark, interval="1h",
            capacity_entries=ROOM, max_entries_per_batch=1,
        )  # fmt: skip
        job.failpoint = self._failpoint
        slow = job.stage("slow", [job.source("numbers", self.feed.stream())], lambda frame: frame)
        job.sink("slow", slow, table=str(self.table))
        return job

    def _failpoint(self, at: str) -> None:
        if at == "batch.numbers.commit-main.after":
            self.backlogs.append(self.backlog())
        self.hold(at)

    def unread(self) -> list[Entry]:
        """Return the entries with rows that the consumer has not durably read."""
        consumed = NativeLog(self.root.native("native", AttemptId(1), StageId("slow"))).consumed()
        behind = consumed[0].version if consumed else Version(0)
        path = self.root.path("channels/numbers.main")
        entries = Follower(self.root.fs, path, [Branch(AttemptId(1), None)]).after(behind)
        return [entry for entry in entries if entry.files]

    def backlog(self) -> int:
        return len(self.unread())

    def source_waits(self) -> bool:
        """Say whether the channel is full and the source has planned its next batch."""
        native, unread = (
            NativeLog(self.root.native("native", AttemptId(1), StageId("numbers"))),
            self.unread(),
        )
        return len(unread) == ROOM and native.newest_planned() > max(entry.batch for entry in unread)

    def has_all(self) -> bool:
        return len(self.rows()) >= len(self.feed.files)

    def rows(self) -> list[int]:
        return sorted(read_table(self.table)["id"].to_pylist())


@pytest.fixture
def pair(spark: SparkSession, tmp_path: Path) -> Pair:
    return Pair(spark, tmp_path)


def test_a_full_channel_holds_its_producer_and_lets_a_barrier_through(pair: Pair, start: Start) -> None:
    """The source stops at the channel's capacity, and goes on with the batch of a barrier, once (P19).

    A job that is stopped while a stage waits does stop, and the next run goes on after it.
    """
    freed = threading.Event()
    pair.hold = hold_until("batch.slow.files.before", freed.is_set)
    pair.write(10)
    run = start(pair.job())
    eventually(run, pair.source_waits, "the channel is full and the source waits")
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(run.checkpoint)
        eventually(run, lambda: pair.backlog() == ROOM + 1, "the barrier's batch is in the channel")
        freed.set()
        assert checkpoint.result() == 1
    eventually(run, pair.has_all, "all rows through")
    assert max(pair.backlogs) == ROOM + 1

    stopped = threading.Event()
    pair.hold = hold_until("batch.slow.files.before", stopped.is_set)
    pair.write(ROOM + 2)
    eventually(run, pair.source_waits, "the channel is full again")
    source = run.query("numbers")
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run.stop)
        eventually(run, lambda: not source.isActive, "the source has given up waiting")
        stopped.set()
        end.result()
    again = start(pair.job())
    eventually(again, pair.has_all, "the rest through")
    again.checkpoint()
    again.stop()
    assert pair.rows() == list(range(len(pair.feed.files)))
    assert_tables_at_every_cut(
        pair.spark, pair.root.uri, {"numbers": pair.feed}, {"slow": "SELECT checkpoint, id FROM numbers"},
        pair.tmp / "tables",
    )  # fmt: skip


def test_a_consumer_that_fails_while_its_producer_waits_is_the_one_that_is_named(
    pair: Pair, start: Start
) -> None:
    """Nobody waits for credit of a stage that has failed. `history/` says who waited how long (P20)."""

    def fail_when_full(at: str) -> None:
        if at == "batch.slow.files.before":
            hold_until(at, lambda: pair.backlog() == ROOM)(at)
            raise ValueError("no room for this")

    pair.hold = fail_when_full
    pair.write(ROOM + 3)
    run = start(pair.job(), available_now=True)
    with pytest.raises(StageFailed, match="stage 'slow' failed in batch 0: ValueError: no room for this"):
        run.await_termination(120)
    waiting = threading.Event()

    def source_has_waited() -> bool:
        if pair.source_waits():
            waiting.set()
        return waiting.is_set()

    pair.hold = hold_until("batch.slow.files.before", source_has_waited)
    assert start(pair.job(), available_now=True).await_termination(120)
    acked = [e for e in event_rows(pair.root) if e.event is HistoryEvent.STAGE_ACKED]
    waited = {e.stage: e.backpressured_ms for e in acked}
    assert waited[StageId("numbers")]
    assert waited[StageId("slow")] == 0
    assert pair.rows() == list(range(len(pair.feed.files)))
    assert max(pair.backlogs) <= ROOM + 1
