"""The attribution job at full speed, with and without what spark_abs adds to it.

Every variant reads the same files and ends when `totals` has consumed the last row that `match` puts out:

    none      channels, no checkpoints
    abs-<s>   a checkpoint every <s> seconds
    sync-<s>  the same, and processing waits for the copy
    plain     no spark_abs: native Delta tables between the queries
    single    no spark_abs: join and aggregation in one query, which can fill `totals` only
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from rich.console import Console

import attribution
from bench.figures import Figure, figure, ratios, wait
from bench.traffic import write_events
from spark_abs.model import MAIN_OUTPUT, ChannelId, StageId, Version, channel_id
from spark_abs.run.run import Run
from spark_abs.stages.native import NativeLog
from spark_abs.store.history import History, HistoryEvent
from spark_abs.store.log import read_commit
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SECONDS = (1, 3, 10)
FILES = 150
"""Of each kind: enough for a minute without checkpoints on two cores."""
_USERS = 20_000
_CLICKS, _ORDERS = 2_000, 500
"""Events in one file."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one variant."""

    seconds: float
    checkpoints: int = 0


@dataclass
class WholeJob:
    """The variants over one input, below `base`."""

    spark: SparkSession
    base: Path
    files: int
    console: Console
    config: attribution.Config = field(init=False)
    """Of the run under way."""
    ran: int = 0
    attributed_rows: int | None = None
    """What every variant must have written; learned from the first."""

    def __post_init__(self) -> None:
        """Write the input."""
        write_events(self.base / "input", self.files, _CLICKS, _ORDERS, _USERS)

    def _configure(self, out: Path) -> None:
        """Give a run a directory of its own: Spark may still write state into that of the run before."""
        self.config = replace(
            attribution.Config.read(Path("conf/attribution.yaml"), str(out)),
            clicks=str(self.base / "input" / "clicks"),
            orders=str(self.base / "input" / "orders"),
            format="parquet",
            files_per_batch=2,
            trigger="0 seconds",
            totals_late_by_ms=300_000,
            settings={"channel": {"maxEntriesPerBatch": 10}},
        )

    def run(self, variant: str) -> Measured:
        """Run a variant from nothing to its end."""
        shutil.rmtree(self.base / f"out-{self.ran}", ignore_errors=True)
        self.ran += 1
        self._configure(self.base / f"out-{self.ran}")
        kind, _, seconds = variant.partition("-")
        match kind:
            case "none":
                measured = self._with_channels({"interval": "1d"})
            case "abs":
                measured = self._with_channels({"interval": f"{seconds}s"})
            case "sync":
                measured = self._with_channels({"interval": f"{seconds}s", "synchronous": "true"})
            case "plain":
                measured = self._plain()
            case "single":
                measured = self._single()
            case _:
                raise ValueError(variant)
        self.console.print(f"{variant}: {measured.seconds:.1f} s, {measured.checkpoints} checkpoints")
        return measured

    def _with_channels(self, checkpoint: Mapping[str, str]) -> Measured:
        settings = {**self.config.settings, "checkpoint": checkpoint}
        job = attribution.declare(self.spark, replace(self.config, settings=settings))
        began = time.monotonic()
        run = job.start()
        try:
            for source in ("clicks", "orders"):
                run.query(source).processAllAvailable()
            self._consumed(run, job.root, "match", {"clicks", "orders"})
            if self.attributed_rows is None:
                run.query("match").processAllAvailable()
                self.attributed_rows = _rows(self.config.attributed)
            _wait(run, lambda: _rows(self.config.attributed) >= (self.attributed_rows or 0))
            self._consumed(run, job.root, "totals", {"match"})
            took = time.monotonic() - began
            self._check()
        finally:
            run.stop()
        events = History(job.root).read()["event"].to_pylist()
        return Measured(took, events.count(HistoryEvent.COMPLETED.value))

    def _consumed(self, run: Run, root: Root, stage: str, producers: set[str]) -> None:
        """Wait until a stage has finished a batch after the last rows of its producers."""
        last = {channel_id(StageId(p), MAIN_OUTPUT): _last_rows(root, p) for p in producers}
        native = NativeLog(root.place(f"native/1/{stage}"))

        def reached() -> bool:
            at = {p.channel: p.version for p in native.consumed()}
            return all(at.get(channel, Version(0)) >= version for channel, version in last.items())

        _wait(run, reached)

    def _plain(self) -> Measured:
        config, spark = self.config, self.spark
        clicks = attribution.events(spark, config, config.clicks, attribution.CLICKS)
        orders = attribution.events(spark, config, config.orders, attribution.ORDERS)
        began = time.monotonic()
        with _queries() as queries:
            for name, frame in (("clicks", clicks), ("orders", orders)):
                queries.append(self._write(frame, name, f"{config.root}/{name}"))
            for query in queries:
                _await_version(query, f"{config.root}/{query.name!s}")
            matched = attribution.match(config, self._read("clicks"), self._read("orders"))
            queries.append(self._write(matched, "match", config.attributed))
            _await_version(queries[-1], config.attributed)
            summed = attribution.totals(config, spark.readStream.format("delta").load(config.attributed))
            queries.append(self._write(summed, "totals", config.totals))
            for query in queries:
                query.processAllAvailable()
            took = time.monotonic() - began
            self._check()
        return Measured(took)

    def _read(self, name: str) -> DataFrame:
        return self.spark.readStream.format("delta").load(f"{self.config.root}/{name}")

    def _single(self) -> Measured:
        config = self.config
        clicks = attribution.events(self.spark, config, config.clicks, attribution.CLICKS)
        orders = attribution.events(self.spark, config, config.orders, attribution.ORDERS)
        summed = attribution.summed(config, attribution.match(config, clicks, orders))
        began = time.monotonic()
        with _queries() as queries:
            queries.append(self._write(summed, "totals", config.totals))
            queries[-1].processAllAvailable()
            return Measured(time.monotonic() - began)

    def _write(self, frame: DataFrame, name: str, table: str) -> StreamingQuery:
        writer = frame.writeStream.format("delta").queryName(name).outputMode("append")
        return writer.option("checkpointLocation", f"{self.config.root}/native/{name}").start(table)

    def _check(self) -> None:
        found = _rows(self.config.attributed)
        if found != self.attributed_rows:
            raise AssertionError(f"{found} rows attributed, {self.attributed_rows} in the first run")


def _wait(run: Run, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds of a job; raise what the job ended with."""
    wait(lambda: condition() or run.await_termination(0))


def _await_version(query: StreamingQuery, table: str) -> None:
    """Wait until a query has made its table: a stream can only read what is there."""
    wait(lambda: DeltaTable.is_deltatable(table) or not query.isActive)


@contextmanager
def _queries() -> Iterator[list[StreamingQuery]]:
    queries: list[StreamingQuery] = []
    try:
        yield queries
    finally:
        for query in queries:
            query.stop()


def _rows(table: str) -> int:
    return sum(DeltaTable(table).get_add_actions(flatten=True)["num_records"].to_pylist())


def _last_rows(root: Root, stage: str) -> Version:
    """Return the newest entry of a stage's channel that holds rows."""
    path = root.path(root.channel(ChannelId(f"{stage}.{MAIN_OUTPUT}")))
    version = DeltaTable(path).version()
    while (commit := read_commit(root.fs, path, version)) is not None and not commit.adds:
        version -= 1
    return Version(version)


def figures(spark: SparkSession, base: Path, runs: int, files: int, console: Console) -> Iterator[Figure]:
    """Run all variants in turn, `runs` times, after runs that are not counted."""
    job = WholeJob(spark, base / "job", files, console)
    names = ["none", "plain", "single", *(f"{k}-{s}" for k in ("abs", "sync") for s in SECONDS)]
    for name in ("none", "plain", "single", "abs-1"):
        job.run(name)
    measured: dict[str, list[Measured]] = {name: [] for name in names}
    for turn in range(runs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            measured[name].append(job.run(name))
    seconds = {name: [m.seconds for m in found] for name, found in measured.items()}
    yield figure("none_seconds", seconds["none"], "s")
    yield figure("plain_vs_none", ratios(seconds["plain"], seconds["none"]))
    yield figure("single_vs_none", ratios(seconds["single"], seconds["none"]))
    for kind in ("abs", "sync"):
        for every in SECONDS:
            name, found = f"{kind}_vs_none_{every}s", measured[f"{kind}-{every}"]
            yield figure(name, ratios([m.seconds for m in found], seconds["none"]))
            yield figure(f"{name}_checkpoints", [m.checkpoints for m in found], "checkpoints")
            yield figure(f"{name}_interval", [m.seconds / max(1, m.checkpoints) for m in found], "s")
