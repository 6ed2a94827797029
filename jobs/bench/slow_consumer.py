"""A consumer that becomes twenty times slower, and is freed: what channel and driver hold meanwhile."""

from __future__ import annotations

import gc
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import spark_abs
from bench.backlog import unread
from bench.figures import Figure, figure
from spark_abs.observe.listing import event_rows
from spark_abs.store.history import HistoryEvent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_abs.job import Job

_ROWS, _ROOM, _SLOWER = 10_000, 8, 20
_WARM_S, _SLOW_S, _AFTER_S = 40, 120, 40
_LOOK_S = 1.0


class Consumer:
    """The sink function of the consumer: counts batches, and takes its time when it is told to."""

    def __init__(self) -> None:
        self.batches = 0
        self.pause_s = 0.0
        self._never = threading.Event()

    def __call__(self, frame: DataFrame, _: int) -> None:
        """Take one batch."""
        frame.count()
        self._never.wait(self.pause_s)
        self.batches += 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run has shown."""

    memory: float
    """Most that the driver held while the consumer was slow, over what it held before."""
    backlog: float
    """Most that the channel held, over its capacity and a batch for each open checkpoint and one."""
    throughput: float
    """Batches a second after the consumer was freed, over those before."""
    checkpoints: int
    """Checkpoints that were completed while it was slow."""


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run the job again and again."""
    seen = []
    for number in range(runs):
        place = base / f"slow-{number}"
        seen.append(_run(spark, place))
        console.print(f"slow consumer: {seen[-1]}")
        shutil.rmtree(place)
    yield figure("slow_consumer_memory_vs_before", [s.memory for s in seen])
    yield figure("slow_consumer_backlog_vs_bound", [s.backlog for s in seen])
    yield figure("freed_consumer_throughput_vs_before", [s.throughput for s in seen])
    yield figure("slow_consumer_checkpoints", [s.checkpoints for s in seen], "completed")


def _run(spark: SparkSession, base: Path) -> Seen:
    consumer = Consumer()
    job = spark_abs.Job(
        "slow", root=str(base / "root"), spark=spark, interval="2s",
        capacity_entries=_ROOM, max_entries_per_batch=1,
    )  # fmt: skip
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", _ROWS).load()
    behind = job.stage("after", [job.source("numbers", rows)], lambda frame: frame)
    job.sink("out", behind, foreach_batch=consumer)
    run = job.start()
    try:
        _look(job, _WARM_S / 2)
        began = consumer.batches
        before, _ = _look(job, _WARM_S / 2)
        rate = (consumer.batches - began) / (_WARM_S / 2)
        consumer.pause_s = (_SLOWER - 1) / rate
        completed = _completed(job)
        slow, backlog = _look(job, _SLOW_S)
        completed = _completed(job) - completed
        consumer.pause_s = 0.0
        _look(job, _AFTER_S / 4)
        began = consumer.batches
        _look(job, _AFTER_S)
        after = (consumer.batches - began) / _AFTER_S
    finally:
        consumer.pause_s = 0.0
        run.stop()
    bound = _ROOM + 2  # one checkpoint is open at a time
    return Seen(max(slow) / statistics.median(before), max(backlog) / bound, after / rate, completed)


def _look(job: Job, seconds: float) -> tuple[list[float], list[int]]:
    """Look at the driver's memory, in bytes after a collection, and at what the channel holds."""
    memory, backlog = [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        memory.append(driver_memory(job.spark))
        backlog.append(unread(job, "numbers.main", "after"))
        time.sleep(_LOOK_S)
    return memory, backlog


def driver_memory(spark: SparkSession) -> float:
    """Return the bytes that the driver holds after a collection: the JVM's heap, and its Python's memory."""
    gc.collect()
    jvm: Any = spark._jvm
    runtime = jvm.java.lang.Runtime.getRuntime()
    runtime.gc()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(runtime.totalMemory() - runtime.freeMemory() + pages * 4096)


def _completed(job: Job) -> int:
    return sum(row.event is HistoryEvent.COMPLETED for row in event_rows(job.root))
