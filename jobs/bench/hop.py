"""One hop between two queries: through a channel, against through a native Delta table."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios
from bench.processes import cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS, _WARM_UP, _SAMPLES = 100, 5, 20
_PATIENCE_S = 60


class Arrivals:
    """The sink function of both: says when a batch with a wanted number has arrived."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._newest = -1

    def __call__(self, frame: DataFrame, _: int) -> None:
        """Take the greatest number of a batch."""
        found = max((row.n for row in frame.select("n").collect()), default=-1)
        with self._arrived:
            self._newest = max(self._newest, found)
            self._arrived.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until a number has come out at the other end."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._newest >= number, _PATIENCE_S):
                raise TimeoutError(f"{number} has not arrived within {_PATIENCE_S} s")


def _send(directory: Path, number: int) -> None:
    hidden = directory / f".{number}"
    pq.write_table(pa.table({"n": pa.array([number] * _ROWS, pa.int64())}), hidden)
    hidden.rename(directory / f"{number}.parquet")


def _source(spark: SparkSession, base: Path) -> DataFrame:
    (base / "input").mkdir(parents=True)
    return spark.readStream.schema("n long").parquet(str(base / "input"))


@contextmanager
def _through_channel(spark: SparkSession, base: Path, arrivals: Arrivals) -> Iterator[None]:
    job = spark_abs.Job("hop", root=str(base / "root"), spark=spark, interval="1d")
    first = job.source("first", _source(spark, base))
    second = job.stage("second", [first], lambda frame: frame)
    job.sink("out", second, foreach_batch=arrivals)
    run = job.start()
    try:
        yield
    finally:
        run.stop()


@contextmanager
def _through_delta(spark: SparkSession, base: Path, arrivals: Arrivals) -> Iterator[None]:
    table = str(base / "table")
    source = _source(spark, base)
    spark.createDataFrame([], "n long").write.format("delta").save(table)
    first = source.writeStream.format("delta").option("checkpointLocation", str(base / "1")).start(table)
    second = (
        spark.readStream.format("delta")
        .load(table)
        .writeStream.option("checkpointLocation", str(base / "2"))
        .foreachBatch(arrivals)
        .start()
    )
    try:
        yield
    finally:
        for query in (first, second):
            query.processAllAvailable()
            query.stop()


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Send small files one by one, each when the one before has come out; medians of each run."""
    ways = {"channel": _through_channel, "native": _through_delta}
    found: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, runs):  # the first turn is not counted
        for name, way in ways.items():
            place, arrivals, samples = base / "hop", Arrivals(), []
            with way(spark, place, arrivals):
                for number in range(_WARM_UP + _SAMPLES):
                    if number == _WARM_UP:
                        before = cpu_seconds()
                    began = time.monotonic()
                    _send(place / "input", number)
                    arrivals.wait_for(number)
                    samples.append(time.monotonic() - began)
                cpu = (cpu_seconds() - before) / _SAMPLES
            shutil.rmtree(place)
            median = statistics.median(samples[_WARM_UP:])
            console.print(f"hop through {name}: {median * 1000:.0f} ms, {cpu * 1000:.0f} ms of CPU")
            if turn >= 0:
                found[name].append(median)
                used[name].append(cpu)
    yield figure("hop_ms", [s * 1000 for s in found["channel"]], "ms")
    yield figure("hop_native_ms", [s * 1000 for s in found["native"]], "ms")
    yield figure("hop_vs_native", ratios(found["channel"], found["native"]))
    yield figure("cpu_per_small_batch_ms", [s * 500 for s in used["channel"]], "ms")  # a hop is two batches
    yield figure("cpu_per_small_batch_vs_native_delta", ratios(used["channel"], used["native"]))
