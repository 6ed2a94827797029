"""A batch that always fails: what the error says, and the ways out of it."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_abs.errors import StageFailed
from spark_abs.job import Job
from tests.job_support import EPOCH, Feed, read_table
from tests.spark.conftest import Start

GOOD, POISONED, MORE = (1, 2, 3), (4, -5, 6), (7, 8)


@dataclass
class Orders:
    """A job with a table that takes no negative amount, and perhaps with a stage after it.

    orders ── checked ─┬─ table orders
                       └─ after ── table after
    """

    spark: SparkSession
    base: Path
    channel: bool

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "in", "amount long")
        self.table = self.base / "orders"
        self.spark.sql(f"CREATE TABLE delta.`{self.table}` (amount bigint) USING delta")
        self.spark.sql(f"ALTER TABLE delta.`{self.table}` ADD CONSTRAINT positive CHECK (amount > 0)")

    def write(self, *amounts: int) -> None:
        self.feed.write(*({"amount": amount} for amount in amounts))

    def job(self, code: Callable[[DataFrame], DataFrame]) -> Job:
        job = Job("orders", root=str(self.base / "root"), spark=self.spark, interval="1h")
        checked = job.stage("checked", [job.source("orders", self.feed.stream())], code)
        job.sink("orders", checked, table=str(self.table))
        if self.channel:
            job.sink("after", job.stage("after", [checked], same), table=str(self.base / "after"))
        return job

    def tables(self) -> Mapping[str, list[int]]:
        names = ("orders", "after") if self.channel else ("orders",)
        return {name: sorted(read_table(self.base / name)["amount"].to_pylist()) for name in names}


def same(frame: DataFrame) -> DataFrame:
    return frame


def positive(frame: DataFrame) -> DataFrame:
    return frame.where("amount > 0")


def refused(start: Start, job: Job) -> str:
    """Run a job that fails, and return what is said of it."""
    with pytest.raises(StageFailed) as failed:
        start(job, available_now=True).await_termination()
    return str(failed.value)


def test_a_batch_that_no_output_holds_is_evaluated_anew_with_other_code(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path, channel=False)
    orders.write(*GOOD)
    start(orders.job(same), available_now=True).await_termination()
    orders.write(*POISONED)
    said = refused(start, orders.job(same))
    constraint = "CHECK constraint positive (amount > 0) violated by row with values: - amount : -5"
    assert constraint in said
    assert "checkpoint" not in said
    orders.write(*MORE)
    start(orders.job(positive), available_now=True).await_termination()
    expected = sorted(n for n in (*GOOD, *POISONED, *MORE) if n > 0)
    assert orders.tables() == {"orders": expected}


def test_what_an_output_has_committed_is_named_and_a_checkpoint_is_the_way_back(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """The channel holds the batch: its reader, and the table, must get the same rows."""
    orders = Orders(spark, tmp_path, channel=True)
    orders.write(*GOOD)
    start(orders.job(same), available_now=True).await_termination()
    orders.write(*POISONED)
    for code in (same, positive):
        said = refused(start, orders.job(code))
        assert "CHECK constraint positive (amount > 0) violated" in said
        assert "are fixed: channel 'checked.main' (version " in said
        assert "start with restart='checkpoint'" in said
    assert orders.tables()["orders"] == sorted(GOOD)
    orders.write(*MORE)
    start(orders.job(positive), available_now=True, restart="checkpoint").await_termination()
    expected = sorted(n for n in (*GOOD, *POISONED, *MORE) if n > 0)
    assert orders.tables() == {"orders": expected, "after": expected}


def test_a_corrupt_file_is_named_and_a_start_without_it_goes_on(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path, channel=True)
    orders.write(*GOOD)
    start(orders.job(same), available_now=True).await_termination()
    torn = tmp_path / "in" / "torn.json.gz"
    whole = gzip.compress(b'{"amount": 9}\n' * 5_000)
    torn.write_bytes(whole[: len(whole) // 2])
    os.utime(torn, (EPOCH + 1, EPOCH + 1))  # else files after it are too old for the source
    assert f"while reading file file://{torn}" in refused(start, orders.job(same))
    torn.unlink()
    orders.write(*MORE)
    start(orders.job(same), available_now=True).await_termination()
    expected = sorted((*GOOD, *MORE))
    assert orders.tables() == {"orders": expected, "after": expected}
