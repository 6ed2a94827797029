"""A hot key makes a stage slow and its backlog long: how long checkpoints take, aligned and unaligned."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.backlog import unread
from bench.figures import Figure, figure, wait

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS, _ROOM, _TAKEN, _TIMEOUT_S = 250, 24, 3, 600
_SOURCES = ("clicks", "orders")
_MODES: tuple[Literal["aligned", "unaligned"], ...] = ("aligned", "unaligned")


def _rows(spark: SparkSession) -> DataFrame:
    """Rows as fast as they are read, a second of event time in each batch; nine of ten have one key."""
    made = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", _ROWS)
    rows = made.option("advanceMillisPerBatch", 1000).option("startTimestamp", 1_700_000_000_000).load()
    key = F.when(F.col("value") % 10 == 0, F.col("value")).otherwise(F.lit(0))
    return rows.select(key.alias("k"), "value", F.col("timestamp").alias("ts"))


def _match(clicks: DataFrame, orders: DataFrame) -> DataFrame:
    """Join what is ten seconds apart: each row of the hot key is held against all others of it."""
    left = clicks.withWatermark("ts", "1 second").selectExpr("k AS ck", "value AS click", "ts AS clicked")
    right = orders.withWatermark("ts", "1 second").selectExpr("k AS ok", "value AS bought", "ts AS ordered")
    near = "ordered BETWEEN clicked AND clicked + INTERVAL 10 SECONDS AND click % 1000 = bought % 997"
    return left.join(right, F.expr(f"ck = ok AND {near}")).select("click", "bought")


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Take checkpoints of a job with a backlog, first aligned, then unaligned; run it again and again."""
    found: list[float] = []
    for number in range(runs):
        took = _run(spark, base / f"hot-{number}")
        console.print("hot key: " + ", ".join(f"{mode} {took[mode]:.1f} s" for mode in _MODES))
        found.append(took["unaligned"] / took["aligned"])
        shutil.rmtree(base / f"hot-{number}")
    yield figure("unaligned_vs_aligned_duration", found)


def _run(spark: SparkSession, base: Path) -> dict[str, float]:
    """Return how many seconds a checkpoint took in each mode, the median of some."""
    job = spark_abs.Job(
        "hot", root=str(base / "root"), spark=spark, interval="1h",
        capacity_entries=_ROOM, max_entries_per_batch=1,
    )  # fmt: skip
    sources = [job.source(name, _rows(spark)) for name in _SOURCES]
    job.sink("matched", job.stage("match", sources, _match), table=str(base / "matched"))
    run = job.start()
    found: dict[str, float] = {}
    try:
        for mode in _MODES:
            run.set(mode=mode)
            took = []
            for _ in range(_TAKEN):
                wait(lambda: all(unread(job, f"{name}.main", "match") >= _ROOM for name in _SOURCES))
                began = time.monotonic()
                run.checkpoint(_TIMEOUT_S)
                took.append(time.monotonic() - began)
            found[mode] = statistics.median(took)
    finally:
        run.stop()
    return found
