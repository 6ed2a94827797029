"""The job that crash tests kill: one source with two channels, a join after both, totals after that.

    events ──┬── main ────┐
             ├── orders ──┴── pair ──┬── main ── tail ── table totals
             └── table arrivals      └── table pairs

Every stage commits to more than one output or reads more than one input, so that there is something between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.store.failpoint import Failpoint, no_failpoint

SCHEMA = "id long, key string, kind string, amount long"
STAGES = ("events", "pair", "tail")


def pair(events: DataFrame, orders: DataFrame) -> DataFrame:
    clicks = events.where("kind = 'click'").drop("kind", "amount")
    return clicks.join(orders.drop("key", "kind").withColumnRenamed("token", "ordered"), "id")


def totals(pairs: DataFrame) -> DataFrame:
    return pairs.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))


def add(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> tuple[Any, ...]:
    n, total = state.get if state.exists else (0, 0)
    for row in rows:
        n, total = n + 1, total + row.amount
    state.update((n, total))
    return key[0], n, total


def totals_in_python(pairs: DataFrame) -> DataFrame:
    """Do as `totals`, in a function."""
    out = "key string, n long, total long"
    return spark_abs.map_groups_with_state(pairs, "key", add, "n long, total long", out, output_mode="update")


def declare(
    spark: SparkSession,
    base: Path,
    config: Mapping[str, object],
    failpoint: Failpoint = no_failpoint,
    in_python: bool = False,
    through: bool = False,
    outside: bool = False,
    kinds: bool = False,
    shown: bool = False,
) -> spark_abs.Job:
    """Declare the job below `base`: `input/` is read, `root/` and one directory a table are written.

    `config` holds settings by area, as in YAML; `in_python` lets a Python function keep the totals; `through`
    puts a stage between the source and the join, and a reader beside it; `outside` sends what arrives and the
    totals to PostgreSQL, what arrives also with each batch, to tables in the schema that is called like
    `base`, and what arrives to Iceberg, in the catalog that `$CATALOG_` and the name of `base` describe;
    `kinds` writes the totals to a table by key, too, and all of them with every batch to one that is
    partitioned; `shown` writes, after each checkpoint, what arrives to one table and the totals by key to
    another.
    """
    job = spark_abs.Job("small", root=str(base / "root"), spark=spark, config=config)
    job.failpoint = failpoint
    files = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(base / "input"))
    drawn = files.withColumn("token", F.expr("uuid()"))  # two evaluations of a batch do not agree
    events = job.source("events", drawn, outputs={"orders": lambda batch: batch.where("kind = 'order'")})
    clicks = job.stage("through", [events], lambda frame: frame) if through else events
    if through:
        beside = job.stage("beside", [events["orders"]], lambda frame: frame)
        job.sink("beside", beside, table=str(base / "beside"))
    paired = job.stage("pair", [clicks, events["orders"]], pair, shuffle_partitions=1)
    summed = job.stage(
        "tail",
        [paired],
        totals_in_python if in_python else totals,
        shuffle_partitions=1,
        output_mode="update",
        state_provider="rocksdb" if in_python else "hdfs",
    )
    job.sink("arrivals", events, table=str(base / "arrivals"))
    job.sink("pairs", paired, table=str(base / "pairs"))
    job.sink("totals", summed, table=str(base / "totals"))
    if outside:
        job.sink("sent", events, postgres=spark_abs.Postgres("sent", schema=base.name))
        last = spark_abs.Postgres(
            "last",
            schema=base.name,
            mode="upsert",
            key="key",
            sequence_by="n",
            apply_as_deletes="n < 0",
            history=True,
        )
        job.sink("last", summed, postgres=last)
        quick = spark_abs.Postgres(
            "quick",
            schema=base.name,
            mode="upsert",
            key=("id", "kind"),
            history=True,
            visible="batch",
        )
        job.sink("quick", events, postgres=quick)
        lake = spark_abs.Iceberg("shop.rows", catalog_env=f"CATALOG_{base.name}")
        job.sink("lake", events, iceberg=lake)
    if kinds:
        every = job.stage("every", [paired], totals, shuffle_partitions=1, output_mode="complete")
        merged = spark_abs.Delta(
            str(base / "merged"),
            key="key",
            cluster_by="key",
            sequence_by="n",
            apply_as_deletes="n % 5 = 0",
        )
        job.sink("merged", summed, table=merged)
        job.sink("every", every, table=spark_abs.Delta(str(base / "every"), partition_by="key"))
    if shown:
        job.sink("shown", events, table=spark_abs.Delta(str(base / "shown"), visible="checkpoint"))
        latest = spark_abs.Delta(str(base / "latest"), key="key", visible="checkpoint")
        job.sink("latest", summed, table=latest)
    return job
