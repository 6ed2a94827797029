"""Stateful functions in Python: how fast they are beside Spark's own, and what much state costs them.

Plain queries from files into nothing, one file a batch, the same rows for all; RocksDB with changelogs. What
is timed is the batch itself, in Spark's own words `addBatch`: planning and logs are the same for all.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState as SparkGroupState
from pyspark.sql.streaming.state import GroupStateTimeout
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

Variant = Callable[["DataFrame"], "DataFrame"]

_ROWS = "k long, v long"
_SUM, _OUT = "total long, count long", "k long, total long"
_WARM_UP, _BATCHES = 2, 4
_ONE = (1, 1)
"""Batches that warm up and that count where one takes minutes."""
_KEPT, _TOUCHED, _TOUCHES = (500_000, 5_000_000), 50_000, 50
_KEY_BYTES = 8 + 16


def native(rows: DataFrame) -> DataFrame:
    """Aggregate with Spark's own operator."""
    return rows.groupBy("k").agg(F.sum("v").alias("total"), F.count("v").alias("count"))


def in_pandas(rows: DataFrame) -> DataFrame:
    """Aggregate with applyInPandasWithState."""

    def add(
        key: tuple[int], frames: Iterator[pd.DataFrame], state: SparkGroupState
    ) -> Iterator[pd.DataFrame]:
        total, count = state.get if state.exists else (0, 0)
        for frame in frames:
            total, count = total + int(frame["v"].sum()), count + len(frame)
        state.update((total, count))
        yield pd.DataFrame({"k": [key[0]], "total": [total]})

    return rows.groupBy("k").applyInPandasWithState(add, _OUT, _SUM, "update", GroupStateTimeout.NoTimeout)


def per_key(rows: DataFrame) -> DataFrame:
    """Aggregate with a function of ours that is called for each key."""

    def add(key: tuple[int, ...], mine: Iterator[Row], state: spark_abs.GroupState) -> tuple[int, int]:
        total, count = state.get if state.exists else (0, 0)
        for row in mine:
            total, count = total + row.v, count + 1
        state.update((total, count))
        return key[0], total

    return spark_abs.map_groups_with_state(rows, "k", add, _SUM, _OUT, output_mode="update")


def vectorised(rows: DataFrame) -> DataFrame:
    """Aggregate with a function of ours over Arrow tables."""

    def add(mine: pa.Table, states: pa.Table, _: spark_abs.GroupBatch) -> tuple[pa.Table, pa.Table]:
        ones = pa.array(np.ones(mine.num_rows, np.int64))
        both = pa.concat_tables([pa.table([mine["k"], mine["v"], ones], schema=states.schema), states])
        new = both.group_by("k").aggregate([("total", "sum"), ("count", "sum")])
        new = new.rename_columns(states.column_names)
        return new, new.select(["k", "total"])

    return spark_abs.map_batches_with_state(rows, "k", add, _SUM, _OUT, output_mode="update")


def write(place: Path, number: int, keys: Any) -> None:
    """Write a file of rows, seen whole or not at all."""
    place.mkdir(parents=True, exist_ok=True)
    hidden = place / f".{number}"
    pq.write_table(pa.table({"k": keys, "v": keys}), hidden)
    hidden.rename(place / f"{number:06}.parquet")


def run(spark: SparkSession, base: Path, variant: Variant) -> list[float]:
    """Run a query over all its files; return how long each batch took, in milliseconds."""
    rows = spark.readStream.schema(_ROWS).option("maxFilesPerTrigger", 1).parquet(str(base / "input"))
    writer = variant(rows).writeStream.outputMode("update").format("noop")
    query = writer.option("checkpointLocation", str(base / "query")).trigger(availableNow=True).start()
    query.awaitTermination()
    return [float(p["durationMs"]["addBatch"]) for p in query.recentProgress if p["numInputRows"]]


def rates(
    spark: SparkSession, base: Path, keys: int, variants: list[Variant], batches: tuple[int, int]
) -> list[float]:
    """Return keys per second of each variant, one after the other: every key twice in each batch."""
    warm_up, counted = batches
    for number in range(warm_up + counted):
        write(base / "input", number, np.arange(2 * keys) % keys)
    found = []
    for variant in variants:
        found.append(1000 * keys / statistics.median(run(spark, base, variant)[warm_up:]))
        shutil.rmtree(base / "query")
    shutil.rmtree(base)
    return found


def touching(spark: SparkSession, base: Path, kept: int, touched: int) -> tuple[float, float]:
    """Touch keys at random beside many that are kept: return (batch time, bytes written per byte touched)."""
    load = 10
    for number in range(load):
        write(base / "input", number, np.arange(kept * number // load, kept * (number + 1) // load))
    run(spark, base, vectorised)
    changed = changelogs(base)
    for number in range(_TOUCHES):
        write(base / "input", load + number, np.random.default_rng(number).choice(kept, touched, False))
    took = run(spark, base, vectorised)
    written = sum(size for name, size in changelogs(base).items() if name not in changed)
    shutil.rmtree(base)
    return statistics.median(took[_WARM_UP:]), written / (_TOUCHES * touched * _KEY_BYTES)


def changelogs(base: Path) -> dict[str, int]:
    """Return the changelogs of a query's state, which hold what its batches wrote, and their sizes."""
    return {str(path): path.stat().st_size for path in (base / "query" / "state").rglob("*.changelog")}


def figures(spark: SparkSession, base: Path, runs: int, divide: int, console: Console) -> Iterator[Figure]:
    """Compare; `divide` makes everything that much smaller, to try it out."""
    found: dict[str, list[float]] = {}
    plans: list[tuple[int, list[Variant], tuple[int, int]]] = [
        (20_000, [in_pandas, vectorised, per_key], (_WARM_UP, _BATCHES)),
        (200_000, [in_pandas, vectorised], _ONE),
        (500_000, [native, vectorised], (_WARM_UP, _BATCHES)),
    ]
    for turn in range(runs):
        for keys, variants, batches in plans:
            got = rates(spark, base / "rates", keys // divide, variants, batches)
            for variant, rate in zip(variants, got, strict=True):
                name = f"{variant.__name__}_{keys // 1000}k"
                console.print(f"{name}: {rate:,.0f} keys/s")
                found.setdefault(name, []).append(rate)
        for kept in _KEPT:
            took, written = touching(spark, base / f"kept-{turn}", kept // divide, _TOUCHED // divide)
            console.print(f"{kept:,} keys kept: {took:.0f} ms a batch, {written:.2f} bytes for each touched")
            found.setdefault(f"time_{kept}", []).append(took)
            found.setdefault(f"written_{kept}", []).append(written)
    yield figure("vectorised_keys_500k", found["vectorised_500k"], "keys/s")
    for ours, theirs, size in (
        ("vectorised", "in_pandas", "20k"),
        ("vectorised", "in_pandas", "200k"),
        ("per_key", "in_pandas", "20k"),
    ):
        name = f"{ours}_vs_apply_in_pandas_{size}"
        yield figure(name, ratios(found[f"{ours}_{size}"], found[f"{theirs}_{size}"]))
    yield figure("vectorised_vs_native_agg_500k", ratios(found["vectorised_500k"], found["native_500k"]))
    small, large = _KEPT
    yield figure("batch_time_5m_vs_500k_keys", ratios(found[f"time_{large}"], found[f"time_{small}"]))
    yield figure("state_bytes_written_per_touched", found[f"written_{large}"])
