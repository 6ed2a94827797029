"""Nine stages of one job at a modest rate: what checkpoints cost beside the work, and how long they take.

Two thousand rows a second over the three sources, a file for each every two seconds, so that the machine has
room for more: a job that uses it whole has no CPU left to spend on checkpoints. The last stage counts by key.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from rich.console import Console

from bench.figures import Figure, figure, ratios, wait
from bench.idle import SOURCES, declare
from bench.processes import cpu_seconds
from spark_abs.observe.listing import event_table
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INTERVALS: Mapping[str, str] = {"none": "1d", "1s": "1s", "3s": "3s"}
_EVERY_S, _ROWS = 2.0, 1334
_KEYS = 1000
_WARM_UP_S, _MEASURED_S = 20.0, 60.0


def _counts(frame: DataFrame) -> DataFrame:
    return frame.groupBy((F.col("id") % _KEYS).alias("key")).agg(F.count("*").alias("n"))


def _feed(base: Path, over: threading.Event) -> None:
    """Write a file of rows for each source every two seconds, until it is over."""
    chance, number = np.random.default_rng(7), 0
    while not over.wait(_EVERY_S):
        for name in SOURCES:
            hidden = base / name / f".{number}"
            pq.write_table(pa.table({"id": chance.integers(0, 10 * _KEYS, _ROWS)}), hidden)
            hidden.rename(base / name / f"{number:06}.parquet")  # whole, or not there
        number += 1


def _run(spark: SparkSession, base: Path, interval: str) -> tuple[float, list[float]]:
    """Return the CPU seconds of a minute, and how long the checkpoints in it took, in seconds."""
    run, over = declare(spark, base, interval, last=_counts).start(), threading.Event()
    thread = threading.Thread(target=_feed, args=(base, over))
    try:
        wait(lambda: any(progress["numInputRows"] for progress in run.query("last").recentProgress))
        thread.start()
        over.wait(_WARM_UP_S)
        before, first = cpu_seconds(), _completed(base)
        over.wait(_MEASURED_S)
        used, took = cpu_seconds() - before, _completed(base)[len(first) :]
    finally:
        over.set()
        thread.join()
        run.stop()
    shutil.rmtree(base, ignore_errors=True)  # Spark may still write a snapshot of the state
    return used, took


def _completed(base: Path) -> list[float]:
    """Return how long each completed checkpoint took, in seconds, in their order."""
    events = event_table(Root(str(base / "root")))
    ended = events.filter(pc.equal(events["event"], HistoryEvent.COMPLETED.value))
    return [ms / 1000 for ms in ended["duration_ms"].to_pylist()]


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run the job without checkpoints and with two intervals in turns; the first turn is not counted."""
    cpu: dict[str, list[float]] = {name: [] for name in INTERVALS}
    each, p50, p99 = list[float](), list[float](), list[float]()
    for turn in range(-1, runs):
        for name, interval in INTERVALS.items():
            used, took = _run(spark, base / f"busy-{turn}-{name}", interval)
            console.print(f"nine busy stages, every {interval}: {used / _MEASURED_S:.2f} cores, {len(took)}")
            if turn < 0:
                continue
            cpu[name].append(used)
            if name == "1s":
                each.append((used - cpu["none"][-1]) / len(took))
                p50.append(float(np.percentile(took, 50)))
                p99.append(float(np.percentile(took, 99)))
    for name in ("1s", "3s"):
        yield figure(f"overhead_cpu_9_stages_{name}", ratios(cpu[name], cpu["none"]))
    yield figure("checkpoint_cpu_9_stages", each, "s")
    yield figure("checkpoint_p50_9_stages", p50, "s")
    yield figure("checkpoint_p99_9_stages", p99, "s")
