"""A life of a job that is carried from Spark to Spark: `python -m tests.versions.carried BASE LIFE NAME`.

NAME is that of the savepoint that it ends with.

A join of two streams, an aggregate with a message of `raise_error` in it, and a stateful function in Python:
all state that Spark keeps in another form from version to version would be lost or doubled in their tables.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import spark_abs

SCHEMA = "id long, k long, v long"
TABLES = ("sums", "running", "pairs")


def count_on(
    key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
) -> Iterator[tuple[Any, ...]]:
    """Return for each row how many rows of its key have come, and their sum."""
    n, total = state.get if state.exists else (0, 0)
    for row in sorted(rows, key=lambda r: r.id):
        n, total = n + 1, total + row.v
        yield key[0], row.id, n, total
    state.update((n, total))


def running(frame: DataFrame) -> DataFrame:
    out = "k long, id long, n long, total long"
    return spark_abs.flat_map_groups_with_state(frame, "k", count_on, "n long, total long", out, key_groups=4)


def sums(frame: DataFrame) -> DataFrame:
    known = F.expr("IF(v < 0, CAST(raise_error(concat('negative: ', v)) AS BIGINT), v)")
    return frame.groupBy("k").agg(F.count("*").alias("n"), F.sum(known).alias("total"))


def pairs(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.join(right.selectExpr("id", "v AS w"), "id").select("id", "v", "w")


def declare(spark: SparkSession, base: Path) -> spark_abs.Job:
    def stream(name: str) -> DataFrame:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(base / name))

    job = spark_abs.Job(
        "carried", root=str(base / "root"), spark=spark, interval="1h", max_entries_per_batch=1
    )
    left = job.stage("left", [stream("left")], lambda f: f)
    right = job.stage("right", [stream("right")], lambda f: f)
    job.sink(
        "sums",
        job.stage("sums", [left], sums, output_mode="update"),
        table=spark_abs.Delta(str(base / "sums"), key="k"),
    )
    job.sink("running", job.stage("running", [left], running), table=str(base / "running"))
    job.sink("pairs", job.stage("pairs", [left, right], pairs), table=str(base / "pairs"))
    return job


def main(base: Path, life: str, savepoint: str) -> None:
    """Live until the input has been read, and end with a savepoint; or until the kill."""
    spark = spark_abs.spark_session("carried", "local[2]", **{"spark.sql.shuffle.partitions": "3"})
    if life == "rescale":
        spark_abs.open(str(base / "root"), spark).restore("latest", shuffle_partitions=5)
    job = declare(spark, base)
    if life == "kill":
        job.failpoint = _kill_at_the_third("batch.running.commit-running.after")
    run = job.start()
    for stage in ("left", "right", *TABLES):
        run.query(stage).processAllAvailable()
    run.stop(savepoint=savepoint)
    sys.stdout.write(f"lived with Spark {spark.version}\n")


def _kill_at_the_third(wanted: str) -> Callable[[str], None]:
    """Return what kills this process and its JVM when the table has a batch of which Spark has no commit."""
    times = count(1)

    def failpoint(point: str) -> None:
        if point == wanted and next(times) == 3:
            os.killpg(0, signal.SIGKILL)

    return failpoint


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
