"""What checkpoints cost a job that is not at its limit: CPU time, and the latency of rows.

A source and an aggregation by key, at half of the rate that the job sustains without checkpoints. A row's
latency is the time from its creation to the commit of the batch in the last table that counts it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios
from bench.processes import cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "none": {"interval": "1d"},
    "1s": {"interval": "1s"},
    "3s": {"interval": "3s"},
    "10s": {"interval": "10s"},
    "unaligned_3s": {"interval": "3s", "mode": "unaligned"},
    "at_least_once_3s": {"interval": "3s", "mode": "at_least_once"},
    "synchronous_3s": {"interval": "3s", "synchronous": True},
}
Created = tuple[float, npt.NDArray[np.int64]]
"""When rows came to be in a table, in s, and when they were created, in µs."""
EVERY_S = 0.25
"""Between two files."""
_KEYS = 10_000
_WARM_UP_S, _MEASURED_S = 10.0, 30.0
_FULL_SPEED_FILES, _FULL_SPEED_ROWS = 40, 250_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one variant."""

    cpu_s: float
    p50_s: float
    p99_s: float


@dataclass(slots=True)
class Feed:
    """A thread that writes a file of rows every quarter of a second."""

    directory: Path
    rows: int
    cpu_s: float = 0.0
    """Its own, which is not the job's."""
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write until `stop`."""
        number, due = 0, time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            write_rows(self.directory, number, self.rows)
            self.cpu_s = time.thread_time()
            number, due = number + 1, due + EVERY_S

    def stop(self) -> None:
        """Write no more."""
        self._over.set()


def write_rows(directory: Path, number: int, rows: int) -> None:
    """Write a file of rows that are created now."""
    key = np.random.default_rng([7, number]).integers(0, _KEYS, rows)
    created = np.full(rows, time.time_ns() // 1_000)
    hidden = directory / f".{number}"
    pq.write_table(pa.table({"key": key, "created": created}), hidden)
    hidden.rename(directory / f"{number:06d}.parquet")


def counts(frame: DataFrame) -> DataFrame:
    """Count by key, and keep when the newest row was created."""
    return frame.groupBy("key").agg(F.count("*").alias("n"), F.max("created").alias("created"))


def declare(spark: SparkSession, base: Path, settings: Mapping[str, object], files: int) -> spark_abs.Job:
    """Declare the job, with settings of its checkpoints, and so many files a batch."""
    stream = spark.readStream.schema("key long, created long").option("maxFilesPerTrigger", files)
    config = {"checkpoint": dict(settings)}
    job = spark_abs.Job("overhead", root=str(base / "root"), spark=spark, config=config)
    rows = job.source("rows", stream.parquet(str(base / "input")))
    job.sink("out", job.stage("counts", [rows], counts, output_mode="update"), table=str(base / "out"))
    return job


def commits(base: Path, after: float = 0.0) -> list[Created]:
    """Return when each batch was committed to the last table, and when its rows were created.

    Only of those after a moment; the others' files are not read.
    """
    found = []
    for log in sorted((base / "out" / "_delta_log").glob("*.json")):
        if log.stat().st_mtime <= after:
            continue
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        files = [base / "out" / action["add"]["path"] for action in actions if "add" in action]
        if files:
            columns = [pq.read_table(file, columns=["created"])["created"].to_numpy() for file in files]
            found.append((log.stat().st_mtime, np.concatenate(columns)))
    return found


def sustained(spark: SparkSession, base: Path) -> float:
    """Return the rows a second that the job takes at full speed, without checkpoints, from batch to batch."""
    (base / "input").mkdir(parents=True)
    for number in range(_FULL_SPEED_FILES):
        write_rows(base / "input", number, _FULL_SPEED_ROWS)
    declare(spark, base, VARIANTS["none"], 4).start(available_now=True).await_termination()
    at = [committed for committed, _ in commits(base)]
    warm = len(at) // 4
    shutil.rmtree(base)
    return (len(at) - 1 - warm) * 4 * _FULL_SPEED_ROWS / (at[-1] - at[warm])


def run(spark: SparkSession, base: Path, variant: str, rows: int) -> Measured:
    """Run a variant for a while, and measure when it has warmed up."""
    (base / "input").mkdir(parents=True)
    write_rows(base / "input", 999_999, rows)  # a stream needs something to begin with
    running = declare(spark, base, VARIANTS[variant], 1000).start()
    feed = Feed(base / "input", rows)
    thread = threading.Thread(target=feed.run)
    thread.start()
    pause = threading.Event()
    try:
        pause.wait(_WARM_UP_S)
        began, used = time.time(), cpu_seconds() - feed.cpu_s
        pause.wait(_MEASURED_S)
        ended, used = time.time(), cpu_seconds() - feed.cpu_s - used
    finally:
        feed.stop()
        thread.join()
        running.stop()
    late = [
        committed - created[(created >= began * 1e6) & (created < ended * 1e6)] / 1e6
        for committed, created in commits(base)
    ]
    p50, p99 = np.percentile(np.concatenate(late), [50, 99])
    shutil.rmtree(base)
    return Measured(used, float(p50), float(p99))


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run all variants in turns that go forwards and backwards, after two turns that are not counted."""
    rows = int(max(sustained(spark, base / f"full-{n}") for n in range(2)) / 2 * EVERY_S)
    console.print(f"{rows / EVERY_S:.0f} rows a second")
    measured: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    for name in ("none", "1s"):
        run(spark, base / "warm", name, rows)
    for turn in range(runs):
        for name in list(VARIANTS)[:: 1 if turn % 2 else -1]:
            found = run(spark, base / f"{name}-{turn}", name, rows)
            measured[name].append(found)
            console.print(f"{name}: {found.cpu_s:.1f} s of CPU, {found.p50_s:.2f} s, {found.p99_s:.2f} s")
    cpu = {name: [m.cpu_s for m in found] for name, found in measured.items()}
    p99 = {name: [m.p99_s for m in found] for name, found in measured.items()}
    yield figure("overhead_rows", [rows / EVERY_S], "rows/s")
    yield figure("latency_p50_none", [m.p50_s for m in measured["none"]], "s")
    yield figure("latency_p99_none", p99["none"], "s")
    for name in list(VARIANTS)[1:]:
        yield figure(f"overhead_cpu_{name}", ratios(cpu[name], cpu["none"]))
        yield figure(f"latency_p99_{name}_vs_none", ratios(p99[name], p99["none"]))
