"""Wide rows of which few columns are used: through a channel, in one query, through native Delta."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES, _ROWS, _KEYS = 10, 2_000_000, 100_000
ROWS = _FILES * _ROWS
"""Rows of the whole input."""


def write(spark: SparkSession, directory: Path) -> None:
    """Write the input."""
    numbers = spark.range(0, ROWS, 1, _FILES)
    numbers.select(
        (F.col("id") * 7919 % _KEYS).alias("key"),
        (F.col("id") % 1000).alias("amount"),
        F.col("id"),
        F.rand(1).alias("price"),
        F.sha1(F.col("id").cast("string")).alias("digest"),
        F.md5(F.col("id").cast("string")).alias("other"),
    ).write.parquet(str(directory))


def _source(spark: SparkSession, directory: Path) -> DataFrame:
    stream = spark.readStream.schema(spark.read.parquet(str(directory)).schema)
    return stream.option("maxFilesPerTrigger", 1).parquet(str(directory))


def _totals(frame: DataFrame) -> DataFrame:
    return frame.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("amount"))


def _sink(frame: DataFrame, _: int) -> None:
    frame.write.format("noop").mode("overwrite").save()


def declare(spark: SparkSession, base: Path, rows: Path) -> spark_abs.Job:
    """Declare the job that counts the input below `rows`."""
    job = spark_abs.Job("wide", root=str(base / "root"), spark=spark, interval="3s")
    source = job.source("rows", _source(spark, rows))
    totals = job.stage("totals", [source], _totals, output_mode="update")
    job.sink("out", totals, foreach_batch=_sink)
    return job


def _job(spark: SparkSession, base: Path, rows: Path) -> None:
    declare(spark, base, rows).start(available_now=True).await_termination()


def _single(spark: SparkSession, base: Path, rows: Path) -> None:
    query = _totals(_source(spark, rows)).writeStream.outputMode("update").foreachBatch(_sink)
    query.option("checkpointLocation", str(base / "c")).trigger(availableNow=True).start().awaitTermination()


def _delta(spark: SparkSession, base: Path, rows: Path) -> None:
    """Both at once, the second one until it has all rows."""
    table, source = str(base / "table"), _source(spark, rows)
    spark.createDataFrame([], source.schema).write.format("delta").save(table)
    first = source.writeStream.format("delta").option("checkpointLocation", str(base / "1"))
    writing = first.trigger(availableNow=True).start(table)
    read = spark.readStream.format("delta").option("maxFilesPerTrigger", 2).load(table)
    second = _totals(read).writeStream.outputMode("update").foreachBatch(_sink)
    reading = second.option("checkpointLocation", str(base / "2")).start()
    writing.awaitTermination()
    reading.processAllAvailable()
    reading.stop()


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Count and sum 20 million rows of six columns by 100,000 keys, in turns; the first is not counted."""
    ways = {"job": _job, "single": _single, "delta": _delta}
    rows, took = base / "rows", {name: list[float]() for name in ways}
    write(spark, rows)
    for turn in range(-1, runs):
        for name, way in ways.items():
            place, began = base / "wide", time.monotonic()
            place.mkdir()
            way(spark, place, rows)
            seconds = time.monotonic() - began
            shutil.rmtree(place)
            console.print(f"wide, {name}: {ROWS / seconds / 1e6:.2f} million rows a second")
            if turn >= 0:
                took[name].append(seconds)
    yield figure("wide_rows", [ROWS / s for s in took["job"]], "rows/s")
    yield figure("wide_vs_single", ratios(took["single"], took["job"]))
    yield figure("wide_vs_native_delta", ratios(took["delta"], took["job"]))
