"""Several checkpoints open at once, given up for younger ones or for their weight, cancelled on their way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.channels.entries import entry_of
from spark_abs.cli.main import main
from spark_abs.errors import AbortReason, ConfigError, Refused
from spark_abs.job import Job
from spark_abs.model import AttemptId, BatchId, Entry, StageId, channel_id
from spark_abs.observe.listing import event_rows
from spark_abs.stages.native import NativeLog
from spark_abs.store.activity import Skips, read_activity
from spark_abs.store.control import Control
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.history import HistoryEvent
from spark_abs.store.log import read_commit
from spark_abs.store.root import Root
from tests.job_support import Feed, events, eventually, hold_until, manifests, read_table
from tests.spark.conftest import Start
from tests.spark.test_job_life import Line

WAITING = HistoryEvent.STAGE_WAITING


@dataclass
class Pair:
    """Two sources, a stage that reads both, and one after it with a table: left, right -> both -> tail."""

    spark: SparkSession
    tmp: Path
    failpoint: Failpoint = no_failpoint
    left: Feed = field(init=False)
    right: Feed = field(init=False)

    def __post_init__(self) -> None:
        self.root = str(self.tmp / "root")
        self.left = Feed(self.spark, self.tmp / "left", "id long")
        self.right = Feed(self.spark, self.tmp / "right", "id long")

    def write(self, feed: Feed, files: int = 1) -> None:
        for _ in range(files):
            feed.write({"id": len(feed.files)})

    def job(self, **settings: Any) -> Job:
        given = {"interval": "1h", **settings}
        job = Job("pair", root=self.root, spark=self.spark, **given)
        job.failpoint = lambda at: self.failpoint(at)
        left, right = job.source("left", self.left.stream()), job.source("right", self.right.stream())
        both = job.stage("both", [left, right], lambda a, b: a.union(b))
        job.sink("tail", job.stage("tail", [both], lambda frame: frame), table=str(self.tmp / "tail"))
        return job

    def has_all(self) -> bool:
        return self.rows() == sorted([*range(len(self.left.files)), *range(len(self.right.files))])

    def rows(self) -> list[int]:
        table = self.tmp / "tail"
        return sorted(read_table(table)["id"].to_pylist()) if (table / "_delta_log").exists() else []

    def markers(self, stage: str) -> list[tuple[str, int]]:
        """Return the markers in the log of a stage's channel, in order."""
        found = []
        for entry in self.log(stage):
            found += [("cancel", int(entry.cancel))] if entry.cancel is not None else []
            found += [("barrier", int(entry.barrier.id))] if entry.barrier is not None else []
        return found

    def log(self, stage: str) -> list[Entry]:
        root, found = Root(self.root), list[Entry]()
        table = root.path(root.channel(channel_id(stage)))
        while (commit := read_commit(root.fs, table, len(found))) is not None:
            found.append(entry_of(commit))
        return found

    def taken(self, source: str) -> bool:
        """Say whether a source has run a batch for each of its files."""
        feed = self.left if source == "left" else self.right
        return sum(entry.rows for entry in self.log(source)) == len(feed.files)

    def claimed(self) -> int:
        return int(Control.open(Root(self.root)).state.last_claimed)

    def aborted(self) -> dict[int, AbortReason | str]:
        return {int(a.id): a.reason for a in Control.open(Root(self.root)).state.aborted}


@pytest.fixture
def pair(spark: SparkSession, tmp_path: Path) -> Pair:
    return Pair(spark, tmp_path)


def test_a_younger_checkpoint_that_completes_first_subsumes_the_older_one(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Two are open at once; the copy of the older one hangs, and nobody waits for it (P3, P8)."""
    line = Line(spark, tmp_path)
    hold, copies = hold_until("capture.twice.copy.before", lambda: 1 in line.aborted()), count()
    line.failpoint = lambda at: hold(at) if at == "capture.twice.copy.before" and not next(copies) else None
    line.write(2)
    run = start(line.job(interval="300ms", max_concurrent=2, skip_unchanged=False))
    eventually(run, lambda: len(manifests(line.root)) > 1, "two checkpoints completed")
    run.stop()
    (first,) = [row for row in events(line.root, HistoryEvent.ABORTED) if row["checkpoint"] == 1]
    assert (first["reason"], first["detail"]) == ("subsumed", "checkpoint 2 is complete")
    assert manifests(line.root)[0].id == 2
    order = [f"{row.event} {row.checkpoint}" for row in event_rows(Root(line.root))]
    assert order.index("triggered 2") < order.index("aborted 1")
    line.assert_all_once()
    line.assert_cuts()


def test_a_stage_passes_a_cancel_marker_on_where_the_barrier_would_be(pair: Pair, start: Start) -> None:
    """The checkpoint runs out of time before `both` has its cut: its channel cancels it (P9).

    The time is taken from it while the job runs. The next one does not copy again what it had copied.
    """
    told, through, seen = threading.Event(), threading.Event(), set[str]()
    hold = hold_until("batch.both.find.before", lambda: pair.claimed() == 0 or told.is_set())
    sources = {f"batch.{name}.read.before" for name in ("left", "right")}

    def failpoint(at: str) -> None:
        """Let the barrier come with rows: without any the stages would take it where they stand."""
        if through.is_set():
            seen.add(at)
            if at in sources:
                hold_until(at, pair.claimed)(at)
        hold(at)

    pair.failpoint = failpoint
    for feed in (pair.left, pair.right):
        pair.write(feed)
    run = start(pair.job())
    eventually(run, pair.has_all, "the first rows through")
    through.set()
    for feed in (pair.left, pair.right):
        pair.write(feed)
    eventually(run, lambda: sources <= seen, "batches that carry the barrier")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint)
        eventually(
            run, lambda: {"ack.left.before", "ack.right.before"} <= seen, "the sources have their cuts"
        )
        assert run.set(timeout="1ms").startswith("timeout 10m -> 1ms; at its next start")
        with pytest.raises(Refused, match=r"aborted: expired, after 1 ms without both, .*tail"):
            asked.result()
    packed = {path.name for path in Path(pair.root, "state").glob("pack-*")}
    run.set(timeout="10m")
    told.set()
    eventually(run, lambda: pair.markers("both"), "a marker in the channel of `both`")
    assert pair.markers("left") == pair.markers("right") == [("barrier", 1)]
    assert pair.markers("both") == [("cancel", 1)]
    through.clear()
    for feed in (pair.left, pair.right):
        pair.write(feed)
    eventually(run, pair.has_all, "all rows through")
    assert run.checkpoint() == 2
    run.stop()
    (found,) = manifests(pair.root)
    assert {f.at.pack for s in found.stages for f in s.files if s.stage in ("left", "right")} & packed
    changed = [row["detail"] for row in events(pair.root, HistoryEvent.SETTINGS_CHANGED)]
    assert changed == ["timeout 10m -> 1ms", "timeout 1ms -> 10m"]


def told_skips(root: str) -> Skips:
    found = read_activity(Root(root))
    assert found is not None
    return found.skips


def test_settings_are_changed_by_a_command_and_forgotten_at_the_next_start(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Checkpoints begin at once where none would have begun for an hour (P3), and without rows only one."""
    line = Line(spark, tmp_path)
    line.write(1)
    run = start(line.job())
    result = CliRunner().invoke(main, ["set", line.root, "interval=100ms"])
    assert (result.exit_code, "interval 1h -> 100ms" in result.stdout) == (0, True)
    eventually(run, line.has_all, "all rows through")
    native = NativeLog(Root(line.root).native("native", AttemptId(1), StageId("twice")))

    def stands() -> tuple[int, BatchId]:
        return Control.open(Root(line.root)).state.last_claimed, native.newest_planned()

    job = spark_abs.open(line.root)
    eventually(run, lambda: job.status().skipped > 2, "checkpoints without news are skipped")
    before = stands()
    eventually(run, lambda: job.status().skipped > 20, "no batch of Spark and no claim came of them")
    assert stands() == before
    found = job.status()
    assert found.age_ms == found.unchanged_ms
    assert "skip_unchanged True -> False" in run.set(skip_unchanged=False)
    eventually(run, lambda: stands()[0] > before[0] + 1, "all are taken")
    eventually(run, lambda: told_skips(line.root).number == 0, "none is skipped since the last one")
    assert told_skips(line.root).in_run > 20
    with pytest.raises(ConfigError, match="cannot be changed while a job runs"):
        run.set(keep=2)  # type: ignore[call-arg]  # what a type checker says before
    # Each would do, and not both: two callers at once.
    both = [run._coordination.change(given) for given in ({"mode": "unaligned"}, {"aligned_timeout": "30s"})]
    assert [answer.get(timeout=60).ok for answer in both] == [True, False]
    with pytest.raises(ConfigError, match="alignedTimeout is for checkpoints that begin aligned"):
        run.set(aligned_timeout="30s")
    run.stop()
    taken = manifests(line.root)[-1].id
    again = start(line.job())
    assert "nothing changed" in again.set(interval="1h")
    again.stop()
    assert manifests(line.root)[-1].id == taken


def test_a_batch_planned_while_a_bounded_run_ends_is_left_to_the_next_run(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A stage that also reads a native stream: its last cut does not wait for the refused batch (P10)."""
    root, table = str(tmp_path / "root"), tmp_path / "mixed"
    numbers, extra = Feed(spark, tmp_path / "numbers", "id long"), Feed(spark, tmp_path / "extra", "id long")
    native = NativeLog(Root(root).native("native", AttemptId(1), StageId("mixed")))

    def one_more(at: str) -> None:
        if at == "end.mixed.halt" and len(extra.files) == 1 and native.newest_committed() >= 0:
            extra.write({"id": 3})
            planned = hold_until(at, lambda: native.idle_at() is None)
            planned(at)

    def rows(failpoint: Failpoint) -> tuple[list[int], int]:
        job = Job("mixed", root=root, spark=spark, interval="1h", timeout="2m")
        job.failpoint = failpoint
        source = job.source("numbers", numbers.stream())
        mixed = job.stage("mixed", [source, extra.stream()], lambda one, two: one.union(two))
        job.sink("mixed", mixed, table=str(table))
        assert start(job, available_now=True).await_termination(100)
        return sorted(read_table(table)["id"].to_pylist()), len(manifests(root))

    numbers.write({"id": 1})
    extra.write({"id": 2})
    assert rows(one_more) == ([1, 2], 1)
    assert rows(no_failpoint) == ([1, 2, 3], 2)


def test_an_alignment_that_holds_up_too_much_is_given_up(pair: Pair, start: Start) -> None:
    """`right` does not get on while `left` writes behind its barrier: its rows go on all the same (P6)."""
    go_on = threading.Event()
    pair.failpoint = hold_until(
        "batch.right.wait.before", lambda: len(pair.right.files) < 2 or go_on.is_set()
    )
    for feed in (pair.left, pair.right):
        pair.write(feed)
    run = start(pair.job(alignment_limit="1kb"))
    eventually(run, pair.has_all, "the first rows through")
    pair.write(pair.right)  # planned, and held
    right = NativeLog(Root(pair.root).native("native", AttemptId(1), StageId("right")))
    eventually(run, lambda: right.idle_at() is None, "a batch of `right` planned")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint)
        eventually(run, lambda: pair.markers("left"), "barrier 1 in the channel of `left`")
        while not asked.done():
            pair.write(pair.left)
            eventually(run, lambda: asked.done() or pair.taken("left"), "another file taken")
        with pytest.raises(Refused, match=r"alignment-limit, stage both: \d+ bytes have queued up behind"):
            asked.result()
    left = [*range(len(pair.left.files)), 0]
    eventually(run, lambda: pair.rows() == sorted(left), "all rows of `left` through, `right` held")
    go_on.set()
    eventually(run, pair.has_all, "all rows through")
    assert run.checkpoint() == 2
    run.stop()
    (aborted,) = events(pair.root, HistoryEvent.ABORTED)
    assert aborted["reason"] == "alignment-limit"
    (waited,) = [r for r in event_rows(Root(pair.root)) if (r.event, r.stage) == (WAITING, "both")]
    assert (waited.alignment_bytes or 0) > 1024
    (found,) = manifests(pair.root)
    assert {s.stage for s in found.stages} == {"left", "right", "both", "tail"}
