"""Attribute orders to clicks by better and worse keys: a job with a loop.

    clicks ──┐                ┌── table attributed
             ├── match ───────┤
    orders ──┤    ▲           └── table given_up
             │    │ again
             └────┴──◀── with the next key

An order is first matched by the id of its click. Without a match it goes round the loop and is matched by its
session, then by its user, and is given up after that. A click that arrives meanwhile can match in the next
round. Orders in the loop are part of checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import click
import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState

import spark_abs

CLICKS = "keys array<string>, campaign string, number long"
"""A click under every key by which an order may match it.

Of several matches the click with the least number wins.
"""
ORDERS = "order_id string, keys array<string>"
"""An order and the keys to try, the best one first."""
TRIED = f"{ORDERS}, tries int"
RESULT = "order_id string, keys array<string>, tries int, campaign string"


def _remember(
    _: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Keep the best click of a key; give every order with this key the click's campaign, or none."""
    events = pd.concat(list(frames))
    campaign, number = state.get if state.exists else (None, None)
    clicks = events[events["order_id"].isna()]
    for name, found in zip(clicks["campaign"].tolist(), clicks["number"].tolist(), strict=True):
        if number is None or found < number:
            campaign, number = name, int(found)
    if number is not None:
        state.update((campaign, number))
    orders = events[events["order_id"].notna()]
    yield orders[["order_id", "keys", "tries"]].assign(campaign=campaign)


def match(clicks: DataFrame, orders: DataFrame, retry: DataFrame) -> DataFrame:
    """Try every order with its next key."""
    asked = orders.withColumn("tries", F.lit(0)).unionByName(retry)
    asked = asked.withColumn("tries", F.col("tries") + 1)
    key = F.col("keys")[F.col("tries") - 1]
    found = clicks.select(F.explode("keys").alias("key"), "campaign", "number")
    events = asked.withColumn("key", key).unionByName(found, allowMissingColumns=True)
    return events.groupBy("key").applyInPandasWithState(
        _remember, RESULT, "campaign string, number long", "append", "NoTimeout"
    )


def _again(tried: DataFrame) -> DataFrame:
    left = F.col("campaign").isNull() & (F.col("tries") < F.size("keys"))
    return tried.where(left).select("order_id", "keys", "tries")


def declare(
    spark: SparkSession, clicks: DataFrame, orders: DataFrame, base: str, **settings: Any
) -> spark_abs.Job:
    """Declare the job; all its output is below `base`."""
    job = spark_abs.Job("retries", root=f"{base}/root", spark=spark, **settings)
    retry = job.feedback("retry", TRIED)
    tried = job.stage(
        "match",
        [job.source("clicks", clicks), job.source("orders", orders), retry],
        match,
        outputs={
            "attributed": lambda t: t.where("campaign IS NOT NULL").drop("keys"),
            "again": _again,
            "given_up": lambda t: t.where("campaign IS NULL AND tries >= size(keys)").select("order_id"),
        },
    )
    retry.close(tried["again"])
    job.sink("attributed", tried["attributed"], table=f"{base}/attributed")
    job.sink("given_up", tried["given_up"], table=f"{base}/given_up")
    return job


def expected(clicks: pd.DataFrame, orders: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the final rows of the tables, if all clicks arrive before the first order.

    A batch query joins every key of every order with the best click of the key; the first match counts.
    """
    keyed = clicks.explode("keys").sort_values("number").drop_duplicates("keys")
    tried = orders.explode("keys")
    tried["tries"] = tried.groupby("order_id").cumcount() + 1
    hits = tried.merge(keyed, on="keys").sort_values("tries").drop_duplicates("order_id")
    attributed = hits[["order_id", "tries", "campaign"]].reset_index(drop=True)
    missed = orders[~orders["order_id"].isin(hits["order_id"])]
    return attributed, missed[["order_id"]].reset_index(drop=True)


@click.command()
@click.option("--base", required=True, help="Directory or URI of all data of the job.")
@click.option("--master", help="Spark's master; None: the master of spark-submit.")
@click.option("--available-now", is_flag=True, help="Process the present input, then end.")
def main(base: str, master: str | None, available_now: bool) -> None:
    """Run the job over JSON files in BASE/clicks and BASE/orders until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    spark = spark_abs.spark_session("retries", master)
    read = spark.readStream.option("maxFilesPerTrigger", 10)
    clicks = read.schema(CLICKS).json(f"{base}/clicks")
    orders = read.schema(ORDERS).json(f"{base}/orders")
    run = declare(spark, clicks, orders, base).start(available_now=available_now)
    try:
        run.await_termination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
