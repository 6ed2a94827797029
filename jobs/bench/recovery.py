"""A driver is killed at half of the sustained rate: how long until new rows come, and until none is late.

The job of `overhead`, from where it was and from its newest checkpoint, and the same two queries without
spark_abs. Each runs in a process of its own, which is started again at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from bench.figures import Figure, figure, ratios
from bench.overhead import EVERY_S, Feed, commits, counts, declare, sustained, write_rows
from bench.session import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAYS = ("job", "checkpoint", "plain")
_BEFORE_S, _AT_MOST_S, _LOOK_S = 30.0, 300.0, 0.1
_NO_LATER = 1.5
"""The lag is gone when the newest row of a commit is at most so many times as late as before the kill."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Seconds from the kill."""

    first_row_s: float
    """Until a row is in the last table that was not there before."""
    lag_gone_s: float


def _plain(spark: SparkSession, base: Path) -> None:
    """Run the two queries with a Delta table between them, and one behind."""
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


def _process(way: str, base: Path) -> None:
    if way == "rate":
        rate = int(sustained(session(), base) / 2 * EVERY_S)
        (base.parent / "rate").write_text(str(rate))
    elif way == "plain":
        _plain(session(), base)
    else:
        again = way == "checkpoint" and (base / "root").exists()
        job = declare(session(), base, {"interval": "3s"}, 1000)
        job.start(restart="checkpoint" if again else "native", takeover=True).await_termination()


def _start(way: str, base: Path) -> subprocess.Popen[bytes]:
    with (base.parent / f"{way}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.recovery", way, str(base)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _recover(way: str, base: Path, rows: int) -> Recovered:
    (base / "input").mkdir(parents=True)
    write_rows(base / "input", 999_999, rows)
    feed, process = Feed(base / "input", rows), _start(way, base)
    thread = threading.Thread(target=feed.run)
    thread.start()
    try:
        _newer(base, 0.0, 0)
        time.sleep(_BEFORE_S)
        before = [(at, int(created.max())) for at, created in commits(base)]
        usual = median(at - newest / 1e6 for at, newest in before[-10:])
        os.killpg(process.pid, signal.SIGKILL)
        killed = time.time()
        process.wait()
        process = _start(way, base)
        at, newest = _newer(base, killed, max(newest for _, newest in before))
        first = at
        while at - newest / 1e6 > _NO_LATER * usual:
            at, newest = _newer(base, at, newest)
        return Recovered(first - killed, at - killed)
    finally:
        feed.stop()
        thread.join()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(base, ignore_errors=True)


def _newer(base: Path, after: float, newest: int) -> tuple[float, int]:
    """Wait for a commit after a moment with newer rows; return when it was, and its newest row, in µs."""
    until = time.monotonic() + _AT_MOST_S
    while time.monotonic() < until:
        for at, created in commits(base, after):
            if created.max() > newest:
                return at, int(created.max())
        time.sleep(_LOOK_S)
    raise TimeoutError(f"no new rows in {base / 'out'}")


def figures(base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Kill each in turns."""
    base.mkdir()
    assert _start("rate", base / "rate-of").wait() == 0, (base / "rate.log").read_text()
    rows = int((base / "rate").read_text())
    found: dict[str, list[Recovered]] = {way: [] for way in WAYS}
    for turn in range(runs):
        for way in WAYS:
            one = _recover(way, base / f"{way}-{turn}", rows)
            found[way].append(one)
            took = f"first row after {one.first_row_s:.1f} s, none late after {one.lag_gone_s:.1f} s"
            console.print(f"killed, {way}: {took}")
    for way in WAYS:
        yield figure(f"recovery_{way}_first_row_seconds", [one.first_row_s for one in found[way]], "s")
        yield figure(f"recovery_{way}_lag_gone_seconds", [one.lag_gone_s for one in found[way]], "s")
    first = {way: [one.first_row_s for one in found[way]] for way in WAYS}
    gone = {way: [one.lag_gone_s for one in found[way]] for way in WAYS}
    yield figure("recovery_first_row_vs_plain", ratios(first["job"], first["plain"]))
    yield figure("recovery_lag_gone_vs_plain", ratios(gone["job"], gone["plain"]))


if __name__ == "__main__":
    _process(sys.argv[1], Path(sys.argv[2]))
