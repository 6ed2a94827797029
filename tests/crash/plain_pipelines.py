"""Pipelines in plain PySpark, as their owner runs them. This program knows nothing of spark_abs.

    python plain_pipelines.py PIPELINE run BASE
    python plain_pipelines.py PIPELINE finish BASE...

`run` works until it is killed. `finish` runs each copy to the end of its input and prints its tables as JSON.
Input is in `BASE/../in*`; below BASE are `c/<query>`, checkpoints, and `t/<table>`. The environment variable
PLAIN_CONF has the configuration of the session as JSON, PLAIN_OPTIONS further options of readers of tables,
PLAIN_KAFKA the `connector` of a session that reads Kafka, and the `options` of its reader.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.state import GroupState

SCHEMA = "k long, seq long, v long"
SECONDS_OF_A_DAY = 86400
ROCKS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


class Pipeline:
    """The queries of one pipeline over one directory."""

    def __init__(self, spark: SparkSession, name: str, base: Path, live: bool) -> None:
        self.spark, self.name, self.base, self.live = spark, name, base, live

    def make_tables(self) -> None:
        for table in ("bronze", "silver", "big", "latest"):
            if not (self.base / "t" / table).exists():
                self.spark.createDataFrame([], SCHEMA).write.format("delta").save(self.table(table))

    def table(self, name: str) -> str:
        return str(self.base / "t" / name)

    def queries(self) -> list[Callable[[], StreamingQuery]]:
        """Return how each query is started, readers after writers."""
        silver = [
            lambda: self.into("silver", self.reads("bronze").dropDuplicates(["seq"])),
            lambda: self.into("big", self.reads("silver").where("v >= 50")),
        ]
        return {
            "medallion": [
                lambda: self.into("bronze", self.files("in1")),
                *silver,
                lambda: self.into("totals", self.totals(self.reads("silver")), "complete"),
            ],
            "fan-in": [
                lambda: self.into("bronze", self.files("in1"), query="left"),
                lambda: self.into("bronze", self.files("in2"), query="right"),
                *silver,
            ],
            "merge": [
                lambda: self.into("bronze", self.files("in1")),
                lambda: self.merging("latest", self.reads("bronze")),
                lambda: self.into("totals", self.totals(self.reads("bronze")), "complete"),
            ],
            "join": [
                lambda: self.into("bronze", self.files("in1")),
                lambda: self.into("silver", self.pairs(self.reads("bronze"), self.files("in2"))),
                silver[1],
            ],
            "state": [
                lambda: self.into("bronze", self.files("in1")),
                lambda: self.into("silver", self.counted(self.reads("bronze"))),
                silver[1],
            ],
            "kafka": [lambda: self.into("bronze", self.records()), *silver],
        }[self.name.partition("+")[0]]

    def files(self, name: str) -> DataFrame:
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1 if self.live else 50)
        return reader.json(str(self.base.parent / name))

    def records(self) -> DataFrame:
        """Read the rows that Kafka has as JSON."""
        reader = self.spark.readStream.format("kafka").options(**kafka("options"))
        reader = reader.option("maxOffsetsPerTrigger", 20 if self.live else 1000)
        values = reader.load().select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("row"))
        return values.select("row.*")

    def reads(self, table: str) -> DataFrame:
        reader = self.spark.readStream.format("delta")
        for name, value in json.loads(os.environ.get("PLAIN_OPTIONS", "{}")).items():
            reader = reader.option(name, value)
        return reader.load(self.table(table))

    def totals(self, frame: DataFrame) -> DataFrame:
        return frame.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("v"))

    def pairs(self, left: DataFrame, right: DataFrame) -> DataFrame:
        """Join two streams whose rows have a second each; state of the seconds before is dropped."""
        first = left.withColumn("t", second(F.col("seq"))).withWatermark("t", "10 seconds")
        other = right.select(second(F.col("seq") - 10**6).alias("u"), F.col("v").alias("w"))
        joined = first.join(other.withWatermark("u", "10 seconds"), F.expr("t = u"))
        return joined.selectExpr("k", "seq", "v + w AS v")

    def counted(self, frame: DataFrame) -> DataFrame:
        """Number the rows of each key."""
        keyed = frame.groupBy("k")
        return keyed.applyInPandasWithState(number_rows, SCHEMA, "n long", "append", "NoTimeout")

    def into(self, table: str, frame: DataFrame, mode: str = "append", query: str = "") -> StreamingQuery:
        return self.writer(query or table, frame.writeStream.format("delta").outputMode(mode)).start(
            self.table(table)
        )

    def merging(self, table: str, frame: DataFrame) -> StreamingQuery:
        """Keep the newest row of each key by a MERGE under an application id that never changes."""

        def merge(batch: DataFrame, number: int) -> None:
            session = batch.sparkSession
            session.conf.set("spark.databricks.delta.write.txnAppId", "latest-by-key")
            session.conf.set("spark.databricks.delta.write.txnVersion", str(number))
            batch.groupBy("k").agg(F.max_by(F.struct("seq", "v"), "seq").alias("r")).select(
                "k", "r.seq", "r.v"
            ).createOrReplaceTempView("changes")
            session.sql(
                f"MERGE INTO delta.`{self.table(table)}` t USING changes s ON t.k = s.k "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )
            for name in ("txnAppId", "txnVersion"):
                session.conf.unset(f"spark.databricks.delta.write.{name}")

        return self.writer(table, frame.writeStream.foreachBatch(merge)).start()

    def writer(self, query: str, writer: DataStreamWriter) -> DataStreamWriter:
        placed = writer.option("checkpointLocation", str(self.base / "c" / query))
        return (
            placed.trigger(processingTime="200 milliseconds")
            if self.live
            else placed.trigger(availableNow=True)
        )

    def content(self) -> dict[str, list[list[int]]]:
        return {
            table.name: sorted(map(list, self.spark.read.format("delta").load(str(table)).collect()))
            for table in sorted((self.base / "t").iterdir())
        }


def second(number: Column) -> Column:
    """Return a time of the second day: the first second of all is late, since a watermark begins there."""
    return F.timestamp_seconds(number + SECONDS_OF_A_DAY)


def number_rows(key: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Give the rows of a key the numbers that follow those of earlier batches."""
    (before,) = state.get if state.exists else (0,)
    numbers = sorted(seq for frame in frames for seq in frame["seq"])
    after = int(before) + len(numbers)  # pandas may have made it a float
    state.update((after,))
    yield pd.DataFrame({"k": key[0], "seq": numbers, "v": range(after - len(numbers) + 1, after + 1)})


def kafka(what: str) -> Any:
    return json.loads(os.environ["PLAIN_KAFKA"])[what]


def main(name: str, mode: str, *bases: str) -> None:
    builder = SparkSession.builder.master("local[2]").appName("plain")
    settings = {**json.loads(os.environ["PLAIN_CONF"]), **(ROCKS if name.endswith("+rocks") else {})}
    if name == "kafka":
        settings["spark.jars.packages"] += f",{kafka('connector')}"
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    found = []
    for base in map(Path, bases):
        pipeline = Pipeline(spark, name, base, live=mode == "run")
        pipeline.make_tables()
        if mode == "run":
            running = [start() for start in pipeline.queries()]
            while all(query.isActive for query in running):
                threading.Event().wait(0.2)
            sys.exit("\n".join(str(query.exception()) for query in running))
        for start in pipeline.queries():
            start().awaitTermination()
        found.append(pipeline.content())
    sys.stdout.write(f"TABLES {json.dumps(found)}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
