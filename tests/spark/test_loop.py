"""A job with a loop on Spark: what goes round is part of every checkpoint, and the job comes to an end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pytest
import retries
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.channels.follow import Follower
from spark_abs.errors import AbsError, GraphError
from spark_abs.job import Job
from spark_abs.manifest import Manifest
from spark_abs.model import StageId
from spark_abs.plan.frames import build_frames, draft_gate
from spark_abs.protocol.path import channel_path
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually, files_read, hold_until, manifests, read_table
from tests.spark.conftest import Start

KILLS = 10
KEYS = 12
"""Clicks are under the first half of them, each the best key of some orders."""


class Killed(Exception):
    """What a thread meets in place of the rest of its work."""


class Retries:
    """The job of `jobs/retries.py` over files that come one by one."""

    def __init__(self, spark: SparkSession, tmp: Path) -> None:
        self.spark, self.base = spark, tmp
        self.clicks = Feed(spark, tmp / "clicks", retries.CLICKS)
        self.orders = Feed(spark, tmp / "orders", retries.ORDERS)
        self.root = Root(f"{tmp}/root")
        self.failpoint: Callable[[str], None] = lambda _: None

    def job(self, interval: str = "300ms", **settings: Any) -> Job:
        job = retries.declare(
            self.spark, self.clicks.stream(), self.orders.stream(), str(self.base),
            interval=interval, keep=50, poll_interval="0ms", **settings,
        )  # fmt: skip
        job.failpoint = lambda at: self.failpoint(at)
        return job

    def order(self, rng: Random, count: int) -> None:
        """Let orders come, each with three keys of which one, two, three or none has a click."""
        first = sum(map(len, self.orders.files))
        self.orders.write(
            *(
                {"order_id": f"o{first + n}", "keys": [f"k{rng.randrange(KEYS)}" for _ in range(3)]}
                for n in range(count)
            )
        )

    def in_flight(self, manifest: Manifest) -> int:
        """Count the rows that were on their way round at a checkpoint."""
        match = manifest.stage(StageId("match"))
        assert match is not None
        (back,) = [p for p in match.positions if p.feedback]
        (until,) = [o.version for o in match.outputs if o.output == "again"]
        path = channel_path(Control.open(self.root).state, back.channel)
        entries = Follower(self.root.fs, self.root.path(self.root.channel(back.channel)), path)
        return sum(e.rows for e in entries.after(back.version) if e.version <= (until or 0))

    def assert_tables(self) -> None:
        clicks, orders = (
            pd.DataFrame([row for file in feed.files for row in file]) for feed in (self.clicks, self.orders)
        )
        for name, want in zip(("attributed", "given_up"), retries.expected(clicks, orders), strict=True):
            have = read_table(self.base / name).to_pandas()[list(want.columns)]
            assert counted(have) == counted(want), name
            assert len(want)


def counted(frame: pd.DataFrame) -> Counter[tuple[object, ...]]:
    return Counter(frame.itertuples(index=False, name=None))


def kill_after(calls: int) -> Callable[[str], None]:
    """Return a failpoint that kills whatever thread comes by after so many calls, then every other one."""
    left, lock = calls, threading.Lock()

    def failpoint(at: str) -> None:
        nonlocal left
        if at.startswith(("batch.", "agent.", "claim.", "manifest.")):
            with lock:
                left -= 1
            if left < 0:
                raise Killed(at)

    return failpoint


@pytest.mark.long
def test_killed_and_restored_at_ten_random_moments_the_loop_gives_what_a_batch_query_gives(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Nothing that goes round is lost or goes round twice (P17); a bounded run ends when nothing does."""
    rng, here = Random(17), Retries(spark, tmp_path)
    for number in range(KEYS // 2):
        here.clicks.write({"keys": [f"k{number}"], "campaign": f"c{number}", "number": number})
    run = start(here.job(interval="1h"))
    with ThreadPoolExecutor(1) as pool:
        while files_taken(here) < KEYS // 2:  # all clicks are in a checkpoint before the first order
            run.checkpoint()
        # An order's batch carries the barrier of a savepoint: what it sends round is in flight then.
        claimed = threading.Event()
        here.failpoint = hold_until("batch.orders.files.before", claimed.is_set)
        here.order(rng, 8)
        eventually(run, lambda: pending_batch(here), "the orders are about to be read")
        savepoint = pool.submit(run.savepoint, "round")
        eventually(run, lambda: "round" in open_names(here), "the savepoint is under way")
        claimed.set()
        taken = savepoint.result()
    here.failpoint = kill_after(rng.randrange(5, 40))
    for kill in range(KILLS):
        here.order(rng, 5)
        with pytest.raises((AbsError, Killed)):
            assert not run.await_termination(120), "nobody was killed"
        found = [m for m in manifests(here.root.uri) if m.id >= taken]
        to = taken if not kill else rng.choice(found[-3:]).id
        here.failpoint = lambda _: None
        spark_abs.open(here.root.uri, spark).restore(to=int(to))
        if not kill:
            assert here.in_flight(next(m for m in found if m.id == taken)) > 0
        here.failpoint = kill_after(rng.randrange(20, 90))
        run = start(here.job())
    with pytest.raises((AbsError, Killed)):
        assert not run.await_termination(120), "nobody was killed"
    here.failpoint = lambda _: None
    assert start(here.job(), available_now=True).await_termination(240)
    here.assert_tables()
    assert here.in_flight(manifests(here.root.uri)[-1]) == 0


def files_taken(here: Retries) -> int:
    return max((files_read(m, "clicks") for m in manifests(here.root.uri)), default=0)


def pending_batch(here: Retries) -> bool:
    return (here.base / "root/native/1/orders/offsets/0").exists()


def open_names(here: Retries) -> Sequence[str | None]:
    return [claim.barrier.name for claim in Control.open(here.root).state.claims]


def test_a_way_back_has_to_be_closed_once_with_the_rows_that_were_declared(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = spark_abs.Job("loop", root=str(tmp_path), spark=spark)
    numbers = job.source("numbers", spark.readStream.format("rate").load().select("value"))
    back = job.feedback("back", "value string")
    kept = job.stage(
        "kept", [numbers, back], lambda n, b: n.unionByName(b.selectExpr("bigint(value) AS value"))
    )
    with pytest.raises(GraphError, match="feedback 'back' is not closed: call its close"):
        job.graph()
    with pytest.raises(GraphError, match="'back' is declared twice"):
        job.feedback("back", "value long")
    back.close(kept)
    with pytest.raises(GraphError, match=r"'back' is already closed by 'kept\.main'"):
        back.close(numbers)
    with pytest.raises(GraphError, match=r"as value string, .*'kept\.main' has value bigint: .* in value"):
        build_frames(job.spec(), job.graph(), open_gate=lambda _, *given: draft_gate(spark, *given))
    job.feedback("other", "value long")
    with pytest.raises(GraphError, match="feedback 'other' is the input of no stage"):
        job.graph()


def test_a_bounded_run_ends_though_barriers_come_faster_than_they_go_round(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    here = Retries(spark, tmp_path)
    here.clicks.write({"keys": ["k1", "k2", "k3"], "campaign": "c1", "number": 1})
    here.order(Random(5), 4)
    job = here.job(interval="1ms", mode="unaligned")
    assert start(job, available_now=True).await_termination(120), "barriers keep the loop at work"
    here.assert_tables()
