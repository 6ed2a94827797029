"""Delta tables that are merged, overwritten, laid out, or get columns; every batch once, and back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t

import spark_abs
from spark_abs.errors import Fenced, Refused, UsageError
from spark_abs.model import AttemptId, BatchId, RunId, SinkWriter, StageId, Version
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.create import check_sink, ensure_sink
from spark_abs.sinks.delta.options import Delta
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from tests.job_support import Feed

NARROW = t.StructType([t.StructField("key", t.StringType()), t.StructField("part", t.IntegerType())])
SCHEMA = t.StructType([*NARROW.fields, t.StructField("n", t.LongType())])
LAYOUTS = [
    {},
    *(
        pytest.param(layout, marks=pytest.mark.long)
        for layout in ({"partition_by": "part"}, {"cluster_by": "key"})
    ),
]
"""A job with tables of all of them is in CI, too."""
JOB = "job"
Rows = list[tuple[str | None, int, int]]
Make = Callable[..., DeltaSink]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path, uri: str) -> Make:
    """Open the table as a sink of a root, attempt and run."""

    def opened(
        delta: Delta, attempt: int = 1, run: int = 1, root: str = "a", overwrites: bool = False
    ) -> DeltaSink:
        ensure_sink(Place(uri), SCHEMA, delta, spark)
        writer = SinkWriter(JOB, root, StageId("s"), "out", AttemptId(attempt))
        place = Root(str(tmp_path / root))
        return DeltaSink(
            place,
            uri,
            writer=writer,
            run=RunId(run),
            session=lambda: spark,
            key=tuple(delta.key),
            overwrites=overwrites,
        )

    return opened


def put(spark: SparkSession, sink: DeltaSink, number: int, rows: Rows) -> bool | None:
    """Write and commit a batch; say whether its commit is new, None if there is none."""
    batch = BatchId(number)
    standing = sink.commit_batch(sink.write_files(spark.createDataFrame(rows, SCHEMA), batch), batch)
    return None if standing is None else standing.fresh


def rows(uri: str, version: int | None = None) -> Rows:
    table = DeltaTable(uri, version=version).to_pyarrow_table().to_pylist()
    found = [(row["key"], row["part"], row["n"]) for row in table]
    return sorted(found, key=lambda row: (row[0] or "", *row[1:]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batches_are_merged_by_key_once(
    spark: SparkSession, uri: str, make: Make, layout: dict[str, str]
) -> None:
    """Rows take the place of those of their key, a repeat changes nothing, a restore brings back what was."""
    delta = Delta(uri, key="key", **layout)  # type: ignore[arg-type]
    sink = make(delta)
    sink.begin()
    assert put(spark, sink, 0, [("a", 1, 1), (None, 1, 2)]) is True
    assert put(spark, sink, 1, [("a", 2, 10), ("b", 1, 3)]) is True
    assert put(spark, sink, 1, [("a", 2, 10), ("b", 1, 3)]) is False  # killed after the commit, and repeated
    assert put(spark, sink, 2, []) is None
    cut = sink.version_at(BatchId(2))
    assert put(spark, sink, 3, [(None, 1, 20), ("b", 1, 30)]) is True
    assert rows(uri) == [(None, 1, 20), ("a", 2, 10), ("b", 1, 30)]

    back = make(delta, attempt=2, run=2)
    back.fence([SinkWriter(JOB, "a", StageId("s"), "out", AttemptId(1)).app])
    done = back.restore_to(cut, Own(JOB, "a", frozenset()))
    assert back.restore_to(cut, Own(JOB, "a", frozenset())) == done
    assert rows(uri) == [(None, 1, 2), ("a", 2, 10), ("b", 1, 3)]
    back.begin()
    assert put(spark, back, 3, [("b", 1, 31)]) is True
    assert rows(uri) == [(None, 1, 2), ("a", 2, 10), ("b", 1, 31)]


def test_of_several_rows_of_a_key_the_last_to_arrive_counts(
    spark: SparkSession, uri: str, make: Make
) -> None:
    sink = make(Delta(uri, key=["key", "part"]))
    sink.begin()
    put(spark, sink, 0, [("a", 1, 9), ("a", 1, 2), ("a", 2, 3), ("b", 1, 4), ("a", 1, 5)])
    put(spark, sink, 1, [("b", 1, 7), ("b", 1, 6)])
    assert rows(uri) == [("a", 1, 5), ("a", 2, 3), ("b", 1, 6)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batches_take_the_place_of_all_rows(
    spark: SparkSession, uri: str, make: Make, layout: dict[str, str]
) -> None:
    """Also one without rows; every cut is a version."""
    sink = make(Delta(uri, **layout), overwrites=True)  # type: ignore[arg-type]
    sink.begin()
    assert put(spark, sink, 0, [("a", 1, 1), ("b", 1, 2)]) is True
    assert put(spark, sink, 1, [("a", 1, 3)]) is True
    assert put(spark, sink, 1, [("a", 1, 3)]) is False
    assert put(spark, sink, 2, []) is True
    assert put(spark, sink, 2, []) is False
    assert [rows(uri, sink.version_at(BatchId(batch))) for batch in (0, 1, 2)] == [
        [("a", 1, 1), ("b", 1, 2)],
        [("a", 1, 3)],
        [],
    ]
    back = make(Delta(uri, **layout), attempt=2, run=2, overwrites=True)  # type: ignore[arg-type]
    back.restore_to(sink.version_at(BatchId(1)), Own(JOB, "a", frozenset()))
    assert rows(uri) == [("a", 1, 3)]


def test_a_table_is_made_as_the_sink_says(spark: SparkSession, uri: str) -> None:
    ensure_sink(Place(uri), SCHEMA, Delta(uri, partition_by=["part"]), spark)
    assert DeltaTable(uri).metadata().partition_columns == ["part"]
    ensure_sink(Place(uri), SCHEMA, Delta(uri), spark)  # another start that does not say it
    with pytest.raises(UsageError, match="is partitioned by part, and the sink says by key"):
        check_sink(Place(uri), SCHEMA, Delta(uri, partition_by="key"), spark)
    with pytest.raises(UsageError, match="is clustered by nothing, and the sink says by key"):
        check_sink(Place(uri), SCHEMA, Delta(uri, cluster_by="key"), spark)
    with pytest.raises(UsageError, match="key names nothing, which the output does not have"):
        check_sink(Place(uri), SCHEMA, Delta(uri, key="nothing"), spark)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_columns_are_added_only_where_that_is_said(
    spark: SparkSession, uri: str, make: Make, layout: dict[str, str]
) -> None:
    """The rows that are there have nulls; a restore after the change has the older columns or nulls."""
    ensure_sink(Place(uri), NARROW, Delta(uri, **layout), spark)  # type: ignore[arg-type]
    spark.createDataFrame([("a", 1)], NARROW).write.format("delta").mode("append").save(uri)
    version = DeltaTable(uri).version()
    with pytest.raises(UsageError, match="n: missing in the table, bigint in the query"):
        check_sink(Place(uri), SCHEMA, Delta(uri), spark)
    delta = Delta(uri, evolve=True, **layout)  # type: ignore[arg-type]
    check_sink(Place(uri), SCHEMA, delta, spark)
    assert DeltaTable(uri).version() == version  # a check writes nothing
    sink = make(delta)
    sink.begin()
    put(spark, sink, 0, [("b", 1, 2)])
    assert DeltaTable(uri).to_pyarrow_table().sort_by("key").to_pylist() == [
        {"key": "a", "part": 1, "n": None},
        {"key": "b", "part": 1, "n": 2},
    ]
    back = make(delta, attempt=2, run=2)
    back.restore_to(Version(version), Own(JOB, "a", frozenset()))
    assert DeltaTable(uri).to_pyarrow_table().select(["key", "part"]).to_pylist() == [{"key": "a", "part": 1}]


def test_names_with_blanks_are_added_as_they_are_made(spark: SparkSession, uri: str, make: Make) -> None:
    """Delta's own writer takes none, of a table whose columns are not mapped."""
    made = t.StructType([t.StructField("first name", t.StringType())])
    wider = t.StructType([*made.fields, t.StructField("last, name", t.LongType())])
    delta = Delta(uri, evolve=True)
    ensure_sink(Place(uri), made, delta, spark)
    assert ensure_sink(Place(uri), wider, delta, spark) == ensure_sink(Place(uri), wider, delta, spark)
    sink = make(delta)
    sink.begin()
    files = sink.write_files(spark.createDataFrame([("a", 1)], wider), BatchId(0))
    sink.commit_batch(files, BatchId(0))
    found = DeltaTable(uri).to_pyarrow_table().select(wider.names)
    assert found.to_pylist() == [{"first name": "a", "last, name": 1}]


def test_two_starts_that_add_columns_end_with_all_of_them(spark: SparkSession, uri: str) -> None:
    """Each comes again where the other was first; of two types for one column the second is refused."""
    ensure_sink(Place(uri), NARROW, Delta(uri), spark)
    wider = [t.StructType([*NARROW.fields, t.StructField(name, t.LongType())]) for name in ("n", "m", "k")]
    with ThreadPoolExecutor(len(wider)) as pool:
        starts = [pool.submit(ensure_sink, Place(uri), one, Delta(uri, evolve=True), spark) for one in wider]
        assert {start.result() for start in starts} == {str(DeltaTable(uri).metadata().id)}
    assert {field.name for field in DeltaTable(uri).schema().fields} == {"key", "part", "n", "m", "k"}
    other = t.StructType([*NARROW.fields, t.StructField("n", t.StringType())])
    with pytest.raises(UsageError, match="n: bigint in the table, string in the query"):
        ensure_sink(Place(uri), other, Delta(uri, evolve=True), spark)


def test_keys_of_all_types_find_their_rows(spark: SparkSession, uri: str, tmp_path: Path) -> None:
    """NaN is NaN, -0.0 is 0.0, null is null, and a struct is what is in it; a map is no key."""
    kinds = {
        "number": "if(id = 0, double('NaN'), if(id = 1, IF(again, -0.0D, 0.0D), double(id)))",
        "price": "cast(id / 4 AS decimal(20,4))",
        "at": "timestamp_micros(id * 86400000001)",
        "parts": "named_struct('a', id, 'b', IF(id = 2, null, 'x'))",
        "none": "cast(null AS string)",
        "day": "date_add(date'2024-02-28', cast(id AS int))",
    }

    def frame(again: bool) -> DataFrame:
        made = spark.range(3).withColumn("again", F.lit(again))
        return made.selectExpr(*(f"{sql} AS {name}" for name, sql in kinds.items()), "again", "id AS n")

    place, delta = Place(uri), Delta(uri, key=list(kinds))
    ensure_sink(place, frame(again=False).schema, delta, spark)
    writer = SinkWriter(JOB, "a", StageId("s"), "out", AttemptId(1))
    sink = DeltaSink(
        Root(str(tmp_path / "a")), uri, writer=writer, run=RunId(1), session=lambda: spark, key=tuple(kinds)
    )
    sink.begin()
    for number, again in enumerate((False, True)):
        sink.commit_batch(sink.write_files(frame(again), BatchId(number)), BatchId(number))
    found = DeltaTable(uri).to_pyarrow_table().to_pylist()
    assert sorted((row["n"], row["again"]) for row in found) == [(0, True), (1, True), (2, True)]
    with pytest.raises(UsageError, match="key names m, and maps cannot be compared"):
        check_sink(place, spark.range(1).selectExpr("map(id, id) AS m").schema, Delta(uri, key="m"), spark)


def test_rows_are_merged_into_tables_with_features_of_their_own(
    spark: SparkSession, uri: str, make: Make
) -> None:
    """Generated columns and the change feed follow; of rows that others put in twice both change."""
    spark.sql(
        f"""CREATE TABLE delta.`{uri}` (key string, part int, n bigint,
            double_n bigint GENERATED ALWAYS AS (n * 2)) USING delta
            TBLPROPERTIES (delta.enableChangeDataFeed = true, delta.enableDeletionVectors = true)"""
    )
    theirs = spark.createDataFrame([("x", 1, 7), ("x", 1, 8)], SCHEMA)
    theirs.write.format("delta").mode("append").save(uri)
    sink = make(Delta(uri, key="key"))
    sink.begin()
    put(spark, sink, 0, [("a", 1, 1), ("b", 1, 2)])
    put(spark, sink, 1, [("a", 2, 10), ("x", 2, 9)])
    found = sorted((row.key, row.n, row.double_n) for row in spark.read.format("delta").load(uri).collect())
    assert found == [("a", 10, 20), ("b", 2, 4), ("x", 9, 18), ("x", 9, 18)]
    cut = sink.version_at(BatchId(0))
    make(Delta(uri, key="key"), attempt=2, run=2).restore_to(cut, Own(JOB, "a", frozenset()))
    back = sorted((row.key, row.n, row.double_n) for row in spark.read.format("delta").load(uri).collect())
    assert back == [("a", 1, 2), ("b", 2, 4), ("x", 7, 14), ("x", 8, 16)]


def test_a_restore_of_a_run_that_was_replaced_undoes_nothing(
    spark: SparkSession, uri: str, make: Make
) -> None:
    """It stood still before Delta's RESTORE, while another one ended and the job began."""
    delta = Delta(uri, partition_by="part")
    sink = make(delta)
    sink.begin()
    put(spark, sink, 0, [("a", 1, 1)])
    cut = sink.version_at(BatchId(0))
    put(spark, sink, 1, [("b", 1, 2)])
    late = make(delta, attempt=2, run=2)
    newer = make(delta, attempt=3, run=4)
    newer.begin()
    put(spark, newer, 0, [("c", 1, 3)])
    with pytest.raises(Fenced):
        late.restore_to(cut, Own(JOB, "a", frozenset()))
    assert rows(uri) == [("a", 1, 1), ("b", 1, 2), ("c", 1, 3)]


def test_a_restore_is_refused_where_one_root_has_rewritten_rows_of_another(
    spark: SparkSession, uri: str, make: Make
) -> None:
    """Of rows that each keeps in files of its own it takes back only its own."""
    first, second = make(Delta(uri, key="key")), make(Delta(uri, key="key"), root="b")
    first.begin()
    second.begin()
    cut = first.version_at(BatchId(0))
    put(spark, first, 0, [("a", 1, 1)])
    put(spark, second, 0, [("b", 1, 2)])
    own = Own(JOB, "a", frozenset())
    make(Delta(uri, key="key"), attempt=2, run=2).restore_to(cut, own)
    assert rows(uri) == [("b", 1, 2)]

    third = make(Delta(uri, key="key"), attempt=2, run=3)
    third.begin()
    cut = third.version_at(BatchId(0))
    put(spark, third, 1, [("b", 1, 3)])  # a row that the other root has written
    put(spark, second, 1, [("b", 1, 4)])
    with pytest.raises(Refused, match="one has rewritten rows of the other"):
        make(Delta(uri, key="key"), attempt=3, run=4).restore_to(cut, own)
    assert rows(uri) == [("b", 1, 4)]


def test_a_job_goes_back_with_tables_of_all_kinds(spark: SparkSession, tmp_path: Path) -> None:
    """Appended, merged and overwritten tables are at one cut, go back to it, and come out as before."""
    feed, root = Feed(spark, tmp_path / "in", "id long"), str(tmp_path / "root")
    tables = {name: str(tmp_path / name) for name in ("rows", "merged", "all")}

    def count(frame: DataFrame) -> DataFrame:
        return frame.groupBy((F.col("id") % 3).alias("key")).agg(F.count("*").alias("n"))

    def job() -> spark_abs.Job:
        made = spark_abs.Job("kinds", root=root, spark=spark, interval="1h")
        numbers = made.source("numbers", feed.stream())
        counts = made.stage("counts", [numbers], count, output_mode="update", shuffle_partitions=1)
        every = made.stage("every", [numbers], count, output_mode="complete", shuffle_partitions=1)
        made.sink("rows", numbers, table=tables["rows"])
        made.sink("merged", counts, table=spark_abs.Delta(tables["merged"], key="key", cluster_by="key"))
        made.sink("all", every, table=spark_abs.Delta(tables["all"], partition_by="key"))
        return made

    def require(upto: int) -> None:
        ids = [row["id"] for row in DeltaTable(tables["rows"]).to_pyarrow_table().to_pylist()]
        assert sorted(ids) == list(range(upto))
        expected = {key: len(range(key, upto, 3)) for key in range(3)}
        for name in ("merged", "all"):
            found = DeltaTable(tables[name]).to_pyarrow_table().to_pylist()
            assert sorted((row["key"], row["n"]) for row in found) == sorted(expected.items()), name

    feed.write(*({"id": number} for number in range(4)))
    job().start(available_now=True).await_termination()
    feed.write(*({"id": number} for number in range(4, 7)))
    run = job().start()
    for stage in ("numbers", "counts", "every"):
        run.query(stage).processAllAvailable()
    run.stop(savepoint="before")
    require(7)
    feed.write(*({"id": number} for number in range(7, 12)))
    job().start(available_now=True).await_termination()
    require(12)
    spark_abs.open(root, spark).restore("before")
    require(7)
    job().start(available_now=True).await_termination()
    require(12)
