"""Nine stages: how long they take to start, and what they cost without input; against plain queries."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios, wait
from bench.overhead import Feed
from bench.processes import cpu_seconds, gate_megabytes
from spark_abs.store.history import History, HistoryEvent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_STAGES = 9
_IDLE_S = 60.0
DEFAULT_POLLING_DELAY = "10ms"
"""Spark's own; sessions of `spark_session` have another."""
_LOAD_ROWS = 10_000
"""In each of the four files that come in a second."""


def _input(spark: SparkSession, base: Path) -> DataFrame:
    spark.range(1000).write.parquet(str(base / "input"))
    return spark.readStream.schema("id long").parquet(str(base / "input"))


def _same(frame: DataFrame) -> DataFrame:
    return frame


def _declare(spark: SparkSession, base: Path, rows: DataFrame, interval: str) -> spark_abs.Job:
    job = spark_abs.Job("nine", root=str(base / "root"), spark=spark, interval=interval)
    last: spark_abs.Output = job.source("n0", rows)
    for number in range(1, _STAGES):
        last = job.stage(f"n{number}", [last], _same)
    job.sink("out", last, table=str(base / "out"))
    return job


@contextmanager
def _job(spark: SparkSession, base: Path, started: Callable[[], None]) -> Iterator[None]:
    run = _declare(spark, base, _input(spark, base), "10s").start()
    started()
    queries = [run.query(f"n{number}") for number in range(_STAGES)]
    wait(lambda: all(_has_run(query) for query in queries))
    try:
        yield
    finally:
        run.stop()


@contextmanager
def _plain(spark: SparkSession, base: Path, started: Callable[[], None]) -> Iterator[None]:
    spark = spark.newSession()  # as a user has it, who has not been told how often sources are asked
    spark.conf.set("spark.sql.streaming.pollingDelay", DEFAULT_POLLING_DELAY)
    frame, queries = _input(spark, base), []
    for number in range(_STAGES):
        table = str(base / f"t{number}")
        spark.createDataFrame([], "id long").write.format("delta").save(table)
        writer = frame.writeStream.format("delta").option("checkpointLocation", str(base / f"c{number}"))
        queries.append(writer.start(table))
        frame = spark.readStream.format("delta").load(table)
    started()
    wait(lambda: all(_has_run(query) for query in queries))
    try:
        yield
    finally:
        for query in queries:
            query.stop()


def _first_checkpoint(spark: SparkSession, base: Path) -> float:
    """Return the seconds from `start()` to the first checkpoint that is complete, while rows come in."""
    (base / "input").mkdir(parents=True)
    feed = Feed(base / "input", _LOAD_ROWS)
    thread = Thread(target=feed.run)
    thread.start()
    try:
        rows = spark.readStream.schema("key long, created long").parquet(str(base / "input"))
        job = _declare(spark, base, rows, "1s")
        began = time.time()
        run = job.start()
        completed = list[float]()

        def is_complete() -> bool:
            events = History(job.root).read().to_pylist()
            completed.extend(e["at_ms"] / 1000 for e in events if e["event"] == HistoryEvent.COMPLETED.value)
            return bool(completed)

        wait(is_complete)
        run.stop()
        return completed[0] - began
    finally:
        feed.stop()
        thread.join()


def _has_run(query: StreamingQuery) -> bool:
    return any(progress["numInputRows"] for progress in query.recentProgress)


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Start both in turns, and let each stand for a minute when all rows have come through."""
    ways = {"job": _job, "plain": _plain}
    until_started: list[float] = []
    ran: dict[str, list[float]] = {name: [] for name in ways}
    idle: dict[str, list[float]] = {name: [] for name in ways}
    memory: list[float] = []
    first: list[float] = []
    for turn in range(-1, runs):  # the first turn is not counted
        for name, way in ways.items():
            place, began, marks = base / "nine", time.monotonic(), list[float]()
            with way(spark, place, lambda began=began, marks=marks: marks.append(time.monotonic() - began)):  # type: ignore[misc]
                took = time.monotonic() - began
                if turn >= 0:
                    Event().wait(_IDLE_S / 6)  # what the start has left to do
                    before = cpu_seconds()
                    Event().wait(_IDLE_S)
                    idle[name].append((cpu_seconds() - before) / _IDLE_S)
                    ran[name].append(took)
                    if name == "job":
                        until_started += marks
                        memory.append(gate_megabytes())
                    console.print(f"nine stages, {name}: {took:.1f} s, idle at {idle[name][-1]:.2f} cores")
            shutil.rmtree(place)
        took = _first_checkpoint(spark, base / "nine")
        shutil.rmtree(base / "nine")
        console.print(f"nine stages under load: the first checkpoint after {took:.1f} s")
        if turn >= 0:
            first.append(took)
    yield figure("start_seconds_9_stages", until_started, "s")
    yield figure("start_vs_plain", ratios(ran["job"], ran["plain"]))
    yield figure("idle_cpu_vs_plain", ratios(idle["job"], idle["plain"]))
    yield figure("gate_memory_mb", memory, "MB")
    yield figure("first_checkpoint_seconds", first, "s")
