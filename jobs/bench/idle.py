"""Nine stages of one job with next to no input: what their checkpoints cost, skipped and taken.

Without input, and with a row a second into one of the three sources.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios, wait
from bench.processes import cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_abs.run.run import Run

INTERVALS = ("10s", "1s")
SOURCES = ("clicks", "orders", "payments")
_WAYS = {"skipped": True, "taken": False}
_SETTLES_S, _IDLE_S = 15.0, 60.0


def _same(frame: DataFrame) -> DataFrame:
    return frame


def declare(
    spark: SparkSession,
    base: Path,
    interval: str,
    *,
    skip_unchanged: bool = True,
    last: Callable[[DataFrame], DataFrame] = _same,
) -> spark_abs.Job:
    """Declare three sources, a stage after each, a stage of two of these, one of all, and the last."""
    job = spark_abs.Job(
        "nine", root=str(base / "root"), spark=spark, interval=interval, skip_unchanged=skip_unchanged
    )
    cleaned = []
    for name in SOURCES:
        path = str(base / name)
        spark.range(1000).write.parquet(path)
        rows = job.source(name, spark.readStream.schema("id long").parquet(path))
        cleaned.append(job.stage(f"clean_{name}", [rows], _same))
    first = job.stage("first", cleaned[:2], lambda one, other: one.union(other))
    everything = job.stage("everything", [first, cleaned[2]], lambda one, other: one.union(other))
    job.sink("out", job.stage("last", [everything], last, output_mode="update"), table=str(base / "out"))
    return job


@contextmanager
def _idle(spark: SparkSession, base: Path, interval: str, skip_unchanged: bool) -> Iterator[Run]:
    """Run the job, and wait until all rows are through."""
    run = declare(spark, base, interval, skip_unchanged=skip_unchanged).start()
    try:
        wait(lambda: any(progress["numInputRows"] for progress in run.query("last").recentProgress))
        for name in (*SOURCES, *(f"clean_{name}" for name in SOURCES), "first", "everything", "last"):
            run.query(name).processAllAvailable()
        yield run
    finally:
        run.stop()
        shutil.rmtree(base)


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Let the job stand for a minute with each interval, its checkpoints skipped and taken in turns."""
    cores: dict[tuple[str, str], list[float]] = {key: [] for key in product(INTERVALS, _WAYS)}
    for turn in range(-1, runs):  # the first turn is not counted
        for (interval, way), measured in cores.items():
            with _idle(spark, base / "idle", interval, _WAYS[way]):
                Event().wait(_SETTLES_S)
                before = cpu_seconds()
                Event().wait(_IDLE_S)
                found = (cpu_seconds() - before) / _IDLE_S
            if turn >= 0:
                measured.append(found)
            console.print(f"nine idle stages, every {interval}, {way}: {found:.2f} cores")
    yield from _trickle(spark, base, runs, console)
    for interval in INTERVALS:
        skipped, taken = (cores[interval, way] for way in _WAYS)
        yield figure(f"idle_cores_9_stages_{interval}", skipped, "cores")
        yield figure(f"idle_cores_9_stages_{interval}_taken", taken, "cores")
        yield figure(f"idle_skipped_vs_taken_{interval}", ratios(skipped, taken))


def _trickle(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Give one of the sources a row a second, with a checkpoint every second and without."""
    cores: dict[str, list[float]] = {"1s": [], "1d": []}
    for turn in range(-1, runs):  # the first turn is not counted
        for interval, measured in cores.items():
            with _idle(spark, base / "idle", interval, skip_unchanged=True) as run:
                _rows(base / "idle", _SETTLES_S)
                before, first = cpu_seconds(), run.checkpoint()
                _rows(base / "idle", _IDLE_S)
                found, came = (cpu_seconds() - before) / _IDLE_S, run.checkpoint() - first
            if turn >= 0:
                measured.append(found)
            console.print(
                f"nine stages, a row a second, every {interval}: {found:.2f} cores, {came} checkpoints"
            )
    yield figure("trickle_cores_9_stages_1s", cores["1s"], "cores")
    yield figure("trickle_cores_9_stages_none", cores["1d"], "cores")


def _rows(base: Path, seconds: float) -> None:
    """Write a file with one row each second."""
    rows = pa.table({"id": pa.array([1], pa.int64())})
    for _ in range(int(seconds)):
        folder = base / SOURCES[0]
        name = f"{len(list(folder.iterdir())):06}.parquet"
        pq.write_table(rows, base / name)
        (base / name).rename(folder / name)  # whole, or not there
        Event().wait(1.0)
