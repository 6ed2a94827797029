"""Lookups: each batch joins with the version that it chose, whatever happens to the table or to the run.

The oracle is what a person would write down: which version was the newest when a file was read.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import DamageError, GraphError, Refused, StageFailed, UsageError
from spark_abs.job import Job
from spark_abs.model import LookupVersion, Version
from spark_abs.plan.lookups import OpenedLookup, as_planned
from spark_abs.plan.specs import Stage
from tests.job_support import Feed, grow_old, manifests, read_table
from tests.spark.conftest import Start

Rows = list[tuple[object, ...]]


@dataclass
class Shop:
    """Orders that are joined with the customers of the moment.

    orders ── enriched ─┬─ tables main, ours (an output) ── after: table after
                        └─ function seen
    """

    spark: SparkSession
    base: Path
    refresh: str = "batch"
    fails_at: str = ""
    seen: dict[int, Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "orders", "id long, customer long")

    @property
    def customers(self) -> str:
        return str(self.base / "customers")

    def customer(self, *numbers: int, mode: str = "append") -> None:
        rows = self.spark.createDataFrame([(n, f"name {n}") for n in numbers], "customer long, name string")
        rows.write.format("delta").mode(mode).save(self.customers)

    def order(self, *customers: int) -> None:
        first = sum(len(rows) for rows in self.feed.files)
        self.feed.write(*({"id": first + n, "customer": c} for n, c in enumerate(customers)))

    def failpoint(self, point: str) -> None:
        if point == self.fails_at and self.has_rows():
            self.fails_at = ""
            raise OSError(f"no luck at {point}")

    def has_rows(self) -> bool:
        """Say whether an output holds rows: a batch with nothing but a barrier may be the first."""
        tables = [self.base / "root/channels/enriched.main", self.base / "ours"]
        found = [read_table(t).num_rows for t in tables if (t / "_delta_log").exists()]
        return bool(sum(found) or self.shown)

    def job(self, name: str = "customers") -> tuple[Job, Stage]:
        job = Job("shop", root=str(self.base / "root"), spark=self.spark, interval="1h")
        job.failpoint = self.failpoint
        lookup = job.lookup(name, table=self.customers, refresh=self.refresh)
        orders = job.source("orders", self.feed.stream())
        return job, job.stage("enriched", [orders, lookup], join, outputs={"ours": known})

    def see(self, frame: DataFrame, batch: int) -> None:
        self.seen[batch] = sorted(tuple(row) for row in frame.collect())

    @property
    def shown(self) -> list[Rows]:
        """What the function was given, by batch; batches with nothing but a barrier left out."""
        return [rows for _, rows in sorted(self.seen.items()) if rows]

    def with_channel(self, lookup: str = "customers") -> Job:
        job, enriched = self.job(lookup)
        job.sink("main", enriched, table=str(self.base / "main"))
        job.sink("ours", enriched["ours"], table=str(self.base / "ours"))
        after = job.stage("after", [enriched], lambda frame: frame)
        job.sink("after", after, table=str(self.base / "after"))
        job.sink("seen", enriched["ours"], foreach_batch=self.see)
        return job

    def with_function(self) -> Job:
        job, enriched = self.job()
        job.sink("seen", enriched, foreach_batch=self.see)
        return job

    def rows(self, table: str) -> Rows:
        return sorted(tuple(row.values()) for row in read_table(self.base / table).to_pylist())


def join(orders: DataFrame, customers: DataFrame) -> DataFrame:
    return orders.join(customers, "customer", "left").select("id", "name")


def known(batch: DataFrame) -> DataFrame:
    return batch.where("name IS NOT NULL")


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Shop:
    return Shop(spark, tmp_path)


def run(job: Job, start: Start) -> None:
    assert start(job, available_now=True).await_termination(120)


def fail(shop: Shop, job: Job, start: Start, point: str) -> None:
    shop.fails_at = point
    with pytest.raises((StageFailed, OSError)):
        run(job, start)
    assert not shop.fails_at, f"it did not come to {point}"


def test_each_batch_joins_with_the_newest_version_also_across_restores(shop: Shop, start: Start) -> None:
    """A row appended later joins. A checkpoint says the version, and a restore goes to before and back."""
    shop.customer(1)
    shop.order(1, 2)
    said = f"looks up customers, table {shop.customers}: the newest version in each batch"
    assert said in str(shop.with_channel().explain())
    run(shop.with_channel(), start)
    first = [(0, "name 1"), (1, None)]
    assert shop.rows("main") == shop.rows("after") == first
    shop.customer(2)
    shop.order(2, 3)
    run(shop.with_channel(), start)
    second = [*first, (2, "name 2"), (3, None)]
    assert shop.rows("main") == shop.rows("after") == second
    assert shop.rows("ours") == [(0, "name 1"), (2, "name 2")]
    assert shop.shown == [[(0, "name 1")], [(2, "name 2")]]
    root = str(shop.base / "root")
    cuts = [m for m in manifests(root) if m.stages]
    read = [s.lookups for m in (cuts[0], cuts[-1]) for s in m.stages if s.stage == "enriched"]
    assert [(v.table, v.version) for (v,) in read] == [(shop.customers, 0), (shop.customers, 1)]

    shop.customer(3)
    spark_abs.open(root, shop.spark).restore(cuts[0].id)
    assert shop.rows("main") == first
    run(shop.with_channel(), start)  # batches after the checkpoint choose anew
    assert shop.rows("main") == shop.rows("after") == [*first, (2, "name 2"), (3, "name 3")]
    spark_abs.open(root, shop.spark).restore(cuts[-1].id)
    run(shop.with_channel(), start)
    assert shop.rows("main") == shop.rows("after") == second


@pytest.mark.parametrize("point", ["commit-main", "commit-ours"])
def test_a_repeated_batch_reads_the_version_that_its_first_commit_names(
    shop: Shop, start: Start, point: str
) -> None:
    """Killed after its first commit, while the table moves on: a channel; of a stage without one a table."""
    shop.customer(1)
    shop.order(1, 2)

    def declare() -> Job:
        if point == "commit-main":
            return shop.with_channel()
        job, enriched = shop.job()
        job.sink("ours", enriched["ours"], table=str(shop.base / "ours"))
        job.sink("seen", enriched, foreach_batch=shop.see)
        return job

    fail(shop, declare(), start, f"batch.enriched.{point}.after")
    shop.customer(2)
    run(declare(), start)
    assert shop.rows("ours") == [(0, "name 1")]
    if point == "commit-main":
        assert shop.rows("main") == shop.rows("after") == [(0, "name 1"), (1, None)]
    else:
        assert shop.shown == [[(0, "name 1"), (1, None)]]
    shop.order(2)
    run(declare(), start)
    assert shop.rows("ours") == [(0, "name 1"), (2, "name 2")]


def test_a_function_sees_a_repeated_batch_as_before(shop: Shop, start: Start) -> None:
    """No commit names the version: it is written down before the function is called. Then the next one."""
    shop.customer(1)
    shop.order(1, 2)
    fail(shop, shop.with_function(), start, "batch.enriched.handover.before")
    assert shop.shown == [[(0, "name 1"), (1, None)]]
    shop.seen.clear()
    shop.customer(2)
    shop.order(2)
    run(shop.with_function(), start)
    assert shop.shown == [[(0, "name 1"), (1, None)], [(2, "name 2")]]


def test_a_lookup_that_is_never_refreshed_stays_at_the_version_of_the_first_start(
    shop: Shop, start: Start
) -> None:
    """Through starts and a restore; with a duration a batch goes on with the version until it is that old."""
    shop.refresh = "never"
    shop.customer(1)
    run(shop.with_channel(), start)
    shop.customer(2)
    grow_old(shop.customers)
    shop.order(1, 2)
    run(shop.with_channel(), start)
    first = [(0, "name 1"), (1, None)]
    assert shop.rows("main") == first
    root = str(shop.base / "root")
    spark_abs.open(root, shop.spark).restore(manifests(root)[-1].id)
    shop.order(2)
    run(shop.with_channel(), start)
    assert shop.rows("main") == [*first, (2, None)]
    shop.refresh = "1d"
    shop.order(2)
    run(shop.with_channel(), start)  # the version was chosen now
    assert shop.rows("main")[3:] == [(3, None)]
    shop.refresh = "batch"
    shop.order(2)
    run(shop.with_channel(), start)
    assert shop.rows("main")[4:] == [(4, "name 2")]


def changed(shop: Shop, start: Start, change: Callable[[], None]) -> StageFailed:
    """Run a batch, change the table, and return how the next batch fails."""
    shop.customer(1)
    shop.order(1)
    run(shop.with_channel(), start)
    change()
    shop.order(1)
    with pytest.raises((StageFailed, DamageError)) as failed:
        run(shop.with_channel(), start)
    return failed.value  # type: ignore[return-value]


def test_a_table_that_was_made_anew_ends_the_stage_until_it_is_declared(shop: Shop, start: Start) -> None:
    """Also while a batch may go on with its version: the new table has one of that number, too."""
    shop.refresh = "1d"
    old: list[str] = []

    def replace() -> None:
        old.append(str(DeltaTable(shop.customers).metadata().id))
        shutil.rmtree(shop.customers)
        shop.customer(1, 2)

    said = str(changed(shop, start, replace))
    assert str(DeltaTable(shop.customers).metadata().id) in said
    assert old[0] in said
    assert "a lookup of another name" in said
    job = shop.with_channel("people")
    assert "lookup people was customers" in str(job.check())
    run(job, start)
    assert shop.rows("main") == [(0, "name 1"), (1, "name 1")]


def test_columns_that_come_are_left_out_and_one_that_changes_ends_the_stage(shop: Shop, start: Start) -> None:
    shop.customer(1)
    shop.order(1)
    job, enriched = shop.job()
    job.sink("main", enriched, table=str(shop.base / "main"))
    running = start(job)
    running.query("orders").processAllAvailable()
    running.checkpoint()
    shop.spark.sql(f"ALTER TABLE delta.`{shop.customers}` ADD COLUMN city string")
    shop.order(1)
    running.query("orders").processAllAvailable()
    running.checkpoint()
    assert shop.rows("main") == [(0, "name 1"), (1, "name 1")]
    frame = shop.spark.createDataFrame([(1, 5)], "customer long, name int")
    frame.write.format("delta").mode("overwrite").option("overwriteSchema", True).save(shop.customers)
    shop.order(1)
    with pytest.raises(StageFailed, match=r"has changed from.*name:string.*name:int.*at version 2"):
        running.await_termination(120)


def test_fields_that_come_are_left_out_however_deep(spark: SparkSession) -> None:
    """A version before the one that the stage was planned with has nulls for what it lacks."""
    rest = "array(struct(3 AS b)) AS l, map('k', struct(4 AS c)) AS m"
    less = spark.sql(f"SELECT 1 AS id, struct(2 AS a) AS s, {rest}")
    more = spark.sql(
        "SELECT 'x' AS new, map('k', struct(5 AS d, 4 AS c)) AS m, array(struct(3 AS b, 6 AS e)) AS l, "
        "struct(7 AS f, 2 AS a) AS s, 1 AS id"
    )
    at = LookupVersion("l", "/l", "id", Version(5), 0)
    lookup: Any = SimpleNamespace(name="l")
    row = (1, (2,), [(3,)], {"k": (4,)})
    for version in (4, 6):
        found = as_planned(more, OpenedLookup(lookup, at, less, ""), Version(version))
        assert found.columns == less.columns
        assert found.collect() == [row]
    planned = OpenedLookup(lookup, at, more, "")
    assert as_planned(less, planned, Version(4)).collect() == [
        (None, {"k": (None, 4)}, [(3, None)], (None, 2), 1)
    ]
    with pytest.raises(Refused, match="start the job again"):
        as_planned(less, planned, Version(6))
    other = spark.sql(f"SELECT 1 AS id, struct('2' AS a) AS s, {rest}")
    with pytest.raises(Refused, match="s:struct<a:string>"):
        as_planned(other, OpenedLookup(lookup, at, less, ""), Version(4))


def test_a_version_that_was_vacuumed_is_said_and_a_checkpoint_is_the_way_back(
    shop: Shop, start: Start
) -> None:
    """A batch has committed to one output, and another one has to be evaluated at a version that is gone."""
    shop.customer(1)
    run(shop.with_function(), start)
    shop.order(1)
    fail(shop, shop.with_function(), start, "batch.enriched.handover.before")
    shop.customer(1, 2, mode="overwrite")
    shop.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    shop.spark.sql(f"VACUUM delta.`{shop.customers}` RETAIN 0 HOURS")
    with pytest.raises(StageFailed, match=r"version 0 of .*customers has lost .*restart='checkpoint'"):
        run(shop.with_function(), start)
    shop.seen.clear()
    assert start(shop.with_function(), available_now=True, restart="checkpoint").await_termination(120)
    assert shop.shown == [[(0, "name 1")]]


def test_a_version_for_ever_that_was_vacuumed_is_left_under_another_name(shop: Shop, start: Start) -> None:
    """A restore keeps such a version, so going back is no way on."""
    shop.refresh = "never"
    shop.customer(1)
    shop.order(1)
    run(shop.with_channel(), start)
    shop.customer(1, 2, mode="overwrite")
    shop.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    shop.spark.sql(f"VACUUM delta.`{shop.customers}` RETAIN 0 HOURS")
    shop.order(2)
    with pytest.raises(StageFailed, match=r"version 0 of .* has lost .*lookup under a new name") as no:
        run(shop.with_channel(), start)
    assert "restart=" not in str(no.value)
    run(shop.with_channel("people"), start)
    assert shop.rows("main") == [(0, "name 1"), (1, "name 2")]


def test_what_a_lookup_cannot_do_is_refused_with_the_way_that_works(shop: Shop, tmp_path: Path) -> None:
    shop.customer(1)
    job = Job("refused", root=str(tmp_path / "refused"), spark=shop.spark)
    customers = job.lookup("customers", table=shop.customers)
    orders = job.source("orders", shop.feed.stream())
    more = job.source("more", shop.feed.stream())
    with pytest.raises(GraphError, match=r"beside 2 streams.*in a stage before it"):
        job.stage("two", [orders, more, customers], lambda a, b, c: a.union(b).join(c, "customer"))
    with pytest.raises(
        UsageError, match=r"refresh must be 'batch', 'never' or a duration such as '30s', found 'often'"
    ):
        job.lookup("often", table=shop.customers, refresh="often")
    for name, function, said in (
        ("counts", lambda o, c: join(o, c).groupBy("name").count(), "into a stage before or after"),
        ("outer", lambda o, c: c.join(o, "customer", "left"), "not supported"),
        ("late", lambda o, c: join(o.withWatermark("at", "1 second"), c), "has a watermark"),
    ):
        other = Job("refused", root=str(tmp_path / "refused"), spark=shop.spark)
        stream = other.source("orders", shop.feed.stream().withColumn("at", F.current_timestamp()))
        lookup = other.lookup("customers", table=shop.customers)
        other.stage(name, [stream, lookup], function)
        with pytest.raises(GraphError, match=f"stage '{name}' .*{said}"):
            other.start()
    shop.spark.sql(f"CREATE TABLE default.looked_up USING delta LOCATION '{shop.customers}'")
    assert other.lookup("named", table="default.looked_up").table == shop.customers
    other.stages.clear()
    lost = other.lookup("lost", table=str(tmp_path / "lost"))
    other.stage("lost", [shop.feed.stream(), lost], join)
    with pytest.raises(GraphError, match="there is no Delta table at"):
        other.start()


def test_a_start_says_of_a_static_table_that_it_stays(
    shop: Shop, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    shop.customer(1)
    shop.order(1)
    job = Job("static", root=str(shop.base / "static"), spark=shop.spark)
    static = shop.spark.read.format("delta").load(shop.customers)
    job.sink("main", job.stage("enriched", [shop.feed.stream(), static], join), table=str(shop.base / "main"))
    with caplog.at_level(logging.INFO, "spark_abs"):
        run(job, start)
    said = "customers is read at version 0 for the whole run: use job.lookup(...) to follow it"
    assert sum(said in record.getMessage() for record in caplog.records) == 1
