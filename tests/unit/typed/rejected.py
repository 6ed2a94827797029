"""Calls that a type checker must reject, each line with the code of its error; nothing runs this file."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

import spark_abs


def declared(spark: SparkSession, clicks: DataFrame) -> None:
    spark_abs.Job("shop", root="/r", spark=spark, intervall="10s")  # E: call-arg
    spark_abs.Job("shop", root="/r", spark=spark, failpoint=print)  # E: call-arg
    spark_abs.Job("shop", root="/r", spark=spark, interval=10)  # E: arg-type
    spark_abs.Job("shop", root="/r", spark=spark, mode="fast")  # E: arg-type
    spark_abs.Job("shop", root="/r", spark=spark, tolerable_failures="any")  # E: arg-type
    spark_abs.Job("shop", root="/r", spark=spark, max_concurrent="2")  # E: arg-type
    job = spark_abs.Job("shop", root="/r", spark=spark)
    source = job.source("clicks", clicks, output_mode="all")  # E: arg-type
    job.source("orders", clicks, state_provider="redis")  # E: arg-type
    job.stage("match", [source, "orders"], lambda a, b: a)  # E: list-item
    job.stage("match", [source], lambda a: a, begin="latest")  # E: arg-type
    job.sink("out", source, table="/t", existing="replace")  # E: arg-type
    job.start(restart="backwards")  # E: arg-type


def running(run: spark_abs.Run) -> None:
    run.set(keep=2)  # E: call-arg
    run.savepoint("before", timeout="5s")  # E: arg-type


def looked_at(spark: SparkSession) -> None:
    shop = spark_abs.open("/r", spark, interval="10s")  # E: call-arg
    shop.read("sales", spark=spark)  # E: call-arg
    shop.restore("before", force=["everything"])  # E: list-item
    shop.restore("before", failpoint=print)  # E: call-arg
    shop.edit().keep_in("count", "disk")  # E: arg-type
    shop.set(copy_threads=3)  # E: call-arg
    spark_abs.checkpoint_location("/r", "daily", interval="10s")  # E: call-arg
    rows = shop.read("sales")
    spark_abs.map_groups_with_state(rows, "k", print, "n long", "n long", timeout="never")  # E: arg-type
