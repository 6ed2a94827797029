"""Spark writes the files of a batch, deltalake commits them, the gate reads them back as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chispa import assert_df_equality
from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t

from spark_abs.channels.gate import GateReader, GateSpec, open_gate
from spark_abs.channels.schema import plain_schema
from spark_abs.channels.writer import ChannelWriter, create_channel
from spark_abs.model import AttemptId, BatchId, Branch, ChannelId, CheckpointId, RunId, StageId, Version
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.channel_support import JOB, NUMBERS, make_writer, position

EVERY_TYPE = """
    select cast(id as byte) a_byte, cast(id as short) a_short, cast(id as int) an_int, id a_long,
      cast(id as float) / 3 a_float, if(id = 1, double('NaN'), cast(id as double)) a_double,
      cast(id as decimal(10, 2)) small, cast(id as decimal(38, 18)) / 3 large, id = 1 truth,
      concat('é', id) text, cast(concat('b', id) as binary) bytes,
      date_add(date'1500-01-01', cast(id as int) * 100000) day,
      timestamp'2024-01-01 00:00:00.123456' + make_dt_interval(cast(id as int) * 70000) moment,
      timestamp'1500-01-01 00:00:00.123456' long_ago,
      timestamp_ntz'2024-01-01 12:00:00.654321' wall_clock, cast(null as string) nothing,
      array(id, null) numbers, array(named_struct('x', id, 'y', array('q'))) nested,
      map('k', named_struct('when', timestamp'2024-01-01 00:00:00')) a_map,
      named_struct('inner', named_struct('deep', id), 'none', cast(null as int)) a_struct,
      id as `a dot.and (more)`, window(timestamp'2024-01-01 10:10:00', '1 hour') window
    from range(4)
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(str(tmp_path / "root"))
    Control.create(root, JOB, 0)
    return root


def stream(spark: SparkSession, frame: DataFrame, place: Path) -> DataFrame:
    """Turn a frame into a stream of one batch."""
    frame.write.parquet(str(place))
    return spark.readStream.schema(frame.schema).parquet(str(place))


def run(frame: DataFrame, place: Path, function: Callable[[DataFrame, int], None]) -> None:
    query = (
        frame.writeStream.foreachBatch(function)
        .option("checkpointLocation", str(place))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def spec(root: Root, schema: t.StructType) -> GateSpec:
    return GateSpec(
        root=root.uri,
        start=position("a.main", 0),
        schema=schema.json(),
        native=root.at("native/1/s"),
        path=(Branch(AttemptId(1), None),),
        run=RunId(1),
        attempt=AttemptId(1),
        floor=CheckpointId(0),
        control_version=Version(1),
        max_entries=1000,
        max_bytes=2**30,
        partition_bytes=2**20,
        poll_ms=0,
        native_poll_ms=0,
    )


def test_every_type_comes_through_a_channel(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """From a stage's batch function into the channel and out of the next stage's gate, unchanged."""
    expected = spark.sql(EVERY_TYPE)
    schema = plain_schema(expected.schema)
    writer = make_writer(root, schema=schema)
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    try:
        source = stream(spark, expected.repartition(2), tmp_path / "in")

        def write(frame: DataFrame, batch: int) -> None:
            writer.commit_batch(writer.write_files(frame, BatchId(batch)), BatchId(batch))

        run(source, tmp_path / "checkpoint", write)
        assert spark.conf.get("spark.sql.parquet.outputTimestampType") == "INT96"  # the batch has its own
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    seen: list[DataFrame] = []

    def read(frame: DataFrame, batch: int) -> None:
        kept = spark.createDataFrame(frame.toArrow(), schema)
        seen.extend([kept] if batch == 0 else [])

    gate = open_gate(spark, spec(root, schema))
    query = gate.writeStream.foreachBatch(read).option("checkpointLocation", root.at("native/1/s")).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    wanted = spark.createDataFrame(expected.toArrow(), schema)
    found, wanted = (frame.orderBy("a_long") for frame in (seen[0], wanted))
    assert_df_equality(found, wanted, allow_nan_equality=True)


def test_delta_finds_the_rows_by_the_statistics(spark: SparkSession, root: Root) -> None:
    """Every row is found by a filter on its own values, whatever files Delta skips, and is counted."""
    expected = spark.sql(EVERY_TYPE)
    writer = make_writer(root, schema=expected.schema)
    for number in range(2):
        part = expected.where(f"a_long % 2 = {number}").repartition(2)
        writer.commit_batch(writer.write_files(part, BatchId(number)), BatchId(number))
    table = spark.read.format("delta").load(root.at("channels/a.main"))
    assert table.count() == 4
    names = ("a_byte", "a_long", "text", "day", "moment", "truth", "small", "wall_clock")
    for row in expected.collect():
        own = reduce(Column.__and__, (F.col(name) == F.lit(row[name]) for name in names))
        assert table.where(own).count() == 1
    assert table.where("isnan(a_double) and a_double > 100").count() == 1
    assert table.where("nothing is null").count() == 4


def test_a_batch_without_rows_leaves_no_file(spark: SparkSession, root: Root) -> None:
    writer = make_writer(root)
    written = writer.write_files(spark.range(0).toDF("n"), BatchId(0))
    assert (written.files, written.rows) == ((), 0)
    assert writer.commit_batch(written, BatchId(0)).entry.silent
    assert list(Path(root.path("channels/a.main/data")).rglob("*")) == []


def test_files_of_a_batch_lie_in_a_directory_of_its_own(spark: SparkSession, root: Root) -> None:
    """No marker files; a repeat of the batch cannot touch what an earlier evaluation has written."""
    writer = make_writer(root)
    frame = spark.range(10).toDF("n").repartition(2)
    first, second = (writer.write_files(frame, BatchId(3)) for _ in range(2))
    assert len(first.files) == 2
    assert not {f.path for f in first.files} & {f.path for f in second.files}
    assert {f.path.split("/")[1][:5] for f in first.files} == {"1-1-3"}
    assert not list(Path(root.path("channels/a.main")).rglob("_SUCCESS"))
    rows = [pq.read_metadata(root.path(f"channels/a.main/{f.path}")).num_rows for f in first.files]
    assert first.rows == sum(rows) == 10


def test_a_task_publishes_nothing_before_all_are_done(spark: SparkSession, root: Root) -> None:
    """A task's files may be those of an attempt that is lost before Spark hears of it, and then repeated.

    Hadoop's second algorithm, which many clusters set, shows them to whoever lists the directory.
    """
    writer = make_writer(root)
    channel = Path(root.path("channels/a.main"))

    def until_the_other_is_done(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (batch,) = batches
        if batch["n"][0].as_py() == 1:
            deadline = time.monotonic() + 60
            while not [*channel.glob("data/*/_temporary/0/task_*"), *channel.glob("data/*/*.parquet")]:
                assert time.monotonic() < deadline, "the other task was not committed"
                threading.Event().wait(0.02)
            raise RuntimeError("after the commit of the other task")
        yield batch

    frame = spark.range(2, numPartitions=2).toDF("n").mapInArrow(until_the_other_is_done, "n long")
    spark.conf.set("mapreduce.fileoutputcommitter.algorithm.version", "2")
    try:
        with pytest.raises(PythonException, match="after the commit of the other task"):
            writer.write_files(frame, BatchId(0))
    finally:
        spark.conf.unset("mapreduce.fileoutputcommitter.algorithm.version")
    assert list(channel.glob("data/*/*.parquet")) == []


def test_a_column_that_came_later_reads_as_null_in_older_entries(spark: SparkSession, root: Root) -> None:
    make_writer(root)
    writer = ChannelWriter(root, JOB, stage=StageId("a"), output="main", attempt=AttemptId(1), run=RunId(1))
    writer.commit_batch(writer.write_files(spark.range(2).toDF("n"), BatchId(0)), BatchId(0))
    wider = t.StructType([*NUMBERS.fields, t.StructField("extra", t.MapType(t.StringType(), t.DateType()))])
    reader = GateReader(spec(root, wider), wider)
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    batches = [
        batch for part in reader.partitions(reader.initialOffset(), end) for batch in reader.read(part)
    ]
    assert sum(batch.num_rows for batch in batches) == 2
    assert all(batch.column("extra").null_count == batch.num_rows for batch in batches)


def test_watermarks_do_not_travel_in_the_schema(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """Spark notes a watermark in the column's metadata: the next stage must not take it for its own."""
    events = stream(spark, spark.sql("select timestamp'2024-01-01 00:00:00' at"), tmp_path / "in")
    schema = events.withWatermark("at", "10 seconds").schema
    create_channel(root, ChannelId("w.main"), schema)
    assert schema["at"].metadata
    assert not plain_schema(schema)["at"].metadata
