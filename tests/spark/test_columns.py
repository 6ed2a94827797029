"""Gates read the columns that a stage uses, and whatever looks at whole rows gets whole rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t
from pyspark.sql.streaming.state import GroupStateTimeout

import spark_abs
from spark_abs.job import Job
from spark_abs.manifest import OperatorShape
from spark_abs.model import ChannelId
from spark_abs.plan.columns import narrowed, used_columns, widened
from spark_abs.plan.fingerprint import kept_by_place, operator_shapes
from spark_abs.plan.frames import draft_gate
from spark_abs.spark.plans import optimized
from tests.job_support import Feed, read_table
from tests.spark.conftest import Start
from tests.spark.shapes import Visit


def fields(**kinds: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


NESTED = fields(x=t.IntegerType(), y=t.StringType())
SCHEMA = fields(k=t.LongType(), ts=t.TimestampType(), a=t.LongType(), b=t.StringType(), s=NESTED)
SCHEMA = SCHEMA.add("d.`e", t.StringType())
LEFT, RIGHT = ChannelId("left.main"), ChannelId("right.main")
ALL = "k ts a b s d.`e"


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def joined(left: DataFrame, right: DataFrame) -> DataFrame:
    late = (f.withWatermark("ts", "1 minute") for f in (left, right))
    l, r = (f.alias(name) for f, name in zip(late, "lr", strict=True))  # noqa: E741
    on = "l.k = r.k AND r.ts BETWEEN l.ts AND l.ts + INTERVAL 1 MINUTE"
    return l.join(r, F.expr(on), "leftOuter").select("l.k", "r.a")


@pytest.mark.parametrize(
    ("stage", "left", "right"),
    [
        (lambda f, g: f, ALL, None),
        (lambda f, g: f.select("k", "b").mapInArrow(same, "k long, b string").select("k"), "k b", None),
        (lambda f, g: f.groupBy("k").agg(F.sum("a")), "k a", None),
        (lambda f, g: f.select("*", (F.col("a") + 1).alias("z")).groupBy("k").agg(F.sum("z")), "k a", None),
        (lambda f, g: f.filter("b IS NOT NULL").select("k"), "k b", None),
        (
            lambda f, g: f.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute")).count(),
            "ts",
            None,
        ),
        (lambda f, g: f.dropDuplicates(["k"]).select("b"), "k b", None),
        (lambda f, g: f.select("k", "b").dropDuplicates().select("b"), "k b", None),
        (lambda f, g: f.select("s.x", "`d.``e`"), "s d.`e", None),
        (lambda f, g: f.select("k", "a").union(g.select("a", "k")).select("k"), "k", "a"),
        (joined, "k ts", "k ts a"),
        (lambda f, g: f.groupBy().count(), "", None),
    ],
)
def test_the_columns_that_a_plan_uses(
    spark: SparkSession, stage: Callable[[DataFrame, DataFrame], DataFrame], left: str, right: str | None
) -> None:
    found = used_columns(optimized(stage(draft_gate(spark, LEFT, SCHEMA), draft_gate(spark, RIGHT, SCHEMA))))
    assert found is not None
    names = {channel: [SCHEMA.names[i] for i in sorted(places)] for channel, places in found.items()}
    want = {LEFT: left.split()} if left else {}
    assert names == want | ({RIGHT: right.split()} if right is not None else {})


def test_a_column_that_is_not_read_keeps_its_name_and_type(spark: SparkSession) -> None:
    whole = (t.ByteType(), t.ShortType(), t.IntegerType(), t.LongType(), t.DecimalType(10, 2))
    others = (t.BooleanType(), t.FloatType(), t.DoubleType(), t.BinaryType(), t.VariantType())
    times = (t.DateType(), t.TimestampType(), t.TimestampNTZType(), t.DayTimeIntervalType())
    texts = (t.StringType(), t.StringType("UNICODE_CI"))
    nested = (NESTED, t.ArrayType(t.StringType()), t.MapType(t.StringType(), NESTED))
    kinds: tuple[t.DataType, ...] = (*whole, *others, *times, *texts, *nested)
    schema = t.StructType([t.StructField(f"c`{n}", kind) for n, kind in enumerate(kinds)])
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        found = draft_gate(spark, LEFT, schema).schema
    finally:
        spark.conf.unset("spark.sql.timestampType")
    assert [(f.name, f.dataType) for f in found] == [(f.name, f.dataType) for f in schema]


def test_a_plan_that_uses_a_column_which_is_not_read_fails(spark: SparkSession, tmp_path: Path) -> None:
    schema = fields(k=t.LongType(), a=t.LongType())
    feed = Feed(spark, tmp_path / "in", "k long")
    feed.write({"k": 1})
    whole = widened(feed.stream(), LEFT, schema)
    assert whole.schema.names == schema.names
    query = (
        whole.writeStream.foreachBatch(lambda f, _: f.foreach(lambda row: None))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match="does not read column 1"):
        query.awaitTermination()


def test_at_least_one_column_is_read() -> None:
    assert narrowed(SCHEMA, frozenset([2, 0])).names == ["k", "a"]
    assert narrowed(SCHEMA, frozenset()).names == ["k"]
    strings = fields(a=t.StringType(), b=t.StringType())
    assert narrowed(strings, frozenset()).names == ["a"]


def test_a_job_reads_less_and_has_the_same_rows(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    """The channel keeps all columns: what a stage did not use before the change is there after it."""
    feed = Feed(spark, tmp_path / "in", "k long, a long, b string")
    feed.write({"k": 1, "a": 2, "b": "x"}, {"k": 1, "a": 3, "b": "y"})

    def job(column: str) -> Job:
        job = Job("narrow", root=str(tmp_path / "root"), spark=spark)
        rows = job.source("rows", feed.stream())
        some = job.stage("some", [rows], lambda f: f.select("k", F.col(column).cast("string").alias("v")))
        job.sink("some", some, table=str(tmp_path / "some"))
        number = job.stage("number", [rows], lambda f: f.groupBy().count(), output_mode="update")
        job.sink("number", number, table=str(tmp_path / "number"))
        return job

    for column in ("a", "b"):
        start(job(column), available_now=True).await_termination()
        feed.write({"k": 2, "a": 4, "b": "z"})
    rows = read_table(tmp_path / "some")
    assert sorted(rows["v"].to_pylist()) == ["2", "3", "z"]
    assert max(read_table(tmp_path / "number")["count"].to_pylist()) == 3


def test_a_fingerprint_has_a_null_where_a_draft_has_a_column(spark: SparkSession) -> None:
    """As manifests of earlier versions have it."""
    draft = draft_gate(spark, LEFT, SCHEMA)
    (shape,) = operator_shapes(draft.groupBy((F.col("k") % 3).alias("third")).count())
    assert shape.parts[0] == "by (k % CAST(3 AS BIGINT)) bigint = CAST(NULL AS BIGINT)"


def sums(frame: DataFrame, first: str = "a", last: str = "k") -> DataFrame:
    return frame.groupBy("b").agg(F.sum(first).alias(first), F.sum(last).alias(last))


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        (lambda f, g: sums(f), (("sum(a)", "sum(k)"),)),
        (lambda f, g: sums(f, "k", "a"), (("sum(k)", "sum(a)"),)),
        (lambda f, g: sums(f).select("b", (F.col("k") + 1).alias("more"), "a"), (("sum(k)", "sum(a)"),)),
        (lambda f, g: sums(f).select("b", "k"), (("sum(k)",),)),
        (
            joined,
            (("k bigint", "ts timestamp"), ("k bigint", "ts timestamp", "a bigint")),
        ),
        (lambda f, g: f.dropDuplicates(["k"]), ()),
    ],
)
def test_what_spark_keeps_by_place(
    spark: SparkSession,
    stage: Callable[[DataFrame, DataFrame], DataFrame],
    kept: tuple[tuple[str, ...], ...],
) -> None:
    plan = optimized(stage(draft_gate(spark, LEFT, SCHEMA), draft_gate(spark, RIGHT, SCHEMA)))
    assert kept_by_place(plan) == kept


def window(frame: DataFrame, *size: str) -> DataFrame:
    return frame.withWatermark("ts", "1 minute").groupBy(F.window("ts", *size)).count()


def lowered(frame: DataFrame) -> DataFrame:
    return (
        frame.select(F.lower("b").alias("low"), "k").select(F.col("low").alias("key")).groupBy("key").count()
    )


def test_how_a_key_is_computed_is_followed_down_to_the_channel(spark: SparkSession) -> None:
    def computed(stage: Callable[[DataFrame], DataFrame]) -> tuple[str, ...] | None:
        (shape,) = operator_shapes(stage(draft_gate(spark, LEFT, SCHEMA)))
        return shape.computed

    assert computed(lambda f: f.groupBy("b").count()) == ()
    assert computed(lowered) == ("low", "lower(b)")
    sliding = computed(lambda f: window(f, "1 hour", "10 minutes"))
    assert sliding == computed(lambda f: window(f, "1 hour", "10 minutes")), "the same at every start"
    assert sliding != computed(lambda f: window(f, "2 hours", "10 minutes"))
    words = computed(lambda f: f.select(F.explode(F.split("b", ",")).alias("w")).groupBy("w").count())
    assert words == ("explode(split(b, ',', -1))",)


def test_the_condition_of_a_join_has_what_it_is_computed_from(spark: SparkSession) -> None:
    left, right = draft_gate(spark, LEFT, SCHEMA), draft_gate(spark, RIGHT, SCHEMA)
    (shape,) = operator_shapes(left.join(right.select(F.lower("b").alias("low")), F.expr("b = low")))
    assert shape.parts == ("on (b = low)",)
    assert shape.computed == ("lower(b)",)


def in_sql(frame: DataFrame, sql: str) -> DataFrame:
    return frame.sparkSession.sql(sql, f=frame)


@pytest.mark.parametrize(
    "join",
    [
        lambda f: f.where("b = 'click'").join(f.where("b = 'order'").alias("o"), "k"),
        lambda f: f.where("b = 'click' AND a > 0").join(f.where("b = 'order'").where("a > 0"), "k"),
        lambda f: f.alias("l").where("l.b = 'click'").join(f.alias("r").where("r.b = 'order'"), "k"),
        lambda f: f.where("b = 'click'").select("k").join(f.where("b = 'order'").select("k"), "k"),
        lambda f: in_sql(f, "SELECT l.k FROM {f} l JOIN {f} r USING (k) WHERE l.b='click' AND r.b='order'"),
        lambda f: in_sql(f, "SELECT l.k FROM {f} l JOIN {f} r ON l.k=r.k AND l.b='click' AND r.b='order'"),
        lambda f: f.where("b = 'click'").join(f.where("b = 'order'"), "k", "left"),
    ],
)
def test_the_filters_of_each_side_of_a_join(
    spark: SparkSession, join: Callable[[DataFrame], DataFrame]
) -> None:
    (shape,) = operator_shapes(join(draft_gate(spark, LEFT, SCHEMA).where("k > 0")))
    left, right = map(set, shape.apart)
    assert left - right == {"(b = 'click')"}
    assert right - left == {"(b = 'order')"}
    assert left & right >= {"channel left.main", "(k > CAST(0 AS BIGINT))"}


def test_the_sources_of_each_side_of_a_join_have_where_they_are(spark: SparkSession, tmp_path: Path) -> None:
    files = (spark.readStream.schema("k long").option("pathGlobFilter", glob) for glob in ("*.a", "*.b"))
    left, right = (reader.json(str(tmp_path)) for reader in files)
    (shape,) = operator_shapes(left.join(right, "k"))
    assert shape.sides[0] == shape.sides[1]
    assert [[name.rpartition("@")[2] for name in side] for side in shape.apart] == [["*.a"], ["*.b"]]


def in_pandas(frame: DataFrame, *key: str) -> DataFrame:
    no_timeout = GroupStateTimeout.NoTimeout
    return frame.groupBy(*key).applyInPandasWithState(
        lambda key, frames, state: frames, "n long", "n long", "append", no_timeout
    )


def transformed(frame: DataFrame, *key: str) -> DataFrame:
    return frame.groupBy(*key).transformWithStateInPandas(Visit(), "n long", "append", "None")


def transformed_by_row(frame: DataFrame, *key: str) -> DataFrame:
    return frame.groupBy(*key).transformWithState(Visit(), "n long", "append", "None")


@pytest.mark.parametrize("function", [in_pandas, transformed, transformed_by_row])
def test_a_function_of_sparks_with_state_has_its_key(
    spark: SparkSession, function: Callable[..., DataFrame]
) -> None:
    def shape(frame: DataFrame, *key: str) -> OperatorShape:
        (found,) = operator_shapes(function(frame, *key))
        return found

    draft = draft_gate(spark, LEFT, SCHEMA).select("k", "b")
    assert shape(draft, "k").parts == ("by k bigint = CAST(NULL AS BIGINT)",)
    assert shape(draft, "k").computed == ()
    two = shape(draft, "k", "b").parts
    assert two == ("by k bigint = CAST(NULL AS BIGINT), b string = CAST(NULL AS STRING)",)
    lowered = shape(draft.select(F.lower("b").alias("key"), "k"), "key")
    assert lowered.parts == ("by key string = lower(b)",)
    assert lowered.computed == ("lower(b)",)


def test_a_function_with_state_of_this_package_has_a_form_and_no_parts(spark: SparkSession) -> None:
    draft = draft_gate(spark, LEFT, SCHEMA).select("k", "b")
    counted = spark_abs.map_groups_with_state(draft, "k", lambda key, rows, state: key, "n long", "k long")
    assert operator_shapes(counted) == (OperatorShape("TransformWithStateInPySpark"),)
