"""Faults provoked on Spark, each in a job at work, and what the doctor says of them.

The numbers of a sentence are compared with what the test has counted or timed, with files of the root, and
with each other.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.diagnosis.diagnoses import LIMITS, Diagnosis, Limits, diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.job import Job
from spark_abs.run.run import Run
from spark_abs.store.activity import StageActivity
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from tests.job_support import EPOCH, Feed, eventually, read_table
from tests.spark.conftest import Start

pytestmark = pytest.mark.long

QUICK = replace(LIMITS, held_ms=1_000, lag_ms=500, lag_over_ms=1_000, lag_growth=0.01, disk_over_ms=1_000)
"""Of faults that need minutes to be told from a moment's delay, seconds are enough here."""
SAMPLE_EVERY_MS = 500
_MS = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"B": 1, "kB": 2**10, "MB": 2**20, "GB": 2**30}


def quantity(text: str, units: Mapping[str, int]) -> float:
    """Return what a sentence says as a number: `1.5 min` with `_MS` is 90000."""
    number, unit = text.split(" ")
    return float(number) * units[unit]


def doctor(root: str, limits: Limits = LIMITS) -> dict[str, Diagnosis]:
    """Return what the doctor says, by its kind; of each kind there may be one."""
    found = diagnoses(gather(Root(root), now_ms(), 30_000), limits)
    by_kind = {one.kind: one for one in found}
    assert len(by_kind) == len(found), found
    return by_kind


def doctor_elsewhere(root: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Ask in a process of its own, and require the exit code."""
    command = [sys.executable, "-m", "spark_abs", "doctor", root, "--output", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    assert ran.returncode == (1 if found else 0), ran.stderr
    return {f"{one['kind']} {n}": one for n, one in enumerate(found)}


def numbers(pattern: str, said: str) -> tuple[str, ...]:
    """Return what a sentence has in place of each group."""
    found = re.fullmatch(pattern, said)
    assert found is not None, said
    return found.groups()


@dataclass
class Shop:
    """Clicks and orders are joined by `match`, whose function waits while it is held."""

    spark: SparkSession
    tmp: Path
    free: threading.Event = field(default_factory=threading.Event)
    called: threading.Event = field(default_factory=threading.Event)
    number: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.root = str(self.tmp / "root")
        self.feeds = {name: Feed(self.spark, self.tmp / name) for name in ("clicks", "orders")}
        self.free.set()
        self.run: Run | None = None

    def write(self, feed: str, rows: int = 1) -> int:
        """Write one file, with later times than those before; return the second of the last row."""
        ids = [next(self.number) for _ in range(rows)]
        self.feeds[feed].write(*({"id": n, "k": n, "v": n, "ts": 60 * n} for n in ids))
        return 60 * ids[-1]

    def mail(self, frame: DataFrame, _: int) -> None:
        frame.collect()
        self.called.set()
        self.free.wait()

    def job(self) -> Job:
        job = Job("shop", root=self.root, spark=self.spark, interval="1h")
        clicks = job.source("clicks", self.feeds["clicks"].stream())
        orders = job.source("orders", self.feeds["orders"].stream())

        def match(left: DataFrame, right: DataFrame) -> DataFrame:
            timed = left.withWatermark("ts", "10 seconds")
            return timed.join(right.withWatermark("ts", "10 seconds").select(F.col("id")), "id")

        job.sink("mail", job.stage("match", [clicks, orders], match), foreach_batch=self.mail)
        return job

    def settle(self) -> None:
        """Let all rows be processed."""
        assert self.run is not None
        for stage in ("clicks", "orders", "match"):
            self.run.query(stage).processAllAvailable()

    def match(self) -> StageActivity:
        (activity,) = (s.activity for s in spark_abs.open(self.root).status().stages if s.stage == "match")
        assert activity is not None
        return activity

    def until(self, kind: str, limits: Limits = QUICK) -> Diagnosis:
        """Wait until the doctor names a fault in the stage, or of the job."""
        assert self.run is not None
        eventually(self.run, lambda: kind in doctor(self.root, limits), f"the doctor says {kind}")
        found = doctor(self.root, limits)[kind]
        assert found.stage in ("match", None)
        return found

    def until_not(self, kind: str, limits: Limits = QUICK) -> None:
        assert self.run is not None
        eventually(self.run, lambda: kind not in doctor(self.root, limits), f"the doctor takes {kind} back")


@pytest.fixture(scope="module")
def shop(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One job for faults that leave no trace in it. Whoever provokes one takes it back."""
    shop = Shop(spark, tmp_path_factory.mktemp("shop"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spark_abs.checkpointing.reporting.SAMPLE_EVERY_MS", SAMPLE_EVERY_MS)
        shop.run = shop.job().start()
        yield shop
        shop.free.set()
        shop.run.stop()


@pytest.mark.parametrize("stands", ["has not begun", "has stood still"])
def test_a_watermark_that_an_idle_input_holds(shop: Shop, stands: str) -> None:
    """First, before there ever was an order; then after one."""
    assert shop.run is not None
    began = time.monotonic()

    def held() -> bool:
        shop.write("clicks")
        shop.settle()
        return "held-watermark" in doctor(shop.root, QUICK)

    eventually(shop.run, held, "the watermark is held")
    found = doctor(shop.root, QUICK)["held-watermark"]
    (since,) = numbers(
        rf"The watermark of stage match {stands} for (.+): no rows came from orders\.main in this time, "
        r"while clicks\.main had some; windows stay open, and state stays",
        found.said,
    )
    assert 1_000 <= quantity(since, _MS) <= 1_000 * (time.monotonic() - began) + 60_000
    assert (found.stage, found.command) == ("match", f"spark-abs status {shop.root} --watch")
    assert doctor(shop.root) == {}, "it has not been for minutes"
    second = shop.write("orders")
    for _ in range(2):  # a batch has the watermark of the rows before it
        shop.write("clicks")
        shop.settle()
    shop.until_not("held-watermark")
    eventually(shop.run, lambda: shop.match().watermark_ms == 1_000 * (EPOCH + second - 10), "it has moved")


def test_a_healthy_job_has_no_diagnosis(shop: Shop) -> None:
    assert shop.run is not None
    for _ in range(4):
        shop.write("clicks", 5)
        shop.write("orders", 5)
        shop.settle()
        shop.run.checkpoint()
        assert doctor(shop.root) == {}
    assert doctor_elsewhere(shop.root) == {}


def test_a_lag_that_grows(shop: Shop) -> None:
    """What waits are rows that the test has counted, those of the batch that is held included."""
    assert shop.run is not None
    shop.settle()
    shop.called.clear()
    shop.free.clear()
    began, rows = time.monotonic(), (1, 3, 4, 5)
    shop.write("clicks", rows[0])
    eventually(shop.run, shop.called.is_set, "a batch is held")
    for number in rows[1:]:
        shop.write("clicks", number)
    shop.run.query("clicks").processAllAvailable()
    eventually(
        shop.run, lambda: sum(one.rows for one in shop.match().inputs) == sum(rows), "all rows are counted"
    )
    found = shop.until("growing-lag")
    lag, unread, _, before, rows_before = numbers(
        r"Stage match is (.+) behind, with (\d+) unread rows; (.+) ago it was (.+) behind, with (\d+): it is "
        r"slower than the stages before it",
        found.said,
    )
    assert int(unread) == sum(rows)
    assert int(rows_before) < sum(rows)
    assert quantity(before, _MS) < quantity(lag, _MS) <= 1_000 * (time.monotonic() - began) + 50
    assert found.command == f"spark-abs status {shop.root} --watch"
    shop.free.set()
    shop.until_not("growing-lag")
    shop.settle()


def test_a_disk_that_will_be_full(shop: Shop) -> None:
    assert shop.run is not None
    eventually(shop.run, lambda: gather(Root(shop.root), now_ms(), 30_000).disks, "a sample before the file")
    total, _, free = shutil.disk_usage(shop.root)
    size = max(free // 500, 64 * 2**20)  # more than its part of a day, within the time of all samples
    filled = shop.tmp / "filled"
    with filled.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    found = shop.until("disk-full")
    filled.unlink()
    has, of, lost, full_in = numbers(
        rf"The disk of {re.escape(shop.root)} has (.+) free of (.+) and loses (.+) an hour: "
        r"it is full in (.+)",
        found.said,
    )
    assert quantity(of, _BYTES) == pytest.approx(total, rel=0.01)
    assert quantity(has, _BYTES) == pytest.approx(free - size, rel=0.05)
    hours = quantity(full_in, _MS) / _MS["h"]
    assert hours == pytest.approx(quantity(has, _BYTES) / quantity(lost, _BYTES), rel=0.1)
    assert hours < 24
    assert found.command == f"spark-abs list {shop.root}"
    shop.until_not("disk-full")


def other_version(directory: Path, package: str, number: str) -> str:
    """Let a process that has this in its path see another version of a package."""
    record = directory / f"{package}-{number}.dist-info" / "METADATA"
    record.parent.mkdir(parents=True)
    record.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    return str(directory)


def test_versions_that_differ(shop: Shop, tmp_path: Path) -> None:
    assert doctor_elsewhere(shop.root) == {}
    (found,) = doctor_elsewhere(shop.root, PYTHONPATH=other_version(tmp_path, "deltalake", "0.9.9")).values()
    assert found["kind"] == "versions-differ"
    assert found["said"] == (
        "The driver has other packages than this command: "
        f"deltalake {version('deltalake')} there and 0.9.9 here"
    )
    assert "with the packages of the driver" in found["then"]


@pytest.mark.parametrize("minutes", [5, -5])
def test_a_clock_that_is_wrong(shop: Shop, monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """The clock of the driver's process; the doctor is asked in another."""
    assert shop.run is not None
    with monkeypatch.context() as patch:
        wrong = SimpleNamespace(time=lambda: time.time() + 60 * minutes, monotonic=time.monotonic)
        patch.setattr("spark_abs.store.clock.time", wrong)
        wanted = {"of the store"} if minutes < 0 else {"of the store", "this machine's"}

        def said() -> list[str]:
            found = doctor_elsewhere(shop.root).values()
            assert {one["kind"] for one in found} <= {"clock-skew"}
            return [one["said"] for one in found]

        eventually(shop.run, lambda: len(said()) == len(wanted), "the doctor sees it")
        sentences = said()
        assert len(sentences) == len(wanted)
        for sentence in sentences:
            how, much, other = numbers(
                r"The clock of the driver is (.+ \w+) (ahead of|behind) "
                r"(this machine's|the clock of the store): .*",
                sentence,
            )
            assert 4 * 60_000 < quantity(how, _MS) <= 5 * 60_000
            assert much == ("behind" if minutes < 0 else "ahead of"), other
    eventually(shop.run, lambda: doctor_elsewhere(shop.root) == {}, "the clock is right again")


SLOW_MS = 5_500
"""More than clocks may be apart."""


def test_a_slow_store_and_a_retention_that_is_shorter_than_a_restore(
    spark: SparkSession, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow store is no clock that is wrong."""
    feed, root = Feed(spark, tmp_path / "in"), str(tmp_path / "root")

    def begin() -> Run:
        job = Job("slow", root=root, spark=spark, interval="1h", keep=2)
        job.sink("sales", job.source("clicks", feed.stream()), table=str(tmp_path / "sales"))
        return start(job)

    run = begin()
    for number in range(4):
        feed.write({"id": number, "k": 1, "v": 1, "ts": number})
        run.query("clicks").processAllAvailable()
        run.checkpoint()
    run.checkpoint()
    kept = Path(root, "checkpoints")
    eventually(run, lambda: read_table(kept).num_rows == 2, "two checkpoints are kept")
    run.stop()
    quick = Place.write

    def slow(place: Place, relative: str, data: bytes) -> None:
        threading.Event().wait(SLOW_MS / 1_000)
        quick(place, relative, data)

    monkeypatch.setattr(Place, "write", slow)
    spark_abs.open(root).restore("latest")
    run = begin()

    def kinds() -> set[str]:
        found = set(doctor(root))
        assert "clock-skew" not in found
        return found

    eventually(run, lambda: kinds() == {"slow-store", "retention-too-short"}, "both are named")
    found = doctor(root)
    (took,) = numbers(
        r"Writing a file of some kilobytes into the root usually takes (.+): every commit of a batch takes "
        r"about as long at least",
        found["slow-store"].said,
    )
    assert SLOW_MS <= quantity(took, _MS) < 4 * SLOW_MS
    assert found["slow-store"].command == "spark-abs guide clusters-and-object-stores"
    made = read_table(kept).column("completed_ms").to_pylist()
    history = read_table(Path(root, "history")).to_pylist()
    (restored,) = (row["duration_ms"] for row in history if row["event"] == "restored")
    back, restore = numbers(
        r"The checkpoints that are kept reach back (.+) \(keep=2\), and the last restore took (.+): an error "
        r"that is noticed now is in all of them before a restore could be done",
        found["retention-too-short"].said,
    )
    assert quantity(back, _MS) == pytest.approx(max(made) - min(made), rel=0.05)
    assert quantity(restore, _MS) == pytest.approx(restored, rel=0.05)
    assert found["retention-too-short"].command == f"spark-abs savepoint {root} before-change"
    monkeypatch.setattr(Place, "write", quick)
    run.stop()
