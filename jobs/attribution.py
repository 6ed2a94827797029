"""Attribute orders to clicks, and add up what each campaign earned: a job of four streaming queries.

    clicks ──┐
             ├── match ──┬── totals ── table totals
    orders ──┘           └── table attributed

An order is attributed to the clicks of its user within a time bound before the order; an order without such a
click has no campaign. Run it with spark-submit, or with plain Python; on a cluster, with submit.sh.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import click
import pandas as pd
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs

CLICKS = "click_id string, user string, campaign string, click_time timestamp"
ORDERS = "order_id string, user string, amount_cents long, order_time timestamp"
NO_CAMPAIGN = "none"


@dataclass(frozen=True, slots=True)
class Config:
    """`conf/attribution.yaml`, read: durations in milliseconds."""

    root: str
    clicks: str
    orders: str
    attributed: str
    totals: str
    format: str
    files_per_batch: int
    trigger: str
    late_by_ms: int
    match_within_ms: int
    window_ms: int
    totals_late_by_ms: int
    spark: Mapping[str, str]
    settings: Mapping[str, object]

    @classmethod
    def read(cls, path: Path, base: str) -> Config:
        """Read the file; relative paths in it are below `base`."""
        plain: dict[str, Any] = yaml.safe_load(path.read_text())
        for name in ("root", "clicks", "orders", "attributed", "totals"):
            if not plain[name].startswith("/") and "://" not in plain[name]:
                plain[name] = f"{base}/{plain[name]}"
        for name in ("late_by", "match_within", "window", "totals_late_by"):
            plain[f"{name}_ms"] = round(pd.Timedelta(plain.pop(name)).total_seconds() * 1000)
        settings: dict[str, object] = {
            area: plain.pop(area) for area in ("checkpoint", "channel") if area in plain
        }
        return cls(**plain, settings=settings)


def events(spark: SparkSession, config: Config, path: str, schema: str) -> DataFrame:
    """Read files that keep arriving in a directory."""
    reader = spark.readStream.format(config.format).schema(schema)
    return reader.option("maxFilesPerTrigger", config.files_per_batch).load(path)


def match(config: Config, clicks: DataFrame, orders: DataFrame) -> DataFrame:
    """Join every order with the clicks of its user in the time before it; keep orders without a click."""
    late_by = f"{config.late_by_ms} milliseconds"
    clicks = clicks.withWatermark("click_time", late_by).withColumnRenamed("user", "click_user")
    orders = orders.withWatermark("order_time", late_by)
    bound = F.lit(timedelta(milliseconds=config.match_within_ms))
    matches = (
        (F.col("user") == F.col("click_user"))
        & (F.col("click_time") <= F.col("order_time"))
        & (F.col("click_time") >= F.col("order_time") - bound)
    )
    return orders.join(clicks, matches, "leftOuter").drop("click_user")


def totals(config: Config, matched: DataFrame) -> DataFrame:
    """Count orders and add up amounts per campaign and window; an emitted window is final."""
    return summed(config, matched.withWatermark("order_time", f"{config.totals_late_by_ms} milliseconds"))


def summed(config: Config, matched: DataFrame) -> DataFrame:
    """Do the same with the frame's existing watermark."""
    return (
        matched.groupBy(
            F.window("order_time", f"{config.window_ms} milliseconds"),
            F.coalesce("campaign", F.lit(NO_CAMPAIGN)).alias("campaign"),
        )
        .agg(F.count("*").alias("orders"), F.sum("amount_cents").alias("amount_cents"))
        .select(F.col("window.start").alias("window_start"), "campaign", "orders", "amount_cents")
    )


def declare(spark: SparkSession, config: Config) -> spark_abs.Job:
    """Declare the job."""
    job = spark_abs.Job("attribution", root=config.root, spark=spark, config=config.settings)
    clicks = job.source("clicks", events(spark, config, config.clicks, CLICKS), trigger=config.trigger)
    orders = job.source("orders", events(spark, config, config.orders, ORDERS), trigger=config.trigger)
    matched = job.stage("match", [clicks, orders], lambda c, o: match(config, c, o))
    summed = job.stage("totals", [matched], lambda m: totals(config, m))
    job.sink("attributed", matched, table=config.attributed)
    job.sink("totals", summed, table=config.totals)
    return job


@click.command()
@click.option(
    "--config", "path", type=click.Path(exists=True, path_type=Path), default="conf/attribution.yaml"
)
@click.option("--base", required=True, help="Directory or URI of all data of the job.")
@click.option("--master", help="Spark's master; None: the master of spark-submit.")
@click.option("--available-now", is_flag=True, help="Process the present input, then end.")
@click.option("--takeover", is_flag=True, help="Replace a run that is alive.")
@click.option("--restart", type=click.Choice(["native", "checkpoint"]), default="native", show_default=True)
def main(
    path: Path,
    base: str,
    master: str | None,
    available_now: bool,
    takeover: bool,
    restart: Literal["native", "checkpoint"],
) -> None:
    """Run the attribution job until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    config = Config.read(path, base)
    spark = spark_abs.spark_session("attribution", master, **config.spark)
    run = declare(spark, config).start(available_now=available_now, takeover=takeover, restart=restart)
    try:
        run.await_termination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
