"""A Delta source gains a column while a job with a restart strategy reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_abs.errors import StageFailed, UsageError
from spark_abs.job import Job
from spark_abs.run.run import Run
from spark_abs.store.history import HistoryEvent
from tests.job_support import events, eventually, read_table
from tests.spark.conftest import Start

Read = Callable[["Orders"], DataFrame]


@dataclass
class Orders:
    """A job that reads a Delta table: orders ── table out."""

    spark: SparkSession
    base: Path
    read: Read
    code: Callable[[DataFrame], DataFrame]

    def __post_init__(self) -> None:
        self.spark.range(3).write.format("delta").save(str(self.base / "in"))

    def stream(self) -> DataFrame:
        return self.spark.readStream.format("delta").load(str(self.base / "in"))

    def widen(self) -> None:
        rows = self.spark.createDataFrame([(3, 7), (4, 8)], "id long, w int")
        rows.write.format("delta").mode("append").option("mergeSchema", "true").save(str(self.base / "in"))

    def job(self, **settings: Any) -> Job:
        job = Job(
            "orders",
            root=str(self.base / "root"),
            spark=self.spark,
            **{"interval": "1h", "restart_strategy": "fixed-delay", "restart_delay": "10ms", **settings},
        )
        orders = job.stage("orders", [self.read(self)], self.code)
        job.sink("out", orders, table=str(self.base / "out"))
        return job

    def ids(self) -> list[int]:
        return sorted(read_table(self.base / "out")["id"].to_pylist())


def ids_only(frame: DataFrame) -> DataFrame:
    return frame.select("id")


def failed(run: Run) -> str:
    with pytest.raises(StageFailed) as said:
        run.await_termination(120)
    return str(said.value)


def test_a_restart_makes_the_frame_of_a_source_anew(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path, Orders.stream, ids_only)
    run = start(orders.job())
    eventually(run, lambda: orders.ids() == [0, 1, 2], "the first rows")
    orders.widen()
    eventually(run, lambda: orders.ids() == [0, 1, 2, 3, 4], "rows of the wider table")
    (told,) = events(str(tmp_path / "root"), HistoryEvent.STAGE_RESTARTED)
    assert "DELTA_SCHEMA_CHANGED" in str(told["detail"])
    run.stop()


def test_a_restart_takes_another_seed_of_a_random_column_for_the_same_state(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Spark gives `rand()` a new seed each time that the function of the stage is called."""

    def salted(frame: DataFrame) -> DataFrame:
        return frame.withColumn("salt", F.floor(F.rand() * 4)).dropDuplicates(["id", "salt"]).select("id")

    orders = Orders(spark, tmp_path, Orders.stream, salted)
    run = start(orders.job())
    eventually(run, lambda: orders.ids() == [0, 1, 2], "the first rows")
    orders.widen()
    eventually(run, lambda: orders.ids() == [0, 1, 2, 3, 4], "rows of the wider table")
    assert len(events(str(tmp_path / "root"), HistoryEvent.STAGE_RESTARTED)) == 1
    run.stop()


def test_a_column_that_reaches_an_output_ends_the_job_and_a_start_says_what_its_table_lacks(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path, Orders.stream, lambda frame: frame)
    run = start(orders.job())
    eventually(run, lambda: orders.ids() == [0, 1, 2], "the first rows")
    orders.widen()
    assert "its output 'main' has changed: w int is new. Start the job again" in failed(run)
    with pytest.raises(UsageError, match="w: missing in the table, int in the query"):
        start(orders.job(), available_now=True)
    assert orders.ids() == [0, 1, 2]


def test_a_frame_that_cannot_be_made_anew_ends_the_job_without_a_restart(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path, lambda orders: ids_only(orders.stream()), ids_only)
    run = start(orders.job(restart_attempts="unlimited"))
    eventually(run, lambda: orders.ids() == [0, 1, 2], "the first rows")
    orders.widen()
    said = failed(run)
    assert "[DELTA_SCHEMA_CHANGED_WITH_VERSION] Detected schema change in version 1" in said
    assert "start the job again from its script" in said
    assert events(str(tmp_path / "root"), HistoryEvent.STAGE_RESTARTED) == []
    start(orders.job(), available_now=True).await_termination()
    assert orders.ids() == [0, 1, 2, 3, 4]
