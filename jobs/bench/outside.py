"""Sinks outside against Spark's own: Kafka against its sink, PostgreSQL against JDBC, Iceberg against Delta.

Each takes the same rows from the same files. Ours are there once, after checkpoints a second apart; those of
Spark's sinks would be there again after a crash.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from confluent_kafka import TopicPartition
from deltalake import DeltaTable
from pyiceberg.catalog import Catalog, load_catalog
from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios
from tests.outside.kafka_server import PATIENCE_S, KafkaServer, Reader
from tests.outside.server import PASSWORD, USER, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES, _LONG, _ROWS = 10, 30, 200_000
"""Files of the short runs and of the long ones, and rows of a file."""
_TOPIC, _TABLE, _LAKE = "bench", "bench", "bench.rows"
_CREATE = "DROP TABLE IF EXISTS bench; CREATE TABLE bench (id bigint, amount bigint, digest text)"

_CATALOG = "BENCH_CATALOG"
_SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64()), ("digest", pa.string())])

Way = Callable[["DataFrame", Path], None]
"""Takes a stream of rows to its end; the directory is for whatever it keeps."""


def _write(spark: SparkSession, directory: Path, files: int) -> None:
    numbers = spark.range(0, files * _ROWS, 1, files)
    amount, digest = (F.col("id") % 1000).alias("amount"), F.sha1(F.col("id").cast("string")).alias("digest")
    numbers.select("id", amount, digest).write.parquet(str(directory))


def _source(spark: SparkSession, directory: Path) -> DataFrame:
    stream = spark.readStream.schema("id long, amount long, digest string")
    return stream.option("maxFilesPerTrigger", 1).parquet(str(directory))


def records(rows: DataFrame) -> DataFrame:
    """Make records of rows: the id is the key."""
    return rows.selectExpr("CAST(id AS string) AS key", "to_json(struct(*)) AS value")


def _job(rows: DataFrame, base: Path, **sink: str | spark_abs.Kafka | spark_abs.Iceberg) -> None:
    job = spark_abs.Job("outside", root=str(base / "root"), spark=rows.sparkSession, interval="1s")
    job.sink("out", job.source("rows", rows), **sink)  # type: ignore[arg-type]
    job.start(available_now=True).await_termination()


def bounded(rows: DataFrame, base: Path, **options: str) -> None:
    """Take a stream to its end with Spark's own Kafka sink."""
    writer = rows.writeStream.option("checkpointLocation", str(base / "c")).options(**options)
    writer.format("kafka").trigger(availableNow=True).start().awaitTermination()


def _jdbc(rows: DataFrame, base: Path, server: PostgresServer) -> None:
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres?reWriteBatchedInserts=true"
    properties = {"user": USER, "password": PASSWORD, "batchsize": "10000", "driver": "org.postgresql.Driver"}

    def write(batch: DataFrame, _: int) -> None:
        batch.write.jdbc(url, _TABLE, "append", properties)

    query = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(base / "c"))
    query.trigger(availableNow=True).start().awaitTermination()


def figures(session: Callable[[], SparkSession], base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Send two million rows in turns, and six million to Kafka; the first turn is not counted."""
    with KafkaServer() as broker, PostgresServer() as server:
        os.environ.update(server.environment)
        spark = session()
        lake = _catalog(base)
        config = spark_abs.Kafka(_TOPIC, bootstrap=broker.bootstrap)
        table = spark_abs.Iceberg(_LAKE, catalog_env=_CATALOG)
        servers = {"kafka.bootstrap.servers": broker.bootstrap}

        def kafka(rows: DataFrame, place: Path) -> None:
            _job(records(rows), place, kafka=config)

        def kafka_of_spark(rows: DataFrame, place: Path) -> None:
            bounded(records(rows), place, topic=_TOPIC, **servers)

        ways: dict[str, tuple[Way, int, Callable[[], int]]] = {
            "kafka": (kafka, _FILES, lambda: _count(broker)),
            "kafka_spark": (kafka_of_spark, _FILES, lambda: _count(broker)),
            "kafka_long": (kafka, _LONG, lambda: _count(broker)),
            "kafka_long_spark": (kafka_of_spark, _LONG, lambda: _count(broker)),
            "postgres": (
                lambda rows, place: _job(rows, place, postgres=_TABLE),
                _FILES,
                lambda: _rows(server),
            ),
            "jdbc": (lambda rows, place: _jdbc(rows, place, server), _FILES, lambda: _rows(server)),
            "iceberg": (
                lambda rows, place: _job(rows, place, iceberg=table),
                _FILES,
                lambda: lake.load_table(_LAKE).scan().count(),
            ),
            "delta_spark": (_delta, _FILES, lambda: DeltaTable(str(base / "outside" / "table")).count()),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for files in (_FILES, _LONG):
            _write(spark, base / f"rows-{files}", files)
        for turn in range(-1, runs):
            for name, (way, files, count) in ways.items():
                _empty(broker, server, lake)
                place, began = base / "outside", time.monotonic()
                place.mkdir()
                way(_source(spark, base / f"rows-{files}"), place)
                seconds = time.monotonic() - began
                there = count()
                assert there == files * _ROWS, f"{name}: {there} rows"
                shutil.rmtree(place, ignore_errors=True)
                console.print(f"outside, {name}: {there / seconds:.0f} rows a second")
                if turn >= 0:
                    took[name].append(seconds)
    for name, (_, files, _) in ways.items():
        yield figure(f"{name}_sink_rows", [files * _ROWS / s for s in took[name]], "rows/s")
    yield figure("kafka_sink_vs_spark", ratios(took["kafka_spark"], took["kafka"]))
    yield figure("kafka_long_sink_vs_spark", ratios(took["kafka_long_spark"], took["kafka_long"]))
    yield figure("postgres_sink_vs_jdbc", ratios(took["jdbc"], took["postgres"]))
    yield figure("iceberg_sink_vs_delta", ratios(took["delta_spark"], took["iceberg"]))


def _delta(rows: DataFrame, base: Path) -> None:
    writer = rows.writeStream.format("delta").option("checkpointLocation", str(base / "c"))
    writer.trigger(availableNow=True).start(str(base / "table")).awaitTermination()


def _catalog(base: Path) -> Catalog:
    """Make a catalog, and tell the sink of it."""
    settings = {"type": "sql", "uri": f"sqlite:///{base}/catalog.db", "warehouse": f"file://{base}/lake"}
    os.environ[_CATALOG] = json.dumps(settings)
    made = load_catalog("default", **settings)
    made.create_namespace("bench")
    made.create_table(_LAKE, _SCHEMA)
    return made


def _empty(broker: KafkaServer, server: PostgresServer, lake: Catalog) -> None:
    server.run(_CREATE)
    lake.purge_table(_LAKE)
    lake.create_table(_LAKE, _SCHEMA)
    if _TOPIC not in broker.topics():
        broker.make(_TOPIC)
        return
    ends = [TopicPartition(_TOPIC, number, -1) for number in range(2)]  # -1: all that is there
    admin = broker.admin()
    for done in admin.delete_records(ends).values():
        done.result(PATIENCE_S)


def _count(broker: KafkaServer) -> int:
    with Reader(broker, _TOPIC) as reader:
        return sum(map(len, reader.pieces()))


def _rows(server: PostgresServer) -> int:
    return int(server.run("SELECT count(*) FROM bench")[0][0])
