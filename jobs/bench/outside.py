"""Sinks outside against Spark's own: Kafka against its Kafka sink, PostgreSQL against its JDBC writer.

Each takes the same rows from the same files. Ours are there once, behind checkpoints a second apart; those of
Spark's sinks would be there again after a crash.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition
from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios
from tests.outside.kafka_server import PATIENCE_S, KafkaServer, Reader
from tests.outside.server import PASSWORD, USER, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES, _ROWS = 10, 200_000
_TOPIC, _TABLE = "bench", "bench"
_CREATE = "DROP TABLE IF EXISTS bench; CREATE TABLE bench (id bigint, amount bigint, digest text)"

Way = Callable[["DataFrame", Path], None]
"""Takes a stream of rows to its end; the directory is for whatever it keeps."""


def _write(spark: SparkSession, directory: Path) -> None:
    numbers = spark.range(0, _FILES * _ROWS, 1, _FILES)
    amount, digest = (F.col("id") % 1000).alias("amount"), F.sha1(F.col("id").cast("string")).alias("digest")
    numbers.select("id", amount, digest).write.parquet(str(directory))


def _source(spark: SparkSession, directory: Path) -> DataFrame:
    stream = spark.readStream.schema("id long, amount long, digest string")
    return stream.option("maxFilesPerTrigger", 1).parquet(str(directory))


def records(rows: DataFrame) -> DataFrame:
    """Make records of rows: the id is the key."""
    return rows.selectExpr("CAST(id AS string) AS key", "to_json(struct(*)) AS value")


def _job(rows: DataFrame, base: Path, **sink: str | spark_abs.Kafka) -> None:
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
    """Send two million rows in turns; the first turn is not counted."""
    with KafkaServer() as broker, PostgresServer() as server:
        os.environ.update(server.environment)
        spark = session()
        config = spark_abs.Kafka(_TOPIC, bootstrap=broker.bootstrap)
        ways: dict[str, Way] = {
            "kafka": lambda rows, place: _job(records(rows), place, kafka=config),
            "kafka_spark": lambda rows, place: bounded(
                records(rows), place, topic=_TOPIC, **{"kafka.bootstrap.servers": broker.bootstrap}
            ),
            "postgres": lambda rows, place: _job(rows, place, postgres=_TABLE),
            "jdbc": lambda rows, place: _jdbc(rows, place, server),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        _write(spark, base / "rows")
        for turn in range(-1, runs):
            for name, way in ways.items():
                _empty(broker, server)
                place, began = base / "outside", time.monotonic()
                place.mkdir()
                way(_source(spark, base / "rows"), place)
                seconds = time.monotonic() - began
                there = _count(broker) if name.startswith("kafka") else _rows(server)
                assert there == _FILES * _ROWS, f"{name}: {there} rows"
                shutil.rmtree(place, ignore_errors=True)
                console.print(f"outside, {name}: {there / seconds:.0f} rows a second")
                if turn >= 0:
                    took[name].append(seconds)
    for name in ways:
        yield figure(f"{name}_sink_rows", [_FILES * _ROWS / s for s in took[name]], "rows/s")
    yield figure("kafka_sink_vs_spark", ratios(took["kafka_spark"], took["kafka"]))
    yield figure("postgres_sink_vs_jdbc", ratios(took["jdbc"], took["postgres"]))


def _empty(broker: KafkaServer, server: PostgresServer) -> None:
    server.run(_CREATE)
    if _TOPIC not in broker.topics():
        broker.make(_TOPIC)
        return
    ends = [TopicPartition(_TOPIC, number, -1) for number in range(2)]  # -1: all that is there
    admin = broker.admin()
    for done in admin.delete_records(ends).values():
        done.result(PATIENCE_S)


def _count(broker: KafkaServer) -> int:
    with Reader(broker, _TOPIC) as reader:
        return len(reader.read())


def _rows(server: PostgresServer) -> int:
    return int(server.run("SELECT count(*) FROM bench")[0][0])
