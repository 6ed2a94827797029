"""A sink that is slower than the interval: status and history name it, and not the stages before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.diagnosis.diagnoses import diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.diagnosis.health import health
from spark_abs.job import Job
from spark_abs.observe.headline import headline
from spark_abs.observe.metrics import read_metrics
from spark_abs.observe.status import JobStatus, StageStatus
from spark_abs.store.activity import Phase
from spark_abs.store.clock import now_ms
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import Feed, events, eventually
from tests.spark.conftest import Start


@dataclass
class SlowSink:
    """`clean` and `customers` are joined by `tell`, whose function is held until it is freed."""

    spark: SparkSession
    tmp: Path
    freed: threading.Event = field(default_factory=threading.Event)
    called: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.root = str(self.tmp / "root")
        self.feeds = {name: Feed(self.spark, self.tmp / name) for name in ("clean", "customers")}

    def write(self, number: int) -> None:
        for feed in self.feeds.values():
            feed.write({"id": number, "k": number, "v": 1, "ts": number})

    def mail(self, frame: DataFrame, _: int) -> None:
        frame.collect()
        self.called.set()
        self.freed.wait()

    def job(self) -> Job:
        job = Job("shop", root=self.root, spark=self.spark, interval="1s", timeout="3s")
        clean = job.source("clean", self.feeds["clean"].stream())
        customers = job.source("customers", self.feeds["customers"].stream())

        def match(left: DataFrame, right: DataFrame) -> DataFrame:
            timed = left.withWatermark("ts", "10 seconds")
            return timed.join(right.withWatermark("ts", "10 seconds").select(F.col("id")), "id")

        tell = job.stage("tell", [clean, customers], match)
        job.sink("mail", tell, foreach_batch=self.mail)
        return job

    def status(self) -> JobStatus:
        return spark_abs.open(self.root).status()

    def tell(self) -> StageStatus:
        return next(stage for stage in self.status().stages if stage.stage == "tell")


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path, start: Start) -> Iterator[SlowSink]:
    """It asks for `start`, so the function is free before the job is stopped."""
    slow = SlowSink(spark, tmp_path)
    yield slow
    slow.freed.set()


def test_a_function_that_outlasts_every_checkpoint_is_named_first(shop: SlowSink, start: Start) -> None:
    shop.write(1)
    run = start(shop.job())
    eventually(run, shop.called.is_set, "the function is called")
    for number in range(2, 5):
        shop.write(number)
    eventually(run, lambda: (found := shop.status().aborted) and found.number > 1, "checkpoints are aborted")

    def culprit() -> bool:
        stages = shop.status().stages
        return [stage.stage for stage in stages if stage.first] == ["tell"] == [stages[0].stage]

    eventually(run, culprit, "the stage with the function is first")
    found = shop.status()
    assert found.settings == "interval 1s, timeout 3s"
    tell, said = found.stages[0], headline(found, now_ms())
    activity = tell.activity
    assert activity is not None
    assert (activity.phase, activity.what) == (Phase.CALLING, "mail")
    assert activity.began_ms is not None
    assert now_ms() - activity.began_ms > 3_000, "two checkpoints have had their time"
    assert said.startswith("job shop: the last "), said
    assert "tell is late: batch " in said
    assert "function 'mail' is called" in said
    late = [row for row in events(shop.root, HistoryEvent.STAGE_WAITING) if row["stage"] == "tell"]
    assert "function 'mail' is called" in str(late[-1]["detail"])
    aborted = events(shop.root, HistoryEvent.ABORTED)[-1]
    assert "; tell is late: batch " in str(aborted["detail"])

    root = Root(shop.root)
    first_of_kind = {one.kind: one for one in reversed(diagnoses(gather(root, now_ms(), 30_000)))}
    assert {"checkpoints-aborted", "slow-sink", "interval-too-short"} <= first_of_kind.keys()
    assert first_of_kind["slow-sink"].said.startswith("function 'mail' of stage tell takes ")
    assert "tell is late" in first_of_kind["checkpoints-aborted"].said
    judged = health(shop.status(), now_ms(), max_age_ms=1_000, max_lag_ms=None)
    assert not judged.healthy
    assert "no checkpoint was ever completed" in judged.line
    held = 'spark_abs_stage_holds_checkpoint_up{job_name="shop",stage="tell"} 1'
    eventually(run, lambda: held in read_metrics(root, now_ms()), "the metric while one is open")

    def unread() -> int:
        activity = shop.tell().activity
        return 0 if activity is None else sum(one.rows for one in activity.inputs)

    eventually(run, lambda: unread() > 0, "rows queue up in its channels")
    shop.freed.set()
    run.set(timeout="3m")  # as the doctor says
    eventually(run, lambda: shop.status().last is not None, "a checkpoint is complete")
    eventually(run, lambda: shop.status().aborted is None, "none was aborted since")
    for stage in ("clean", "customers", "tell"):
        run.query(stage).processAllAvailable()
    eventually(run, lambda: not unread(), "all rows are read")
    eventually(run, lambda: (a := shop.tell().activity) and a.rows_per_s is not None, "Spark's figures")
    activity = shop.tell().activity
    assert activity is not None
    assert activity.state_rows is not None, "a join keeps state"
    assert activity.slowest_ms is not None
    assert activity.slowest_ms > 3_000
    run.stop()
    ended = shop.status()
    assert (ended.told_ms, [stage.activity for stage in ended.stages]) == (None, [None] * 3)
