"""Tables with a name in a catalog: as sinks, and as what the functions of wrapped queries write."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import spark_abs
from spark_abs import Delta
from spark_abs.catalog.target import enter, find_target
from spark_abs.errors import GraphError, Refused, UsageError
from spark_abs.job import Job
from spark_abs.sinks.delta.create import ensure_sink
from spark_abs.store.storage import Storage
from tests.job_support import Feed
from tests.markdown_support import GUIDE
from tests.wrapped_support import command, newest, stop, wait


@dataclass
class Shop:
    """A schema of the catalog with the tables of one test, an input, and a root."""

    spark: SparkSession
    base: Path
    schema: str
    feed: Feed
    root: str

    def rows(self, table: str) -> list[int]:
        """Count what a reader of the table by its name sees: every row stands here as often as there."""
        name = f"{self.schema}.{table}"
        if not self.spark.catalog.tableExists(name):
            return []
        return sorted(row.id for row in self.spark.table(name).collect())

    def has(self, table: str, rows: list[int]) -> bool:
        return self.rows(table) == rows

    def location(self, table: str) -> str:
        found = self.spark.sql(f"DESCRIBE DETAIL {self.schema}.{table}").head()
        assert found is not None
        return str(found.location).removeprefix("file:")

    def make(self, table: str) -> None:
        """Make a table with the row 5 of others."""
        rows = self.spark.range(5, 6).selectExpr("id", "CAST(NULL AS LONG) AS k")
        rows.write.format("delta").saveAsTable(f"{self.schema}.{table}")

    def job(self) -> Job:
        return Job("shop", root=self.root, spark=self.spark, interval="300ms")


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    schema = re.sub(r"\W", "_", tmp_path.name)
    spark.sql(f"CREATE SCHEMA {schema} LOCATION '{tmp_path}/ware house'")
    yield Shop(
        spark, tmp_path, schema, Feed(spark, tmp_path / "in", "id long, k long"), str(tmp_path / "root")
    )
    for query in spark.streams.active:
        query.stop()
    assert list(work.iterdir()) == [], "a name was taken for a path"
    spark.sql(f"DROP SCHEMA {schema} CASCADE")


def failing_at(point: str) -> Callable[[str], None]:
    """Return a failpoint that fails at a point, as a kill there would end the start."""

    def failpoint(at: str) -> None:
        if at == point:
            raise RuntimeError(point)

    return failpoint


def save_as(table: str) -> Callable[[DataFrame, int], None]:
    """Return a batch function that writes a table by its name."""

    def write(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("delta").mode("append").option("txnAppId", spark_abs.current().app_id)
        writer.option("txnVersion", number).saveAsTable(table)

    return write


def begin(shop: Shop, table: str, write: Callable[[DataFrame, int], None] | None = None) -> StreamingQuery:
    """Start the wrapped query `daily`."""
    function = spark_abs.foreach_batch(
        write or save_as(table), root=shop.root, stage="daily", interval="300ms", tables=[table]
    )
    location = spark_abs.checkpoint_location(shop.root, "daily")
    return (
        shop.feed.stream().writeStream.foreachBatch(function).option("checkpointLocation", location).start()
    )


def test_a_restore_undoes_what_a_function_wrote_under_a_name(shop: Shop) -> None:
    """Back, on, and back to what was left: every row is there once each time."""
    table = f"{shop.schema}.daily"
    shop.feed.write({"id": 1})
    query = begin(shop, table)
    wait(lambda: shop.rows("daily") == [1], "the first row", query)
    assert command(shop.root, "one", query).ok
    shop.feed.write({"id": 2})
    wait(lambda: shop.rows("daily") == [1, 2], "the second row", query)
    assert command(shop.root, "two", query).ok
    stop(shop.root, query)
    found = newest(shop.root)
    assert found is not None
    (output,) = [o for s in found.stages for o in s.outputs if o.kind == "table"]
    assert (output.name, output.table) == (f"spark_catalog.{table}", shop.location("daily"))

    spark_abs.open(shop.root).restore("one")
    assert shop.rows("daily") == [1]
    query = begin(shop, table)
    wait(lambda: shop.rows("daily") == [1, 2], "the second row once", query)
    stop(shop.root, query)
    spark_abs.open(shop.root).restore("two")
    assert shop.rows("daily") == [1, 2]
    query = begin(shop, table)
    shop.feed.write({"id": 3})
    wait(lambda: shop.rows("daily") == [1, 2, 3], "every row once", query)
    stop(shop.root, query)


def test_a_watched_table_that_the_function_does_not_make(shop: Shop) -> None:
    """The batch ends with an error that says both readings, before anything of it is recorded."""
    table = f"{shop.schema}.daily"
    shop.feed.write({"id": 1})
    query = begin(shop, table, lambda batch, _: save_as(f"{shop.schema}.other")(batch, 0))
    wait(lambda: not query.isActive, "it ends")
    said = str(query.exception())
    assert f"tables= names '{table}', and after batch 0" in said
    assert f"{shop.base}/ware house/daily, as spark_catalog.{table} of the catalog; ./{table} would" in said
    assert newest(shop.root) is None
    query = begin(shop, table)  # mended, it repeats the batch
    wait(lambda: shop.rows("daily") == [1], "its row", query)
    stop(shop.root, query)


def test_a_function_may_choose_the_place_of_its_table(shop: Shop) -> None:
    """The name decides: a restore to before the query came leaves no row where the table really is."""
    table, place = f"{shop.schema}.daily", str(shop.base / "elsewhere")

    def write(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("delta").mode("append").option("path", place)
        writer.option("txnAppId", spark_abs.current().app_id).option("txnVersion", number).saveAsTable(table)

    shop.feed.write({"id": 1})
    query = begin(shop, table, write)
    wait(lambda: shop.rows("daily") == [1], "its row", query)
    assert command(shop.root, "one", query).ok
    shop.feed.write({"id": 2})
    wait(lambda: shop.rows("daily") == [1, 2], "its row", query)
    stop(shop.root, query)
    found = newest(shop.root)
    assert found is not None
    assert [o.table for s in found.stages for o in s.outputs if o.kind == "table"] == [place]
    spark_abs.open(shop.root).restore("one")
    assert shop.rows("daily") == [1]


def test_a_watched_table_that_was_made_anew(shop: Shop) -> None:
    """Its rows are not those of the query's positions: refused until the query is forgotten."""
    table = f"{shop.schema}.daily"
    shop.feed.write({"id": 1})
    query = begin(shop, table)
    wait(lambda: shop.rows("daily") == [1], "its row", query)
    wait(lambda: newest(shop.root), "a checkpoint", query)
    stop(shop.root, query)
    shop.spark.sql(f"DROP TABLE {table}")
    shop.make("daily")
    shop.feed.write({"id": 2})
    query = begin(shop, table)
    wait(lambda: not query.isActive, "it is refused")
    assert "the table was dropped, renamed or recreated" in str(query.exception())
    assert shop.rows("daily") == [5]
    stop(shop.root, query)
    spark_abs.open(shop.root).forget("daily")
    for more in (2, 3):
        query = begin(shop, table)
        wait(partial(shop.has, "daily", [*range(2, more + 1), 5]), "what is new", query)
        stop(shop.root, query)
        shop.feed.write({"id": more + 1})


def test_a_function_that_replaces_its_table_goes_on_and_back(shop: Shop) -> None:
    """Each batch gives the table another id; its log goes on, and has the rows of each checkpoint."""
    table = f"{shop.schema}.daily"

    def replace(batch: DataFrame, _: int) -> None:
        batch.writeTo(table).using("delta").createOrReplace()

    for number, name in ((1, "one"), (2, "two")):
        shop.feed.write({"id": number})
        query = begin(shop, table, replace)
        wait(partial(shop.has, "daily", [number]), "its rows", query)
        assert command(shop.root, name, query).ok
        stop(shop.root, query)
    spark_abs.open(shop.root).restore("one")
    assert shop.rows("daily") == [1]
    query = begin(shop, table, replace)
    wait(lambda: shop.rows("daily") == [2], "the second batch again", query)
    stop(shop.root, query)


def sinks(shop: Shop, *names: str, **more: Delta) -> Job:
    """Declare a job that writes its input to tables with a name, or as it is said."""
    job = shop.job()
    rows = job.source("rows", shop.feed.stream())
    for name in names:
        job.sink(name, rows, table=f"{shop.schema}.{name}")
    for name, delta in more.items():
        job.sink(name, rows, table=delta)
    return job


def go_on(shop: Shop, *names: str, **more: Delta) -> None:
    sinks(shop, *names, **more).start(available_now=True).await_termination()


@pytest.mark.long
def test_sinks_are_made_in_the_catalog_and_go_back(shop: Shop) -> None:
    """Managed and at a given place, plain and not, shown with each batch and with each checkpoint."""
    name = f"{shop.schema}.{{}}".format
    place = str(shop.base / "given")
    more = {
        "given": Delta(name("given"), location=place),
        "parted": Delta(name("parted"), partition_by="k"),
        "merged": Delta(f"spark_catalog.{name('merged')}", key="id"),
        "shown": Delta(name("shown"), visible="checkpoint"),
    }
    tables = ("sales", *more)
    shop.feed.write({"id": 1})
    run = sinks(shop, "sales", **more).start()
    run.query("rows").processAllAvailable()
    run.stop(savepoint="one")
    shop.feed.write({"id": 2})
    go_on(shop, "sales", **more)
    assert {table: shop.rows(table) for table in tables} == {table: [1, 2] for table in tables}
    kinds = {table: shop.spark.catalog.getTable(name(table)).tableType for table in tables}
    assert kinds == dict.fromkeys(tables, "MANAGED") | {"given": "EXTERNAL"}
    assert shop.location("given") == place
    assert shop.location("sales") == f"{shop.base}/ware house/sales"
    said = {
        row["sink"]: (row["name"], row["table"]) for row in spark_abs.open(shop.root).tables().to_pylist()
    }
    assert said == {t: (f"spark_catalog.{name(t)}", shop.location(t)) for t in tables}

    steps = spark_abs.open(shop.root, shop.spark).restore("one").plan.steps
    back = f"bring sink rows/sales (spark_catalog.{name('sales')}, {shop.location('sales')})"
    assert any(step.sentence().startswith(back) for step in steps)
    assert {table: shop.rows(table) for table in tables} == {table: [1] for table in tables}
    go_on(shop, "sales", **more)
    assert {table: shop.rows(table) for table in tables} == {table: [1, 2] for table in tables}


def test_a_start_that_was_killed_before_the_catalog_knew_the_table(shop: Shop) -> None:
    """The repeat enters the table that is there; so it does where a catalog has lost its entries."""
    shop.feed.write({"id": 1})
    job = sinks(shop, "sales")
    job.failpoint = failing_at("start.sales.table.after")
    with pytest.raises(RuntimeError, match="start"):
        job.start()
    assert shop.rows("sales") == []
    assert DeltaTable(f"{shop.base}/ware house/sales").version() == 0
    go_on(shop, "sales")
    assert shop.rows("sales") == [1]

    place = shop.location("sales")
    shutil.copytree(place, shop.base / "kept")
    shop.spark.sql(f"DROP TABLE {shop.schema}.sales")
    shutil.move(shop.base / "kept", place)
    shop.feed.write({"id": 2})
    go_on(shop, "sales")
    assert shop.rows("sales") == [1, 2]


def test_two_that_make_one_table(shop: Shop) -> None:
    """Both have found none before either makes it."""
    name, storage = f"{shop.schema}.sales", Storage()
    both = [find_target(shop.spark, storage, name) for _ in range(2)]
    assert [target.entered for target in both] == [False, False]
    ids = set()
    for target in both:
        place = storage.place(target.uri)
        ids.add(ensure_sink(place, shop.spark.range(1).schema, Delta(name), shop.spark))
        enter(shop.spark, target)
    assert len(ids) == 1
    late = find_target(shop.spark, storage, f"{shop.schema}.late", str(shop.base / "mine"))
    shop.spark.range(1).write.format("delta").saveAsTable(f"{shop.schema}.late")
    with pytest.raises(UsageError, match="somebody else created it meanwhile"):
        enter(shop.spark, late)


REFUSED = {
    "bare": "write ./bare for a path, or default.bare for a table of the catalog",
    "nosuch.sales": "write ./nosuch.sales for a path",
    "nosuch.{schema}.sales": "write ./nosuch.{schema}.sales for a path",
    "a.b.c.d": "write ./a.b.c.d for a path",
    "spark_catalog.sales": "write ./spark_catalog.sales for a path",
    "{schema}.a view": "write ./{schema}.a view for a path",
    "{schema}.`a b`": "the catalog takes only letters, digits and _",
    "{schema}.seen": "is a view",
    "temporary": "is a temporary view",
    "global_temp.temporary": "is a temporary view",
    "{schema}.files": "is a table of parquet",
}


def test_what_is_no_delta_table_is_refused_with_what_can_be_written(shop: Shop) -> None:
    """Where it is declared, in a job and in a wrapped query alike."""
    spark, schema = shop.spark, shop.schema
    spark.sql(f"CREATE VIEW {schema}.seen AS SELECT 1L AS id")
    spark.range(1).createOrReplaceTempView("temporary")
    spark.range(1).createOrReplaceGlobalTempView("temporary")
    spark.range(1).write.format("parquet").saveAsTable(f"{schema}.files")
    job = shop.job()
    rows = job.source("rows", shop.feed.stream())
    for text, said in REFUSED.items():
        table = text.format(schema=schema)
        for declare in (
            partial(job.sink, "sales", rows, table=table),
            partial(spark_abs.foreach_batch, save_as(table), root=shop.root, stage="daily", tables=[table]),
        ):
            with pytest.raises(UsageError) as refused:
                declare()
            assert said.format(schema=schema) in str(refused.value)
    spark.range(1).write.format("delta").saveAsTable(f"{schema}.there")
    for delta, said in (
        (Delta("./sales", location=str(shop.base / "x")), "is a path, and location="),
        (Delta(f"{schema}.there", location=str(shop.base / "x")), "leave location= out"),
    ):
        with pytest.raises(UsageError, match=said):
            job.sink("sales", rows, table=delta)
    assert job.sinks == []


def test_a_text_that_is_a_name_and_the_path_of_a_table(shop: Shop) -> None:
    """It is refused: an earlier version wrote there. In backticks it is a name, with a slash a path."""
    name = f"{shop.schema}.sales"
    place = shop.base / "work" / name
    shop.spark.range(1).write.format("delta").save(str(place))
    job = shop.job()
    rows = job.source("rows", shop.feed.stream())
    with pytest.raises(UsageError, match=re.escape(f"write ./{name} for a path, or `{shop.schema}`.`sales`")):
        job.sink("sales", rows, table=name)
    job.sink("path", rows, table=f"./{name}")
    job.sink("name", rows, table=f"`{shop.schema}`.`sales`")
    job.sink("delta", rows, table=f"delta.`{shop.base}/other`")
    found = {sink.name: sink.table for sink in job.sinks}
    assert found == {
        "path": str(place),
        "name": f"{shop.base}/ware house/sales",
        "delta": f"{shop.base}/other",
    }
    shutil.rmtree(place)


def test_a_job_that_reads_its_own_table_by_name(shop: Shop) -> None:
    """By name or by path, as a stream or as a lookup: it is one table."""
    name = f"{shop.schema}.sales"
    shop.spark.range(1).write.format("delta").saveAsTable(name)
    read = {
        "by its name": shop.spark.readStream.table(name),
        "by its path": shop.spark.readStream.format("delta").load(shop.location("sales")),
    }
    own = "the table of sink 'sales' of this job"
    for how, frame in read.items():
        for table in (name, shop.location("sales"), f"delta.`{shop.location('sales')}`"):
            job = shop.job()
            job.sink("sales", job.source("rows", frame), table=table)
            with pytest.raises(GraphError, match=own):
                job.start()
            assert not Path(shop.root).exists(), how
    job = shop.job()
    rows = job.source("rows", shop.feed.stream())
    looked = job.stage("looked", [rows, shop.spark.table(name)], lambda r, t: r.join(t, "id"))
    job.sink("sales", looked, table=shop.location("sales"))
    with pytest.raises(GraphError, match=own):
        job.start()
    job = shop.job()
    rows = job.source("rows", shop.feed.stream())
    job.sink("one", rows, table=name)
    job.sink("two", rows, table=f"spark_catalog.{name}")
    with pytest.raises(GraphError, match="write the same table"):
        job.start()


def test_a_name_that_leads_to_another_table_than_before(shop: Shop) -> None:
    """Renamed, or dropped and made anew: refused by `check` and the start alike, and nothing is written."""
    shop.feed.write({"id": 1})
    go_on(shop, "sales")
    shop.feed.write({"id": 2})
    shop.spark.sql(f"ALTER TABLE {shop.schema}.sales RENAME TO {shop.schema}.old")
    for _ in ("renamed", "made anew"):
        job = sinks(shop, "sales")
        with pytest.raises(Refused, match="the table was dropped, renamed or recreated"):
            job.start()
        assert any("it then begins as a new sink" in obstacle for obstacle in job.check().obstacles)
        if shop.rows("sales") == []:
            shop.make("sales")
    assert (shop.rows("sales"), shop.rows("old")) == ([5], [1])
    job = shop.job()
    rows = job.source("rows", shop.feed.stream())
    job.sink("again", rows, table=f"{shop.schema}.sales", existing="append")
    job.start(available_now=True).await_termination()
    assert (shop.rows("sales"), shop.rows("old")) == ([2, 5], [1])


def lines_of_the_guide() -> list[tuple[str, str]]:
    """Return what is written in each line of the guide's table, and what becomes of it without a table."""
    section = (GUIDE / "table-names.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in section.split("\n## ")[0].splitlines() if "|" in line]
    code = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
    found = [(code.search(row[0]), row[-1]) for row in rows[2:]]
    return [(match[2], then) for match, then in found if match is not None]


def test_every_line_of_the_guide_is_true(shop: Shop, tmp_path: Path) -> None:
    """What is made, where, and how the catalog knows it; what is refused, and nothing is made."""
    spark, schema, base = shop.spark, shop.schema, str(tmp_path / "lake")
    spark.sql(f"CREATE VIEW {schema}.seen AS SELECT 1L AS id")
    spark.range(1).write.format("parquet").saveAsTable(f"{schema}.files")
    beside = tmp_path / "work" / f"{schema}.both"
    spark.range(1).write.format("delta").save(str(beside))
    lines, frame = lines_of_the_guide(), spark.range(1)
    assert len(lines) == 13
    for number, (written, then) in enumerate(lines):
        text = written.replace("shop", schema).replace("/data/", f"{base}/{number}/")
        text = re.sub(r"\bsales\b", f"sales{number}", text)
        delta = eval(text, {"Delta": Delta}) if text.startswith("Delta(") else Delta(text)
        find = partial(find_target, spark, Storage(), delta.path, delta.location)
        if then.startswith("refused"):
            with pytest.raises(UsageError):
                find()
            continue
        target = find()
        ensure_sink(Storage().place(target.uri), frame.schema, delta, spark)
        enter(spark, target)
        table = f"{schema}.sales{number}"
        kind = spark.catalog.getTable(table).tableType if spark.catalog.tableExists(table) else "no entry"
        wanted = "no entry" if "catalog" not in then else "EXTERNAL" if "external" in then else "MANAGED"
        assert kind == wanted, written
        if "there" in then:
            assert DeltaTable(target.uri).version() == 0
            assert target.uri == str((tmp_path / "work" / text).resolve()) or base in target.uri
        else:
            assert target.uri == f"{tmp_path}/ware house/sales{number}"
    shutil.rmtree(beside)
    shutil.rmtree(tmp_path / "work" / "sales1")
