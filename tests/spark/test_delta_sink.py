"""Delta sinks: every batch once, versions that can be named, and back to any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from spark_abs.errors import DamageError, Fenced, Refused, TableChanged, UsageError
from spark_abs.model import AttemptId, BatchId, RunId, SinkWriter, StageId, Version
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.create import ensure_sink
from spark_abs.sinks.delta.native_writable import why_not_native
from spark_abs.sinks.delta.options import Delta
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from tests.channel_support import JOB, NUMBERS

Open = Callable[..., DeltaSink]
KINDS = ["plain", "with an identity column and a constraint"]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


OWN = Own(JOB, "root-1", frozenset())


def writer(attempt: int, root: str = "root-1", sink: str = "out", stage: str = "s") -> SinkWriter:
    return SinkWriter(JOB, root, StageId(stage), sink, AttemptId(attempt))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "elsewhere" / "table")


@pytest.fixture
def sink(spark: SparkSession, root: Root, uri: str) -> Open:
    """Open the sink under an attempt and run, as a start of the job does."""

    def make(attempt: int = 1, run: int = 1, begin: bool = True) -> DeltaSink:
        found = DeltaSink(root, uri, writer=writer(attempt), run=RunId(run), session=lambda: spark)
        if begin:
            found.begin()
        return found

    return make


def create(spark: SparkSession, uri: str, kind: str) -> None:
    """Create the table as its owner would."""
    if kind == "plain":
        ensure_sink(Place(uri), NUMBERS, Delta(uri), spark)
        return
    spark.sql(
        f"""create table delta.`{uri}` (id bigint generated always as identity, n bigint not null)
            using delta"""
    )
    spark.sql(f"alter table delta.`{uri}` add constraint small check (n < 1000)")


def rows(uri: str, version: int | None = None) -> list[int]:
    return sorted(DeltaTable(uri, version=version).to_pyarrow_table()["n"].to_pylist())


def put(spark: SparkSession, table: DeltaSink, number: int, *values: int) -> bool | None:
    """Write and commit a batch; say whether its commit is new, None if there is none."""
    frame = spark.createDataFrame([(value,) for value in values], NUMBERS)
    standing = table.commit_batch(table.write_files(frame, BatchId(number)), BatchId(number))
    return None if standing is None else standing.fresh


def version(table: DeltaSink, batch: int) -> int:
    return int(table.version_at(BatchId(batch)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_life_of_a_sink(spark: SparkSession, root: Root, uri: str, sink: Open, kind: str) -> None:
    """Batches, a repeat, a crash and new run, a fence, a restore that is repeated, and on from there."""
    create(spark, uri, kind)
    assert (why_not_native(DeltaTable(uri)) is None) == (kind == "plain")
    first = sink()
    attached = version(first, 0)
    assert put(spark, first, 0, 1, 2) is True
    assert put(spark, first, 0, 1, 2) is False  # the batch runs again after a crash
    assert put(spark, first, 1) is None  # no rows, no commit
    assert put(spark, first, 2, 3) is True
    cut = version(first, 1)
    assert (rows(uri, attached), rows(uri, cut)) == ([], [1, 2])
    assert first.log.last_batch() == 2

    second = sink(run=2)  # the first run is replaced in the middle of a batch
    with pytest.raises(Fenced):
        put(spark, first, 3, 666)
    assert put(spark, second, 3, 4) is True
    assert version(second, 1) == cut
    assert rows(uri, version(second, 99)) == [1, 2, 3, 4]

    restored = sink(attempt=2, run=2, begin=False)
    restored.fence([writer(1).app])
    restored.fence([writer(1).app])
    with pytest.raises(Fenced):
        put(spark, second, 4, 666)
    done = restored.restore_to(Version(cut), OWN)
    assert restored.restore_to(Version(cut), OWN) == done  # killed after the commit, begun again
    assert rows(uri) == [1, 2]

    third = sink(attempt=2, run=3)
    assert rows(uri, version(third, 1)) == [1, 2]
    assert put(spark, third, 2, 30) is True  # the same batch id, another attempt
    assert rows(uri) == [1, 2, 30]
    assert rows(uri, version(third, 2)) == [1, 2, 30]


def test_the_data_of_others_is_not_rolled_back_unasked(spark: SparkSession, uri: str, sink: Open) -> None:
    """OPTIMIZE is not data; an INSERT is, and is named in the refusal."""
    create(spark, uri, "plain")
    table = sink()
    put(spark, table, 0, 1)
    cut = version(table, 0)
    put(spark, table, 1, 2)
    DeltaTable(uri).optimize.compact()
    assert sink(attempt=2, run=2, begin=False).restore_to(Version(cut), OWN) > cut
    assert rows(uri) == [1]
    put(spark, sink(attempt=2, run=3), 1, 20)
    write_deltalake(uri, pa.table({"n": [999]}), mode="append")
    third = sink(attempt=3, run=4, begin=False)
    foreign = DeltaTable(uri).version()
    with pytest.raises(Refused, match=rf"version {foreign}: WRITE"):
        third.restore_to(Version(cut), OWN)
    assert rows(uri) == [1, 20, 999]
    third.restore_to(Version(cut), OWN, undo_others=True)
    assert rows(uri) == [1]


def test_a_restore_to_where_the_table_stands_is_recorded(spark: SparkSession, uri: str, sink: Open) -> None:
    """No row has changed since; the attempt still gets a version to begin from."""
    create(spark, uri, "plain")
    table = sink()
    put(spark, table, 0, 1)
    second = sink(attempt=2, run=2, begin=False)
    begun = second.restore_to(table.version_at(BatchId(0)), OWN)
    assert version(second, 0) == begun
    assert rows(uri) == [1]


def test_a_version_whose_files_are_gone_is_damage(spark: SparkSession, uri: str, sink: Open) -> None:
    create(spark, uri, "plain")
    table = sink()
    put(spark, table, 0, 1)
    cut = version(table, 0)
    put(spark, table, 1, 2)
    DeltaTable(uri).optimize.compact()
    DeltaTable(uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    before = DeltaTable(uri).version()
    with pytest.raises(DamageError, match=f"cannot be restored to version {cut}"):
        sink(attempt=2, run=2, begin=False).restore_to(Version(cut), OWN)
    assert DeltaTable(uri).version() == before


def test_a_batch_that_stands_is_returned(spark: SparkSession, uri: str, sink: Open) -> None:
    create(spark, uri, "plain")
    table = sink()
    written = table.write_files(spark.createDataFrame([(1,)], NUMBERS), BatchId(0))
    table.commit_batch(written, BatchId(0))
    again = sink().commit_batch(None, BatchId(0))
    assert again is not None
    assert (again.fresh, again.entry.batch) == (False, 0)


def test_two_roots_write_one_table_and_each_undoes_its_own(
    spark: SparkSession, root: Root, uri: str, sink: Open
) -> None:
    """The same job, stage and sink on two roots; the first goes back, then to what it had left behind."""
    create(spark, uri, "plain")

    def other(attempt: int, run: int) -> DeltaSink:
        return DeltaSink(root, uri, writer=writer(attempt, "root-2"), run=RunId(run), session=lambda: spark)

    first, second = sink(), other(1, 1)
    second.begin()
    put(spark, first, 0, 1)
    cut = version(first, 0)
    put(spark, second, 0, 100)
    put(spark, first, 1, 2)
    later = version(first, 1)
    put(spark, second, 1, 101)
    assert rows(uri) == [1, 2, 100, 101]
    restored = sink(attempt=2, run=2, begin=False)
    assert restored.restore_to(Version(cut), OWN) == restored.restore_to(Version(cut), OWN)
    assert rows(uri) == [1, 100, 101]
    put(spark, sink(attempt=2, run=3), 1, 20)
    sink(attempt=3, run=4, begin=False).restore_to(Version(later), OWN)
    assert rows(uri) == [1, 2, 100, 101]
    put(spark, second, 2, 102)
    DeltaTable(uri).optimize.compact()
    with pytest.raises(Refused, match="cannot be told apart"):
        sink(attempt=4, run=5, begin=False).restore_to(Version(cut), OWN)
    assert rows(uri) == [1, 2, 100, 101, 102]


def test_a_root_that_takes_a_table_over_fences_the_others_for_good(
    spark: SparkSession, root: Root, uri: str, sink: Open
) -> None:
    create(spark, uri, "plain")
    lost = sink()
    put(spark, lost, 0, 1)
    new = DeltaSink(root, uri, writer=writer(1, "root-2"), run=RunId(1), session=lambda: spark)
    new.begin(take_over=True)
    assert put(spark, new, 0, 2) is True
    with pytest.raises(Fenced):
        put(spark, lost, 1, 666)
    with pytest.raises(Fenced):
        sink(attempt=2, run=9)
    again = DeltaSink(root, uri, writer=writer(1, "root-2"), run=RunId(2), session=lambda: spark)
    again.begin(take_over=True)
    assert put(spark, again, 1, 3) is True
    assert rows(uri) == [1, 2, 3]


def test_a_sink_under_another_name_goes_on_where_it_was(
    spark: SparkSession, root: Root, uri: str, sink: Open
) -> None:
    """Renamed between the commit of a batch and Spark's own: the batch comes again, its rows do not."""
    create(spark, uri, "plain")
    put(spark, sink(), 0, 1)
    renamed = DeltaSink(root, uri, writer=writer(1, sink="renamed"), run=RunId(2), session=lambda: spark)
    renamed.begin()
    assert put(spark, renamed, 0, 1) is False
    assert put(spark, renamed, 1, 2) is True
    assert rows(uri) == [1, 2]
    assert rows(uri, version(renamed, 0)) == [1]


def test_a_table_that_ceases_to_be_plain_under_way(spark: SparkSession, uri: str, sink: Open) -> None:
    """Its owner turns a feature on between the writing of the files and their commit."""
    create(spark, uri, "plain")
    table = sink()
    written = table.write_files(spark.createDataFrame([(1,)], NUMBERS), BatchId(0))
    spark.sql(f"alter table delta.`{uri}` set tblproperties ('delta.enableChangeDataFeed' = 'true')")
    standing = table.commit_batch(written, BatchId(0))
    assert standing is not None
    assert standing.fresh
    assert put(spark, table, 1, 2) is True
    assert rows(uri) == [1, 2]


def test_a_table_that_renames_its_columns(spark: SparkSession, uri: str, sink: Open) -> None:
    """With column mapping the files have other column names than the table: only Delta can write them."""
    mapping = "tblproperties ('delta.columnMapping.mode' = 'name')"
    spark.sql(f"create table delta.`{uri}` (n bigint) using delta {mapping}")
    table = sink()
    assert put(spark, table, 0, 1) is True
    assert put(spark, table, 0, 1) is False
    assert [row.n for row in spark.read.format("delta").load(uri).collect()] == [1]


def test_a_frame_that_does_not_fit_is_refused_by_column(spark: SparkSession, uri: str) -> None:
    create(spark, uri, "plain")
    wrong = t.StructType([t.StructField("n", t.IntegerType()), t.StructField("m", t.LongType())])
    with pytest.raises(UsageError, match=r"m: missing in the table, bigint in the query\n  n: bigint in"):
        ensure_sink(Place(uri), wrong, Delta(uri), spark)


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("(n bigint) using delta", None),
        ("(n bigint, at timestamp_ntz) using delta", None),
        ("(n bigint, m bigint) using delta partitioned by (n)", "partition columns"),
        ("(n bigint not null) using delta", "column n is NOT NULL"),
        ("(n bigint, m bigint generated always as (n + 1)) using delta", "generatedColumns"),
        ("(n bigint) using delta tblproperties ('delta.enableRowTracking' = 'true')", "rowTracking"),
        ("(n bigint) using delta tblproperties ('delta.enableDeletionVectors' = 'true')", "deletionVectors"),
        ("(n bigint) using delta cluster by (n)", "clustering"),
        ("(n bigint, c char(3)) using delta", "column c has __CHAR_VARCHAR_TYPE_STRING"),
        ("(n bigint, s struct<a:array<varchar(3)>>) using delta", "column s has __CHAR_VARCHAR_TYPE_STRING"),
        ("(n bigint, s struct<a:int, b:int not null>) using delta", "column s.b is NOT NULL"),
        (
            "(n bigint, m int default 7) using delta tblproperties "
            "('delta.feature.allowColumnDefaults' = 'supported')",
            "allowColumnDefaults",
        ),
        ("(n bigint) using delta tblproperties ('delta.dataSkippingStatsColumns' = 'n')", "StatsColumns=n"),
        ("(n bigint) using delta tblproperties ('delta.autoOptimize.optimizeWrite' = 'true')", "Write=true"),
        (
            "(n bigint comment 'x') using delta tblproperties ('delta.logRetentionDuration' = '9 days', "
            "'delta.appendOnly' = 'true', 'delta.enableChangeDataFeed' = 'false', 'team.owner' = 'us')",
            None,
        ),
    ],
)
def test_which_tables_are_plain(spark: SparkSession, uri: str, ddl: str, reason: str | None) -> None:
    spark.sql(f"create table delta.`{uri}` {ddl}")
    found = why_not_native(DeltaTable(uri))
    assert found is None if reason is None else found is not None and reason in found


DDL = "(c char(3), v varchar(4), s struct<a: varchar(2)>, many array<char(2)>) using delta"


def test_a_table_with_lengths_of_strings_refuses_and_pads_as_plain_spark_does(
    spark: SparkSession, uri: str, sink: Open
) -> None:
    """Too long a value ends the batch, before anything of it is there; the others are as Spark's own."""
    twin = f"{uri}-twin"
    for place in (uri, twin):
        spark.sql(f"create table delta.`{place}` {DDL}")
    long = "struct<c: string, v: string, s: struct<a: string>, many: array<string>>"
    first: list[Any] = [("a", "b ", ("x",), ["p"]), (None, "", None, None)]
    second: list[Any] = [("abc", "1234", ("xy",), ["pq"])]

    def frame(rows: list[Any]) -> DataFrame:
        return spark.createDataFrame(rows, long)

    def read(place: str) -> list[str]:
        found = spark.read.format("delta").load(place).selectExpr("*", "length(c)", "length(v)")
        return sorted(str(row) for row in found.collect())

    table = sink()
    for number, batch in enumerate((first, second)):
        frame(batch).write.format("delta").mode("append").save(twin)
        files = table.write_files(frame(batch), BatchId(number))
        table.commit_batch(files, BatchId(number))
        table.commit_batch(files, BatchId(number))  # killed after the commit, and repeated
    assert read(uri) == read(twin)
    cut = table.version_at(BatchId(0))
    for number, wrong in enumerate((("abcd", "x"), ("x", "12345"))):
        files = table.write_files(frame([(*wrong, None, None)]), BatchId(2 + number))
        with pytest.raises(Exception, match=r"char/varchar type length|CHAR_VARCHAR"):
            table.commit_batch(files, BatchId(2 + number))
        nested = frame([("x", "x", ("xyz",), None)] if number else [("x", "x", None, ["xyz"])])
        with pytest.raises(Exception, match=r"char/varchar type length|CHAR_VARCHAR"):
            table.commit_batch(table.write_files(nested, BatchId(2 + number)), BatchId(2 + number))
    assert read(uri) == read(twin)
    back = sink(attempt=2, run=2, begin=False)
    back.restore_to(cut, OWN)
    again = sink(attempt=2, run=3)
    assert len(read(uri)) == len(first)
    again.commit_batch(again.write_files(frame(second), BatchId(1)), BatchId(1))
    assert read(uri) == read(twin)


def test_a_table_that_forgets_transactions_is_no_sink(spark: SparkSession, uri: str, sink: Open) -> None:
    """Delta drops the ids by which a repeated batch is known: the same rows would come twice."""
    create(spark, uri, "plain")
    put(spark, sink(), 0, 1)
    forget = "tblproperties ('delta.setTransactionRetentionDuration' = 'interval 1 second')"
    spark.sql(f"alter table delta.`{uri}` set {forget}")
    with pytest.raises(TableChanged, match="setTransactionRetentionDuration=interval 1 second lets the log"):
        sink(run=2)
    with pytest.raises(UsageError, match="setTransactionRetentionDuration=interval 1 second lets the log"):
        ensure_sink(Place(uri), NUMBERS, Delta(uri), spark)
    assert rows(uri) == [1]


def test_others_write_beside_the_sink(spark: SparkSession, uri: str, sink: Open) -> None:
    """A person's INSERT between two batches neither stops a batch nor makes one appear twice."""
    create(spark, uri, "plain")
    table = sink()
    put(spark, table, 0, 1)
    frame: DataFrame = spark.createDataFrame([(2,)], NUMBERS)
    written = table.write_files(frame, BatchId(1))
    write_deltalake(uri, pa.table({"n": [100]}), mode="append")
    standing = table.commit_batch(written, BatchId(1))
    assert standing is not None
    assert standing.fresh
    assert rows(uri) == [1, 2, 100]
    assert rows(uri, version(table, 0)) == [1]
