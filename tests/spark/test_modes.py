"""Checkpoints that do not wait on real Spark: unaligned (P16), unaligned after a time, at least once (P7)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs import GroupState, flat_map_groups_with_state
from spark_abs.errors import Refused
from spark_abs.job import Job
from spark_abs.manifest import Manifest
from spark_abs.model import CheckpointId, CheckpointMode, StageId, channel_id
from spark_abs.store.history import HistoryEvent
from tests.job_support import Feed, events, eventually, manifests, read_table
from tests.spark.conftest import Start

FILES = 5


@dataclass
class Hold:
    """A failpoint that stops whoever comes to a point, until it is opened."""

    point: str

    def __post_init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, at: str) -> None:
        if at == self.point:
            self.reached.set()
            assert self.opened.wait(180), f"held at {at}"


class Paced:
    """A failpoint that lets whoever comes to a point go on once for each step, and tells what was passed."""

    def __init__(self, point: str) -> None:
        self.point, self.steps, self.seen = point, threading.Semaphore(0), set[str]()
        self.arrivals = 0

    def __call__(self, at: str) -> None:
        self.seen.add(at)
        if at == self.point:
            self.arrivals += 1
            assert self.steps.acquire(timeout=180), f"held at {at}"


class Two:
    """Two sources, a stage that reads both, and one that reads the first alone; a sink behind each."""

    def __init__(self, spark: SparkSession, path: Path, **settings: Any) -> None:
        self.spark, self.root, self.settings = spark, str(path / "root"), settings
        self.clicks, self.orders = Feed(spark, path / "clicks"), Feed(spark, path / "orders")
        self.tables = path / "tables"

    def job(self, failpoint: Callable[[str], None] = lambda _: None) -> Job:
        job = Job("modes", root=self.root, spark=self.spark, interval="1h", **self.settings)
        job.failpoint = failpoint
        clicks = job.source("clicks", self.clicks.stream())
        orders = job.source("orders", self.orders.stream())
        both = job.stage("both", [clicks, orders], lambda a, b: a.unionByName(b))
        alone = job.stage("alone", [clicks], lambda a: a)
        job.sink("all", both, table=str(self.tables / "all"))
        job.sink("clicked", alone, table=str(self.tables / "clicked"))
        return job

    def feed(self, feed: Feed, first: int) -> None:
        feed.write(*({"id": first + n, "k": n, "v": n, "ts": first + n} for n in range(3)))

    def rows(self, sink: str) -> Counter[int]:
        return Counter(read_table(self.tables / sink)["id"].to_pylist())

    def barriers(self, stage: str) -> int:
        return sum('\\"barrier\\"' in commit.read_text() for commit in channel_log(self.root, stage))

    def entries(self, stage: str) -> int:
        return sum('"add":' in commit.read_text() for commit in channel_log(self.root, stage))

    def late(self) -> list[str]:
        """Return the late stages that the status begins with."""
        stages = spark_abs.open(self.root).status().stages
        return [s.stage for s in takewhile(lambda s: s.waiting, stages)]

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        return next(m for m in manifests(self.root) if m.id == checkpoint)


def channel_log(root: str, stage: str) -> list[Path]:
    """Return the commits of a stage's channel, oldest first."""
    return sorted(Path(root, "channels", channel_id(StageId(stage)), "_delta_log").glob("*.json"))


def gaps(manifest: Manifest, stage: str) -> dict[str, int]:
    """Return by how many entries each input of a stage stands beyond its barrier, or short of it."""
    produced = {
        channel_id(s.stage, o.output): o.version
        for s in manifest.stages
        for o in s.outputs
        if o.kind == "channel"
    }
    snapshot = manifest.stage(StageId(stage))
    assert snapshot is not None
    return {str(p.channel): p.version - (produced[p.channel] or 0) for p in snapshot.positions}


def ids(feed: Feed) -> Counter[int]:
    return Counter(int(str(row["id"])) for rows in feed.files for row in rows)


def test_an_unaligned_checkpoint_completes_ahead_of_what_is_unread_and_a_restore_reads_that(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A slow stage with a backlog: the barriers overtake it, it is in flight, and comes out exactly once."""
    two = Two(spark, tmp_path, max_entries_per_batch=1)
    for number in range(FILES):
        two.feed(two.clicks, number * 10)
        two.feed(two.orders, number * 10 + 1000)
    hold = Hold("batch.both.files.after")
    run = start(two.job(hold))
    assert run.set(mode="unaligned").startswith("mode aligned -> unaligned; at its next start")
    eventually(run, lambda: min(two.entries("clicks"), two.entries("orders")) == FILES, "a backlog")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint, 180)
        eventually(run, lambda: min(two.barriers("clicks"), two.barriers("orders")) > 0, "barriers")
        hold.opened.set()
        taken = asked.result()
    manifest = two.manifest(taken)
    assert manifest.mode is CheckpointMode.UNALIGNED
    assert max(gaps(manifest, "both").values()) <= -(FILES - 2)
    acked = events(two.root, HistoryEvent.STAGE_ACKED)
    assert {row["stage"] for row in acked if row["inflight_bytes"]} >= {"both"}
    assert [row["detail"] for row in events(two.root, HistoryEvent.SETTINGS_CHANGED)] == [
        "mode aligned -> unaligned"
    ]
    expected = ids(two.clicks) + ids(two.orders)
    eventually(run, lambda: two.rows("all") == expected, "all rows")
    run.stop()

    spark_abs.open(two.root, spark).restore(taken)
    assert two.rows("all") != expected
    run = start(two.job())
    eventually(run, lambda: two.rows("all") == expected, "all rows once more")
    run.stop(savepoint="end")
    assert (two.rows("all"), two.rows("clicked")) == (expected, ids(two.clicks))


def test_at_least_once_what_a_faster_input_was_ahead_comes_twice_and_nothing_is_lost(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Only after the stage with two inputs; what one input alone makes is exact (P7)."""
    two = Two(spark, tmp_path, mode="at_least_once")
    hold = Hold("batch.orders.files.after")
    two.feed(two.clicks, 0)
    two.feed(two.orders, 1000)
    run = start(two.job(hold))
    eventually(run, lambda: hold.reached.is_set() and two.entries("clicks") == 1, "orders are held up")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint, 180)
        eventually(run, lambda: two.barriers("clicks") > 0, "the barrier of clicks")
        two.feed(two.clicks, 10)  # after the barrier
        behind = Counter([10, 11, 12])
        eventually(run, lambda: two.rows("all") & behind == behind, "rows from after the barrier")
        hold.opened.set()
        taken = asked.result()
    assert gaps(two.manifest(taken), "both")["clicks.main"] > 0
    assert gaps(two.manifest(taken), "alone")["clicks.main"] in (0, -1)  # no rows lie between
    run.stop()

    spark_abs.open(two.root, spark).restore(taken)
    two.feed(two.orders, 1010)
    expected = ids(two.clicks) + ids(two.orders)
    run = start(two.job())
    eventually(run, lambda: two.rows("all") >= expected and two.rows("all")[10] > 1, "all rows")
    run.stop(savepoint="end")
    assert two.rows("all") - expected == behind
    assert two.rows("clicked") == ids(two.clicks)


def test_an_aligned_checkpoint_that_takes_too_long_becomes_unaligned_and_the_history_says_why(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """One source is held up, the other's rows wait at the barrier until it is overtaken; then they go on."""
    two = Two(spark, tmp_path, aligned_timeout="1s")
    hold = Hold("batch.orders.files.after")
    two.feed(two.clicks, 0)
    two.feed(two.orders, 1000)
    run = start(two.job(hold))
    eventually(run, lambda: hold.reached.is_set() and two.entries("clicks") == 1, "orders are held up")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint, 180)
        eventually(run, lambda: two.barriers("clicks") > 0, "the barrier of clicks")
        two.feed(two.clicks, 10)  # after the barrier
        eventually(run, lambda: two.rows("all")[10], "rows that an aligned barrier would hold back")
        eventually(run, lambda: two.late() == ["orders"], "only the source holds it up by now")
        hold.opened.set()
        taken = asked.result()
    manifest = two.manifest(taken)
    assert manifest.mode is CheckpointMode.UNALIGNED
    assert gaps(manifest, "both")["clicks.main"] <= 0
    assert [row["checkpoint"] for row in events(two.root, HistoryEvent.OVERTAKEN)] == [taken]
    waited = {row["stage"]: row["detail"] for row in events(two.root, HistoryEvent.STAGE_WAITING)}
    assert "orders.main" in str(waited["both"])
    expected = ids(two.clicks) + ids(two.orders)
    eventually(run, lambda: two.rows("all") == expected, "all rows")
    run.stop()
    spark_abs.open(two.root, spark).restore(taken)
    run = start(two.job())
    eventually(run, lambda: two.rows("all") == expected, "all rows once more")
    run.stop(savepoint="end")
    assert two.rows("all") == expected


def test_behind_a_slow_stage_aligned_checkpoints_expire_and_unaligned_ones_complete(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """As with a hot key: while one checkpoint is open, the stage gets one batch done, and many wait (P20)."""
    two = Two(spark, tmp_path, max_entries_per_batch=1)
    for number in range(FILES):
        two.feed(two.clicks, number * 10)
        two.feed(two.orders, number * 10 + 1000)
    pace = Paced("batch.both.files.before")
    run = start(two.job(pace))
    eventually(run, lambda: min(two.entries("clicks"), two.entries("orders")) == FILES, "a backlog")
    eventually(run, lambda: two.rows("clicked") == ids(two.clicks), "the other stage has none")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint, 180)
        others = {f"ack.{stage}.after" for stage in ("clicks", "orders", "alone")}
        eventually(run, lambda: others <= pace.seen, "all stages but the slow one")
        pace.steps.release()
        eventually(run, lambda: pace.arrivals == 2, "the slow stage in its next batch")
        run.set(timeout="1ms")
        with pytest.raises(Refused, match="aborted: expired, after 1 ms without both"):
            asked.result()
        run.set(timeout="10m", mode="unaligned")
        asked = pool.submit(run.checkpoint, 180)
        eventually(run, lambda: two.barriers("orders") == two.barriers("clicks") == 2, "barriers")
        pace.steps.release()
        taken = asked.result()
    waited = {row["stage"]: str(row["detail"]) for row in events(two.root, HistoryEvent.STAGE_WAITING)}
    assert waited.keys() == {"both"}
    assert "the barrier in clicks.main, orders.main comes after it" in waited["both"]
    aborted = events(two.root, HistoryEvent.ABORTED)
    assert [(row["acks"], row["stages"], row["reason"]) for row in aborted] == [(3, 4, "expired")]
    acked = [row for row in events(two.root, HistoryEvent.STAGE_ACKED) if row["checkpoint"] == taken]
    assert {row["stage"] for row in acked if row["inflight_bytes"]} == {"both"}
    assert min(gaps(two.manifest(taken), "both").values()) <= -(FILES - 2)
    pace.steps.release(1_000)
    expected = ids(two.clicks) + ids(two.orders)
    eventually(run, lambda: two.rows("all") == expected, "all rows")
    run.stop()


def test_rows_in_flight_are_added_to_the_state_that_an_edit_has_put_in(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A stateful stage with a backlog: its state at the cut is replaced, what was unread comes after it."""
    root, feed, hold = str(tmp_path / "root"), Feed(spark, tmp_path / "in"), Hold("batch.sums.files.after")

    def send(files: range) -> None:
        for file in files:
            feed.write(*({"id": n, "k": n, "v": 10**file, "ts": file} for n in range(3)))

    def add(_: object, rows: Iterator[Row], held: GroupState) -> Iterator[tuple[int]]:
        total = (held.get[0] if held.exists else 0) + sum(row.v for row in rows)
        held.update((total,))
        yield (total,)

    def job(failpoint: Callable[[str], None] = lambda _: None) -> Job:
        settings: dict[str, Any] = {"interval": "1h", "mode": "unaligned", "max_entries_per_batch": 1}
        job = Job("edited", root=root, spark=spark, **settings)
        job.failpoint = failpoint
        sums = job.stage(
            "sums",
            [job.source("rows", feed.stream())],
            lambda rows: flat_map_groups_with_state(rows, "k", add, "total long", "total long", uid="sums"),
        )
        job.sink("out", sums, table=str(tmp_path / "out"))
        return job

    def totals(at: str | int) -> dict[int, int]:
        return {row.key.k: row.value.total for row in spark_abs.open(root, spark).state("sums", at).collect()}

    send(range(1))
    assert start(job(), available_now=True).await_termination(240)
    last = channel_log(root, "rows")[-1]

    def written(what: str) -> int:
        return sum(what in commit.read_text() for commit in channel_log(root, "rows") if commit > last)

    send(range(1, FILES))
    run = start(job(hold))
    eventually(run, lambda: written('"add":') == FILES - 1 and hold.reached.is_set(), "a backlog")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.checkpoint, 180)
        eventually(run, lambda: written('\\"barrier\\"') > 0, "a barrier")
        hold.opened.set()
        taken = asked.result()
    run.stop()
    everything = sum(10**file for file in range(FILES))
    unread = {k: everything - total for k, total in totals(taken).items()}
    assert len(unread) == 3
    assert min(unread.values()) > 0

    edited = spark_abs.open(root, spark).edit(taken)
    rows = edited.state("sums").withColumn("value", F.struct(F.lit(10**6).cast("long").alias("total")))
    edited.replace("sums", rows).write("set")
    spark_abs.open(root, spark).restore("set")
    assert start(job(), available_now=True).await_termination(240)
    assert totals("latest") == {k: 10**6 + left for k, left in unread.items()}
