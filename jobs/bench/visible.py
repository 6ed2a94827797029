"""From the creation of a row to its commit in the last table: chains of stages, against plain queries.

A thousand rows a second go through one to eight stages with a checkpoint a second, or through as many plain
queries with Delta tables between them.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from deltalake import DeltaTable
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios, wait
from bench.overhead import EVERY_S, Created, Feed, commits, write_rows
from spark_abs.sinks.delta.options import Visible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LENGTHS = (1, 2, 4, 8)
_ROWS = int(1000 * EVERY_S)
_WARM_UP_S, _MEASURED_S = 10.0, 20.0
_SCHEMA = "key long, created long"


@dataclass(frozen=True, slots=True)
class Way:
    """A way of rows from the directory `input` to the table `out`, both below another directory."""

    running: Callable[[Path], AbstractContextManager[None]]
    """Is the way while it is entered."""
    rows: Callable[[Path], int]
    """Returns how many rows are in the table."""
    shown: Callable[[Path, float], Sequence[Created]]
    """Returns when rows came to be in the table, after a moment."""


def _source(spark: SparkSession, base: Path) -> DataFrame:
    return spark.readStream.schema(_SCHEMA).parquet(str(base / "input"))


@contextmanager
def _stages(spark: SparkSession, length: int, shown: Visible, base: Path) -> Iterator[None]:
    job = spark_abs.Job("visible", root=str(base / "root"), spark=spark, interval="1s")
    last = job.source("rows", _source(spark, base))
    for number in range(1, length):
        last = job.stage(f"stage{number}", [last], lambda frame: frame)
    job.sink("out", last, table=spark_abs.Delta(str(base / "out"), visible=shown))
    run = job.start()
    try:
        yield
    finally:
        run.stop()


@contextmanager
def _queries(spark: SparkSession, length: int, base: Path) -> Iterator[None]:
    rows, running = _source(spark, base), []
    for number in range(1, length + 1):
        table = str(base / ("out" if number == length else f"table{number}"))
        spark.createDataFrame([], _SCHEMA).write.format("delta").save(table)
        writer = rows.writeStream.format("delta").option("checkpointLocation", str(base / f"c{number}"))
        running.append(writer.start(table))
        rows = spark.readStream.format("delta").load(table)
    try:
        yield
    finally:
        for query in running:
            query.stop()


def _count(base: Path) -> int:
    return int(DeltaTable(str(base / "out")).count())


def stages(spark: SparkSession, length: int, shown: Visible = "batch") -> Way:
    """Return a job of so many stages; its sink is visible with each `batch`, or with each `checkpoint`."""
    return Way(partial(_stages, spark, length, shown), _count, commits)


def queries(spark: SparkSession, length: int) -> Way:
    """Return so many plain queries."""
    return Way(partial(_queries, spark, length), _count, commits)


def run(base: Path, way: Way) -> tuple[float, float]:
    """Return the median and the 99th percentile of the latency of the rows of some time, in seconds."""
    (base / "input").mkdir(parents=True)
    write_rows(base / "input", 999_999, _ROWS)  # a stream needs something to begin with
    feed, pause = Feed(base / "input", _ROWS), threading.Event()
    thread = threading.Thread(target=feed.run)
    with way.running(base):
        thread.start()
        try:
            pause.wait(_WARM_UP_S)
            began = time.time()
            pause.wait(_MEASURED_S)
        finally:
            feed.stop()
            thread.join()
        sent = len(list((base / "input").glob("*.parquet"))) * _ROWS
        wait(lambda: way.rows(base) == sent)
    late = [shown - created[created >= began * 1e6] / 1e6 for shown, created in way.shown(base, began)]
    p50, p99 = np.percentile(np.concatenate(late), [50, 99])
    return float(p50), float(p99)


_WAYS = {"stages": stages, "queries": queries}


def measured(
    base: Path, ways: Mapping[str, Way], runs: int, console: Console
) -> dict[str, list[tuple[float, float]]]:
    """Return what `run` says of each way in each turn; the first turn is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(-1, runs):
        for name, way in ways.items():
            p50, p99 = run(base / "visible", way)
            shutil.rmtree(base / "visible")
            console.print(f"{name}: {p50:.2f} s, {p99:.2f} s")
            if turn >= 0:
                found[name].append((p50, p99))
    return found


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run all lengths both ways in turns."""
    ways = {f"{length} {name}": way(spark, length) for length, (name, way) in product(LENGTHS, _WAYS.items())}
    found = measured(base, ways, runs, console)
    for length in LENGTHS:
        for number, quantile in enumerate(("p50", "p99")):
            ours, native = ([one[number] for one in found[f"{length} {name}"]] for name in _WAYS)
            yield figure(f"visible_{quantile}_{length}", ours, "s")
            yield figure(f"visible_{quantile}_{length}_native", native, "s")
            yield figure(f"visible_{quantile}_{length}_vs_native", ratios(ours, native))
