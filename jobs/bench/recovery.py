"""A driver or an executor is killed: how long until new rows come, and until none is late.

The job of `overhead`, from where it was and from its newest checkpoint, and the same two queries without
spark_abs, at half of the rate that the job sustains. Each runs in a process of its own. A killed driver is
started again at once; an executor, one of two on a standalone cluster of this machine, is replaced by Spark,
and the driver goes on with the other one: batches that it had are not late, so what counts there are rows
that are created after the kill, and how long any come late.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from bench.figures import Figure, figure, ratios
from bench.overhead import EVERY_S, Feed, commits, counts, declare, sustained, write_rows
from bench.processes import tree
from bench.rows_again import rows_again
from bench.session import session
from tests.crash.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAYS = ("job", "checkpoint", "plain")
EXECUTOR_WAYS = ("job", "plain")
_LOCAL = "local[2]"
_WORKERS = 2
_BEFORE_S, _AT_MOST_S, _LOOK_S = 30.0, 300.0, 0.1
_NO_LATER = 1.5
"""The lag is gone when the newest row of a commit is at most so many times as late as before the kill."""
_WATCHED_S = 60.0
"""After an executor's kill: as long as it takes Spark to replace it, and to catch up, many times over."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Seconds from the kill."""

    first_row_s: float
    """Until a row is in the last table that was not there before; of an executor, one created since."""
    lag_gone_s: float
    rows_again: int
    """Of all queries, see `rows_again`."""


def _plain(spark: SparkSession, base: Path) -> None:
    """Run the two queries with a Delta table between them, and one after."""
    rows, out = str(base / "rows"), str(base / "out")
    if not (base / "rows" / "_delta_log").exists():
        spark.createDataFrame([], "key long, created long").write.format("delta").save(rows)

    def write(batch: DataFrame, _: int) -> None:
        batch.write.format("delta").mode("append").save(out)

    stream = spark.readStream.schema("key long, created long").option("maxFilesPerTrigger", 1000)
    first = stream.parquet(str(base / "input")).writeStream.format("delta")
    first.option("checkpointLocation", str(base / "c1")).start(rows)
    second = counts(spark.readStream.format("delta").load(rows)).writeStream.outputMode("update")
    second.foreachBatch(write).option("checkpointLocation", str(base / "c2")).start().awaitTermination()


def _process(way: str, base: Path, master: str) -> None:
    spark = session(master)
    if way == "rate":
        rate = int(sustained(spark, base) / 2 * EVERY_S)
        (base.parent / "rate").write_text(str(rate))
    elif way == "plain":
        _plain(spark, base)
    else:
        again = way == "checkpoint" and (base / "root").exists()
        job = declare(spark, base, {"interval": "3s"}, 1000)
        job.start(restart="checkpoint" if again else "native", takeover=True).await_termination()


def _start(way: str, base: Path, master: str) -> subprocess.Popen[bytes]:
    with (base.parent / f"{way}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.recovery", way, str(base), master],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _recover(way: str, base: Path, rows: int, before_s: float, master: str) -> Recovered:
    """Kill the driver, or, on a cluster, an executor."""
    (base / "input").mkdir(parents=True)
    write_rows(base / "input", 999_999, rows)
    feed, process = Feed(base / "input", rows), _start(way, base, master)
    thread = threading.Thread(target=feed.run)
    thread.start()
    try:
        _newer(base, 0.0, 0)
        time.sleep(before_s)
        before = [(at, int(created.max())) for at, created in commits(base)]
        usual = median(at - newest / 1e6 for at, newest in before[-10:])
        if master == _LOCAL:
            os.killpg(process.pid, signal.SIGKILL)
            killed = time.time()
            process.wait()
            again = rows_again(way, base)
            process = _start(way, base, master)
        else:
            again = rows_again(way, base)  # those who go on change the logs
            os.kill(_executor(), signal.SIGKILL)
            killed = time.time()
            first, _ = _newer(base, killed, int(killed * 1e6))
            return Recovered(first - killed, _last_late(base, killed, usual) - killed, again)
        at, newest = _newer(base, killed, max(newest for _, newest in before))
        first = at
        while at - newest / 1e6 > _NO_LATER * usual:
            at, newest = _newer(base, at, newest)
        return Recovered(first - killed, at - killed, again)
    finally:
        feed.stop()
        thread.join()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(base, ignore_errors=True)


def _last_late(base: Path, killed: float, usual: float) -> float:
    """Watch for a minute, and return when the last commit was whose newest row came late."""
    time.sleep(max(0.0, killed + _WATCHED_S - time.time()))
    since = commits(base, killed)
    return max((at for at, rows in since if at - int(rows.max()) / 1e6 > _NO_LATER * usual), default=killed)


def _executor() -> int:
    """Return the id of an executor's JVM below this process."""
    for place in tree():
        with suppress(OSError):
            command = (place / "cmdline").read_bytes().split(b"\0")
            if b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in command:
                return int(place.name)
    raise LookupError("the cluster has no executor")


def _newer(base: Path, after: float, newest: int) -> tuple[float, int]:
    """Wait for a commit after a moment with newer rows; return when it was, and its newest row, in µs."""
    until = time.monotonic() + _AT_MOST_S
    while time.monotonic() < until:
        for at, created in commits(base, after):
            if created.max() > newest:
                return at, int(created.max())
        time.sleep(_LOOK_S)
    raise TimeoutError(f"no new rows in {base / 'out'}")


def figures(base: Path, runs: int, divide: int, console: Console) -> Iterator[Figure]:
    """Kill each in turns: drivers, then executors. `divide` makes rate and time before the kill smaller."""
    base.mkdir()
    (base / "driver").mkdir()
    yield from _figures("recovery", WAYS, base / "driver", runs, divide, _LOCAL, console)
    (base / "cluster").mkdir()
    (base / "executor").mkdir()
    with Cluster(base / "cluster", _WORKERS) as cluster:
        yield from _figures(
            "recovery_executor", EXECUTOR_WAYS, base / "executor", runs, divide, cluster.url, console
        )


def _figures(
    name: str, ways: Sequence[str], base: Path, runs: int, divide: int, master: str, console: Console
) -> Iterator[Figure]:
    assert _start("rate", base / "rate-of", master).wait() == 0, (base / "rate.log").read_text()
    rows = int((base / "rate").read_text()) // divide
    found: dict[str, list[Recovered]] = {way: [] for way in ways}
    for turn in range(runs):
        for way in ways:
            one = _recover(way, base / f"{way}-{turn}", rows, _BEFORE_S / divide, master)
            found[way].append(one)
            took = f"first row after {one.first_row_s:.1f} s, none late after {one.lag_gone_s:.1f} s"
            console.print(f"{name}, {way}: {took}, {one.rows_again} rows again")
    for way in ways:
        yield figure(f"{name}_{way}_first_row_seconds", [one.first_row_s for one in found[way]], "s")
        yield figure(f"{name}_{way}_lag_gone_seconds", [one.lag_gone_s for one in found[way]], "s")
        yield figure(f"{name}_{way}_rows_again", [one.rows_again for one in found[way]], "rows")
    first = {way: [one.first_row_s for one in found[way]] for way in ways}
    gone = {way: [one.lag_gone_s for one in found[way]] for way in ways}
    yield figure(f"{name}_first_row_vs_plain", ratios(first["job"], first["plain"]))
    yield figure(f"{name}_lag_gone_vs_plain", ratios(gone["job"], gone["plain"]))


if __name__ == "__main__":
    _process(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
