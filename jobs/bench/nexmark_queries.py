"""Queries of Nexmark and the cyclic one of CheckMate, as jobs; and what each must give, by pandas.

q1   the price of each bid in another currency
q3   who sells in category 10 and lives in Oregon, Idaho or California: a join whose state only grows
q8   who registered and put up an auction in the same ten seconds of event time: a windowed join
q12  how often each bidder bids in ten seconds of processing time. A row's processing time is the beginning
     of its micro-batch, the only such time that Spark offers
cyclic  (arXiv 2403.13629) which nodes can be reached from which sources, while links and sources are added.
     What a source has reached goes round to be joined with the links of that node. CheckMate's query takes
     links and sources away, too; and it passes nodes on with the path to them, ours each once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from pyspark.sql import functions as F

import spark_abs
from bench.nexmark_events import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STATES, CATEGORY = ("OR", "ID", "CA"), 10
_LATE = "5 seconds"

Tables = Mapping[str, pd.DataFrame]
Declare = Callable[[spark_abs.Job, Mapping[str, spark_abs.Output]], spark_abs.Output]
"""Declares the stages after the sources, by kind of event; returns the output for the table."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query."""

    name: str
    kinds: Sequence[str]
    """Of events that it reads."""
    events: int
    """Of all kinds, in one file."""
    declare: Declare
    expected: Callable[[Tables], pd.DataFrame]
    of_table: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows
    """Makes what is comparable with `expected` of the rows in the table."""
    keyed: bool = True
    """Whether hot items make a difference."""


def declare(query: Query, spark: SparkSession, base: Path, **settings: object) -> spark_abs.Job:
    """Declare the job that reads `base/input`, a file a batch, and writes `base/out`."""
    job = spark_abs.Job(
        "nexmark", root=str(base / "root"), spark=spark, config={"checkpoint": dict(settings)}
    )
    sources = {}
    for kind in query.kinds:
        stream = spark.readStream.schema(SCHEMAS[kind]).option("maxFilesPerTrigger", 1)
        sources[kind] = job.source(kind, stream.parquet(str(base / "input" / kind)))
    job.sink("out", query.declare(job, sources), table=str(base / "out"))
    return job


def euros(bids: DataFrame) -> DataFrame:
    """Give the prices of bids in another currency."""
    return bids.select("auction", "bidder", (F.col("price") * 908).alias("price"))


def _q1(job: spark_abs.Job, sources: Mapping[str, spark_abs.Output]) -> spark_abs.Output:
    return job.stage("euros", [sources["bid"]], euros)


def _q1_expected(tables: Tables) -> pd.DataFrame:
    bids = tables["bid"][["auction", "bidder", "price"]]
    return bids.assign(price=bids["price"] * 908)


def sellers(persons: DataFrame, auctions: DataFrame) -> DataFrame:
    """Join persons of three states with their auctions of one category."""
    near = persons.where(F.col("state").isin(*_STATES)).withColumnRenamed("id", "person")
    sold = auctions.where(F.col("category") == CATEGORY)
    return sold.join(near, F.expr("seller = person")).select("name", "state", "id")


def _q3(job: spark_abs.Job, sources: Mapping[str, spark_abs.Output]) -> spark_abs.Output:
    return job.stage("sellers", [sources["person"], sources["auction"]], sellers)


def _q3_expected(tables: Tables) -> pd.DataFrame:
    persons, auctions = tables["person"], tables["auction"]
    joined = auctions[auctions["category"] == CATEGORY].merge(
        persons[persons["state"].isin(_STATES)], left_on="seller", right_on="id", suffixes=("", "_person")
    )
    return joined[["name", "state", "id"]]


def same_window(persons: DataFrame, auctions: DataFrame) -> DataFrame:
    """Join persons with the auctions that they put up in the ten seconds in which they registered."""
    ten = F.window("at", "10 seconds")
    new = persons.withWatermark("at", _LATE).select("id", "name", ten.alias("registered"))
    selling = auctions.withWatermark("at", _LATE).select("seller", ten.alias("offered"))
    joined = new.join(selling, F.expr("id = seller AND registered = offered"))
    return joined.select("id", "name", F.col("registered.start").alias("since"))


def once(rows: DataFrame) -> DataFrame:
    """Keep one row of each person and window."""
    return rows.dropDuplicates(["id", "since"])


def _q8(job: spark_abs.Job, sources: Mapping[str, spark_abs.Output]) -> spark_abs.Output:
    joined = job.stage("same_window", [sources["person"], sources["auction"]], same_window)
    return job.stage("new_users", [joined], once)


def _q8_expected(tables: Tables) -> pd.DataFrame:
    persons = tables["person"].assign(since=tables["person"]["at"].dt.floor("10s"))
    auctions = tables["auction"].assign(since=tables["auction"]["at"].dt.floor("10s"))
    joined = persons.merge(
        auctions, left_on=["id", "since"], right_on=["seller", "since"], suffixes=("", "_a")
    )
    return joined[["id", "name", "since"]].drop_duplicates()


def _q12(job: spark_abs.Job, sources: Mapping[str, spark_abs.Output]) -> spark_abs.Output:
    def counts(bids: DataFrame) -> DataFrame:
        at = bids.withColumn("now", F.current_timestamp())
        counted = at.groupBy("bidder", F.window("now", "10 seconds")).agg(F.count("*").alias("n"))
        return counted.select("bidder", F.col("window.start").alias("since"), "n")

    return job.stage("counts", [sources["bid"]], counts, output_mode="update")


def _q12_of_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Add up the last count of each window: which bid is in which window is known to that run alone."""
    last = rows.groupby(["bidder", "since"], as_index=False)["n"].max()
    summed: pd.DataFrame = last.groupby("bidder", as_index=False)["n"].sum()
    return summed


def _q12_expected(tables: Tables) -> pd.DataFrame:
    return tables["bid"]["bidder"].value_counts().rename_axis("bidder").reset_index(name="n")


def _cyclic(job: spark_abs.Job, sources: Mapping[str, spark_abs.Output]) -> spark_abs.Output:
    def reached(added: DataFrame, back: DataFrame) -> DataFrame:
        begun = added.select(F.col("node").alias("source"), "node")
        return begun.unionByName(back).dropDuplicates(["source", "node"])

    def onwards(at: DataFrame, links: DataFrame) -> DataFrame:
        return at.join(links, F.expr("node = start")).select("source", F.col("end").alias("node"))

    back = job.feedback("back", "source long, node long")
    at = job.stage("reached", [sources["source"], back], reached)
    back.close(job.stage("onwards", [at, sources["link"]], onwards))
    return at


def _cyclic_expected(tables: Tables) -> pd.DataFrame:
    links = tables["link"].groupby("start")["end"].agg(set).to_dict()
    found = set[tuple[int, int]]()
    for source in set(tables["source"]["node"].tolist()):
        open_nodes = [source]
        while open_nodes:
            node = open_nodes.pop()
            if (source, node) not in found:
                found.add((source, node))
                open_nodes += links.get(node, ())
    return pd.DataFrame(sorted(found), columns=["source", "node"])


QUERIES: Sequence[Query] = (
    Query("q1", ["bid"], 100_000, _q1, _q1_expected, keyed=False),
    Query("q3", ["person", "auction"], 500_000, _q3, _q3_expected),
    Query("q8", ["person", "auction"], 500_000, _q8, _q8_expected),
    Query("q12", ["bid"], 100_000, _q12, _q12_expected, _q12_of_table),
    Query("cyclic", ["source", "link"], 2_000, _cyclic, _cyclic_expected),
)
