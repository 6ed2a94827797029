"""Checkpoint after checkpoint: what a job costs after ten thousand of them, against after a hundred."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure
from bench.processes import gate_megabytes
from bench.slow_consumer import driver_memory
from spark_abs.observe.listing import event_rows
from spark_abs.store.history import HistoryEvent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_abs.job_root import JobRoot
    from spark_abs.run.run import Run

EPOCHS = 10_000
_FIRST, _BETWEEN = 100, (1_000, 3_000)
_LOOKED_AT, _TIMES = 50, 9
_POLL_S = 2.0


def figures(spark: SparkSession, base: Path, epochs: int, console: Console) -> Iterator[Figure]:
    """Run one job for so many checkpoints, and start it again at each look, of which first and last count."""
    root, seen = spark_abs.open(str(base / "root"), spark), list[dict[str, float]]()
    run, _ = _start(spark, base)
    for until in (_FIRST, *(some for some in _BETWEEN if some < epochs), epochs):
        while _newest(root) < until and not run.await_termination(_POLL_S):
            pass
        now = _look(spark, root, run)
        run.stop()
        run, took = _start(spark, base)
        seen.append({**now, "start_s": took})
        console.print(f"epoch {until}: {seen[-1]}")
    run.stop()
    early, late = seen[0], seen[-1]
    for name in early:
        yield figure(f"epoch_{epochs}_vs_{_FIRST}_{name.rpartition('_')[0]}", [late[name] / early[name]])
    yield figure(f"epoch_{epochs}_vs_{_FIRST}", [max(late[name] / early[name] for name in early)])


def _counts(frame: DataFrame) -> DataFrame:
    return frame.groupBy((F.col("value") % 100).alias("key")).agg(F.count("*").alias("n"))


def _start(spark: SparkSession, base: Path) -> tuple[Run, float]:
    job = spark_abs.Job("epochs", root=str(base / "root"), spark=spark, interval="50ms", skip_unchanged=False)
    numbers = spark.readStream.format("rate").option("rowsPerSecond", 10).load()
    counts = job.stage("counts", [job.source("numbers", numbers)], _counts, output_mode="update")
    job.sink("out", counts, table=str(base / "out"))
    began = time.monotonic()
    run = job.start()
    return run, time.monotonic() - began


def _newest(root: JobRoot) -> int:
    return max(root.checkpoints()["id"].to_pylist(), default=0)


def _look(spark: SparkSession, root: JobRoot, run: Run) -> dict[str, float]:
    """Return what the job costs now: memory of driver and gates, milliseconds of a batch and so on.

    The driver's is the JVM's heap and its Python's memory, after a collection. It is the least of some
    looks: a task at work holds pages of 64 MB.
    """
    batches = [progress["batchDuration"] for progress in run.query("counts").recentProgress][-_LOOKED_AT:]
    completed = [row for row in event_rows(root.root) if row.event is HistoryEvent.COMPLETED]
    took = [row.duration_ms for row in completed if row.duration_ms is not None and row.stage is None][
        -_LOOKED_AT:
    ]
    return {
        "driver_mb": min(driver_memory(spark) for _ in range(_TIMES)) / 1e6,
        "gate_mb": gate_megabytes(),
        "batch_ms": statistics.median(batches),
        "checkpoint_ms": statistics.median(took),
        "list_ms": _milliseconds(root.checkpoints),
        "status_ms": _milliseconds(root.status),
    }


def _milliseconds(look: Callable[[], object]) -> float:
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        look()
        took.append((time.perf_counter() - began) * 1000)
    return min(took)
