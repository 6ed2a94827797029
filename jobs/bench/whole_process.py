"""Nine stages or queries of Nexmark in a process of their own, from its start to its end.

Thirty thousand events are there at the start. The plain queries, with Delta tables between them, are started
together and stopped when all rows are in the last tables; the job takes what is there, and ends by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench import nexmark_events
from bench.figures import Figure, figure, ratios, wait
from bench.nexmark_queries import CATEGORY, QUERIES, euros, once, same_window, sellers
from bench.session import session
from bench.starting import DEFAULT_POLLING_DELAY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WAYS = ("job", "plain")
KINDS = ("person", "auction", "bid")
EVENTS = 30_000


@dataclass(frozen=True, slots=True)
class Step:
    """A stage, or a query."""

    inputs: Sequence[str]
    """Names of sources and of earlier steps."""
    of: Callable[..., DataFrame]
    last: bool = True
    """Whether no other step reads it."""


def _some(bids: DataFrame) -> DataFrame:
    """Keep bids for some auctions: query 2."""
    return bids.where("auction % 123 = 0").select("auction", "price")


def _offered(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """Join bids with their auctions in one category: query 20 without its other columns."""
    of_category = auctions.where(F.col("category") == CATEGORY).select("id", "seller")
    return bids.join(of_category, F.expr("auction = id")).select("auction", "bidder", "price", "seller")


STEPS: Mapping[str, Step] = {
    "euros": Step(["bid"], euros),
    "some": Step(["bid"], _some),
    "offered": Step(["bid", "auction"], _offered),
    "sellers": Step(["person", "auction"], sellers),
    "same_window": Step(["person", "auction"], same_window, last=False),
    "new_users": Step(["same_window"], once),
}
"""What comes after the three sources."""


def _sources(spark: SparkSession, base: Path) -> dict[str, DataFrame]:
    schemas = nexmark_events.SCHEMAS
    return {
        kind: spark.readStream.schema(schemas[kind]).parquet(str(base / "input" / kind)) for kind in KINDS
    }


def _job(spark: SparkSession, base: Path) -> None:
    job = spark_abs.Job("nexmark", root=str(base / "root"), spark=spark, interval="1s")
    there = {kind: job.source(kind, frame) for kind, frame in _sources(spark, base).items()}
    for name, step in STEPS.items():
        there[name] = job.stage(name, [there[one] for one in step.inputs], step.of)
        if step.last:
            job.sink(name, there[name], table=str(base / name))
    job.start(available_now=True).await_termination()


def _plain(spark: SparkSession, base: Path) -> None:
    spark.conf.set("spark.sql.streaming.pollingDelay", DEFAULT_POLLING_DELAY)
    frames, queries = _sources(spark, base), []

    def start(name: str, frame: DataFrame) -> DataFrame:
        table = str(base / name)
        spark.createDataFrame([], frame.schema).write.format("delta").save(table)
        writer = frame.writeStream.format("delta").option("checkpointLocation", str(base / f"c-{name}"))
        queries.append(writer.start(table))
        return spark.readStream.format("delta").load(table)

    there = {kind: start(kind, frame) for kind, frame in frames.items()}
    for name, step in STEPS.items():
        there[name] = start(name, step.of(*(there[one] for one in step.inputs)))
    expected = _expected(base)
    wait(lambda: all(_rows(base, name) >= rows for name, rows in expected.items()))
    for query in queries:
        query.stop()


_RUN: Mapping[str, Callable[[SparkSession, Path], None]] = {"job": _job, "plain": _plain}


def _rows(base: Path, name: str) -> int:
    return DeltaTable(str(base / name)).count()


def _expected(base: Path) -> Mapping[str, int]:
    """Return the rows of the last tables, as the parent has counted them."""
    lines = (base / "expected").read_text().splitlines()
    return {name: int(rows) for name, rows in (line.split() for line in lines)}


def _count(directory: Path) -> Mapping[str, int]:
    """Count the rows of the last tables with pandas."""
    tables = {kind: pq.read_table(directory / kind).to_pandas() for kind in KINDS}
    auction, bid = tables["auction"], tables["bid"]
    chosen = auction[auction["category"] == CATEGORY]
    expected = {query.name: query.expected for query in QUERIES}
    return {
        "euros": len(expected["q1"](tables)),
        "some": int((bid["auction"] % 123 == 0).sum()),
        "offered": len(bid.merge(chosen, left_on="auction", right_on="id")),
        "sellers": len(expected["q3"](tables)),
        "new_users": len(expected["q8"](tables)),
    }


def figures(base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run both in turns, each in a process and from nothing; the first turn is not counted."""
    source = base / "input"
    for kind in KINDS:
        nexmark_events.write(source / kind, kind, files=1, events=EVENTS, hot=0.0)
    expected = _count(source)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-1, runs):
        for way in WAYS:
            place = base / f"{way}-{turn}"
            shutil.copytree(source, place / "input")
            (place / "expected").write_text("".join(f"{name} {rows}\n" for name, rows in expected.items()))
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "bench.whole_process", way, str(place)], check=True)
            seconds = time.monotonic() - began
            there = {name: _rows(place, name) for name in expected}
            assert there == expected, f"{way}: {there} in place of {expected}"
            shutil.rmtree(place)
            console.print(f"nine stages of Nexmark, {way}: {seconds:.1f} s")
            if turn >= 0:
                took[way].append(seconds)
    for way in WAYS:
        yield figure(f"nexmark_9_stages_{way}_seconds", took[way], "s")
    yield figure("nexmark_9_stages_vs_plain", ratios(took["job"], took["plain"]))


if __name__ == "__main__":
    _RUN[sys.argv[1]](session(), Path(sys.argv[2]))
