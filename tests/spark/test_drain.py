"""Draining before the last savepoint: every window is let out, once (P21)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_abs.errors import Refused, UsageError
from spark_abs.job import Job
from spark_abs.model import CheckpointKind, StageId
from spark_abs.run.run import Run
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually, files_read, hold_until, manifests
from tests.spark.conftest import Start
from tests.spark.shapes import SCHEMA, clicks_of, in_time, orders_of


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
    with pytest.raises(Refused, match="being drained, with savepoint 'last'"):
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
