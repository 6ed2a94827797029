"""Draining before the last savepoint: every window is let out, once (P21)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import spark_abs
from spark_abs.errors import Refused, UsageError
from spark_abs.job import Job
from spark_abs.model import CheckpointKind, StageId
from spark_abs.run.run import Run
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually, files_read, hold_until, manifests
from tests.spark.conftest import Start
from tests.spark.shapes import LATE, SCHEMA, clicks_of, in_time, orders_of


def matched(clicks: DataFrame, orders: DataFrame) -> DataFrame:
    left = clicks.selectExpr("id AS click", "k AS ck", "ts AS clicked")
    right = orders.selectExpr("id AS bought", "k AS ok", "ts AS ordered")
    near = F.expr("ck = ok AND ordered BETWEEN clicked AND clicked + INTERVAL 20 SECONDS")
    return left.join(right, near, "leftOuter").select("clicked", "bought")


def counted(pairs: DataFrame) -> DataFrame:
    counts = pairs.groupBy(F.window("clicked", "25 seconds")).agg(F.count("*").alias("n"))
    return counts.selectExpr("window.end AS until", "n")


def test_a_drain_lets_out_every_window_also_when_it_is_interrupted(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A window after a join gives what a batch query over all that was read gives, each row once."""
    root, table = str(tmp_path / "root"), str(tmp_path / "counts")
    clicks, orders = Feed(spark, tmp_path / "clicks", SCHEMA), Feed(spark, tmp_path / "orders", SCHEMA)
    dies_at = ["drain.counts.plan.after"]

    def failpoint(point: str) -> None:
        if point in dies_at:
            dies_at.remove(point)
            raise OSError("no power")

    def declare() -> Job:
        job = Job("drained", root=root, spark=spark, interval="1s")
        job.failpoint = failpoint
        sources = [job.source("clicks", clicks.stream()), job.source("orders", orders.stream())]
        pairs = job.stage("pairs", sources, lambda one, two: matched(in_time(one), in_time(two)))
        counts = job.stage("counts", [pairs], lambda f: counted(f.withWatermark("clicked", "10 minutes")))
        job.sink("counts", counts, table=table)
        return job

    for file in range(4):
        clicks.write(*clicks_of(file))
        orders.write(*orders_of(file))
    run = start(declare())
    for source in ("clicks", "orders"):
        run.query(source).processAllAvailable()
    eventually(run, lambda: manifests(root), "a checkpoint")
    with pytest.raises(UsageError, match="give it a name"):
        run.stop(drain=True)
    with pytest.raises(OSError, match="no power"):
        run.stop(savepoint="last", drain=True)
    assert not dies_at

    # What comes now was not read when the drain began: no run reads it any more.
    clicks.write(*clicks_of(4))
    with pytest.raises(Refused, match="unfinished drain, with savepoint 'last'"):
        start(declare(), available_now=True)
    again = start(declare())
    assert again.await_termination(240)
    assert Control.open(Root(root)).state.runs[-1].ended == "drained, with savepoint 'last'"
    last = manifests(root)[-1]
    assert (last.kind, last.name) == (CheckpointKind.SYNC_SAVEPOINT, "last")
    read = files_read(last, "clicks")
    assert (read, files_read(last, "orders")) == (4, 4)

    want = counted(matched(clicks.batch().where(f"file < {read}").drop("file"), orders.batch().drop("file")))
    have = spark.read.format("delta").load(table)
    assert_df_equality(have, want, ignore_row_order=True, ignore_nullable=True)
    assert sum(stage.dropped_late for stage in last.stages) == 0


def test_a_drain_does_not_forget_a_batch_that_the_outputs_hold(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A killed run had committed it; the next one had planned it, and not begun it when the drain came."""
    root, table = str(tmp_path / "root"), str(tmp_path / "rows")
    feed, held, runs = Feed(spark, tmp_path / "in"), threading.Event(), list[Run]()
    again = threading.Event()

    def may_begin() -> bool:
        if again.is_set():
            held.set()
            return bool(runs) and runs[0]._stages[StageId("numbers")].halted
        return True

    def declare() -> Job:
        job = Job("drained", root=root, spark=spark, interval="1d")
        job.failpoint = hold_until("batch.numbers.wait.before", may_begin)
        job.sink("rows", job.source("numbers", feed.stream()), table=table)
        return job

    for number in range(2):
        feed.write({"id": number})
    start(declare(), available_now=True).await_termination()
    commits = Path(root) / "native/1/numbers/commits"
    newest = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    (commits / str(newest)).unlink()

    again.set()
    runs.append(start(declare()))
    assert held.wait(120), "the batch is planned again"
    runs[0].stop(savepoint="last", drain=True)
    last = manifests(root)[-1]
    assert (last.name, files_read(last, "numbers")) == ("last", 2)
    rows = spark.read.format("delta").load(table)
    assert sorted(row.id for row in rows.collect()) == [0, 1]


ROWS = "id long, k long, ts timestamp"


def beating(
    key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
) -> Iterator[tuple[Any, ...]]:
    """Pass rows on, and send one without an id whenever a key times out, which it does in no time."""
    if state.hasTimedOut:
        yield None, key[0], None
    for row in rows:
        yield row.id, row.k, row.ts
    state.update((0,))
    state.setTimeoutDuration(1)


def beating_frames(
    key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Do the same with Spark's own operator."""
    if state.hasTimedOut:
        yield pd.DataFrame({"id": pd.array([None], "Int64"), "k": [key[0]], "ts": [pd.NaT]})
    else:
        yield from frames
    state.update((0,))
    state.setTimeoutDuration(1)


@pytest.mark.long
def test_a_drain_ends_also_where_timers_of_processing_time_never_rest(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """One stage after the other has batches and lets out rows without end; then comes event time.

    The job is stopped when the batch of such a stage at the end of event time is planned.
    """
    root, clicks = str(tmp_path / "root"), Feed(spark, tmp_path / "clicks", SCHEMA)
    passed, counts = str(tmp_path / "passed"), str(tmp_path / "counts")
    runs = list[Run]()

    def failpoint(point: str) -> None:
        if point == "drain.second.plan.after" and len(runs) == 1:
            runs[0].request_stop()

    def first(frame: DataFrame) -> DataFrame:
        return spark_abs.flat_map_groups_with_state(
            frame, "k", beating, "n long", ROWS, timeout="processing-time", key_groups=2
        )

    def second(frame: DataFrame) -> DataFrame:
        timeout = GroupStateTimeout.ProcessingTimeTimeout
        keys = frame.withWatermark("ts", LATE).groupBy("k")
        return keys.applyInPandasWithState(beating_frames, ROWS, "n long", "append", timeout)

    def windows(frame: DataFrame) -> DataFrame:
        return counted(
            frame.where("id IS NOT NULL")
            .withColumnRenamed("ts", "clicked")
            .withWatermark("clicked", "10 minutes")
        )

    def declare() -> Job:
        job = Job("drained", root=root, spark=spark, interval="1h")
        job.failpoint = failpoint
        source = job.source("clicks", clicks.stream().select("id", "k", "ts"))
        one = job.stage("first", [source], first, state_provider="rocksdb")
        two = job.stage("second", [one], second, state_provider="rocksdb")
        three = job.stage("counts", [two], windows)
        job.sink("passed", two, table=passed)
        job.sink("counts", three, table=counts)
        return job

    def ids() -> list[int]:
        rows = spark.read.format("delta").load(passed).where("id IS NOT NULL")
        return sorted(row.id for row in rows.select("id").collect())

    for file in range(2):
        clicks.write(*clicks_of(file))
    runs.append(start(declare()))
    runs[0].query("clicks").processAllAvailable()
    with pytest.raises(Refused, match="stopped during the drain: the next start resumes the drain"):
        runs[0].stop(savepoint="last", drain=True)
    runs.append(start(declare()))
    assert runs[1].await_termination(240)
    assert Control.open(Root(root)).state.runs[-1].ended == "drained, with savepoint 'last'"
    last = manifests(root)[-1]
    assert (last.kind, last.name) == (CheckpointKind.SYNC_SAVEPOINT, "last")
    assert files_read(last, "clicks") == 2
    assert sum(stage.dropped_late for stage in last.stages) == 0

    written = clicks.batch().drop("file")
    assert ids() == sorted(row.id for row in written.select("id").collect())
    want = counted(written.withColumnRenamed("ts", "clicked"))

    # What comes after the drain is passed on once, and is late where event time counts.
    clicks.write(*clicks_of(2))
    assert start(declare(), available_now=True).await_termination(240)
    assert ids() == sorted(row.id for row in clicks.batch().select("id").collect())
    have = spark.read.format("delta").load(counts)
    assert_df_equality(have, want, ignore_row_order=True, ignore_nullable=True)
