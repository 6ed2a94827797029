"""A file that fails its batch is skipped: with a record, over restarts and restores, and in no other way."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import Refused, StageFailed
from spark_abs.job import Job
from spark_abs.observe.client import asker
from spark_abs.store.history import HistoryEvent
from tests.job_support import EPOCH, Feed, events, eventually, manifests, read_table
from tests.spark.conftest import Start

LATER = {"restart_strategy": "fixed-delay", "restart_delay": "1h"}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


class Orders:
    """A source whose files come two a batch, with a channel, and totals after it.

    orders ──┬── main ── totals ── table totals
             └── table orders
    """

    def __init__(self, spark: SparkSession, base: Path) -> None:
        self.spark, self.base, self.root = spark, base, str(base / "root")
        self.feed = Feed(spark, base / "in", "id long")

    def tear(self) -> str:
        """Add a file that cannot be read, of the same time as the next whole file; return its URI."""
        number = len(self.feed.files)
        torn = self.base / "in" / f"{number:05} torn.json.gz"
        whole = gzip.compress(b'{"id": -1}\n' * 5_000)
        torn.write_bytes(whole[: len(whole) // 2])
        os.utime(torn, (EPOCH + number, EPOCH + number))
        return torn.as_uri()

    def job(self, **settings: Any) -> Job:
        job = Job("orders", root=self.root, spark=self.spark, interval="1h", **settings)
        read = self.spark.readStream.schema(self.feed.schema).option("maxFilesPerTrigger", 2)
        orders = job.source("orders", read.json(str(self.feed.directory)))
        totals = job.stage("totals", [orders], self.totals, output_mode="update", shuffle_partitions=1)
        job.sink("orders", orders, table=str(self.base / "orders"))
        job.sink("totals", totals, table=str(self.base / "totals"))
        return job

    @staticmethod
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("id").count()

    def ids(self) -> list[int]:
        return sorted(read_table(self.base / "orders")["id"].to_pylist())

    @property
    def expected(self) -> list[int]:
        return sorted(int(str(row["id"])) for rows in self.feed.files for row in rows)

    def assert_all_once(self) -> None:
        assert self.ids() == self.expected
        assert sorted(read_table(self.base / "totals")["id"].to_pylist()) == self.expected


def test_a_skipped_file_stays_skipped_in_every_batch_that_is_computed_again(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path)
    orders.feed.write({"id": 1}, {"id": 2})
    start(orders.job(), available_now=True).await_termination()
    (before,) = manifests(orders.root)
    torn = orders.tear()
    orders.feed.write({"id": 3})
    with pytest.raises(StageFailed, match=r"while reading file .*torn\.json\.gz") as failed:
        start(orders.job(), available_now=True).await_termination()
    named = str(failed.value).partition("while reading file ")[2].partition(".json.gz")[0] + ".json.gz"

    ended = call("skip-file", orders.root, "orders", str(tmp_path / "in" / "00000.json"))
    assert (ended.exit_code, "has read" in ended.stderr) == (2, True)
    none = call("skip-file", orders.root, "totals", named)
    assert "stage 'totals' has no unfinished batch that reads files" in none.stderr
    said = call("skip-file", orders.root, "orders", named)
    assert (said.exit_code, said.stdout) == (0, f"stage 'orders' skips {torn}; no run is alive\n")
    start(orders.job(), available_now=True).await_termination()
    orders.assert_all_once()
    assert f"1 of stage orders, the last {torn}" in call("status", orders.root).stdout

    Path(tmp_path / "in" / "00001 torn.json.gz").unlink()  # a restore does not miss it
    spark_abs.open(orders.root, spark).restore(before.id)
    assert orders.ids() == [1, 2]
    start(orders.job(), available_now=True).await_termination()
    orders.assert_all_once()
    asked = [(row["kind"], row["stage"], row["by"]) for row in events(orders.root, HistoryEvent.COMMAND)]
    assert asked == [("skip-file", "orders", asker())]


@pytest.mark.long
def test_a_stage_that_waits_for_its_restart_starts_at_once_without_the_file(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    orders = Orders(spark, tmp_path)
    orders.feed.write({"id": 1}, {"id": 2})
    run = start(orders.job(**LATER))
    eventually(run, lambda: len(orders.ids()) == 2, "the rows before the torn file")
    whole = (orders.base / "in" / "00000.json").as_uri()
    with pytest.raises(Refused, match=r"has read file:.*00000\.json in a batch that has ended"):
        run.skip_file("orders", whole)
    torn = orders.tear()
    orders.feed.write({"id": 3})
    eventually(run, lambda: not run.query("orders").isActive, "the batch has failed")
    with pytest.raises(Refused, match=r"other\.json is no file of batch 1 of stage 'orders'"):
        run.skip_file("orders", torn, "/in/other.json")
    assert orders.ids() == [1, 2]
    assert run.skip_file("orders", torn) == f"stage 'orders' skips {torn}; stage 'orders' runs again"
    eventually(run, lambda: len(orders.ids()) == 3, "the rest of the batch")
    again = call("skip-file", orders.root, "orders", torn).stdout
    assert again == f"stage 'orders' skips {torn}, which {asker()} had skipped before\n"
    orders.feed.write({"id": 4})
    eventually(run, lambda: len(orders.ids()) == 4, "the batch after it")
    run.stop(savepoint="after")
    orders.assert_all_once()
