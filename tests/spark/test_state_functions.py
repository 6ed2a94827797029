"""Stateful functions on real Spark: beside applyInPandasWithState, and through a job that goes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

import spark_abs
from spark_abs.errors import GraphError, UsageError
from spark_abs.runtime.job import Job
from tests.job_support import Feed

STATE = "total long, last long"
OUT = "k string, d double, total long, timed_out boolean"


def step(
    key: tuple[Any, ...], values: list[tuple[int, int]], state: Any
) -> Iterator[tuple[str, float, int, bool]]:
    """What both engines run: values are (v, seconds)."""
    if state.hasTimedOut:
        yield key[0], key[1], state.get[0] if state.exists else -1, True
        state.remove()
        return
    total, last = state.get if state.exists else (0, 0)
    total, last = total + sum(v for v, _ in values), max([last, *(s for _, s in values)])
    yield key[0], key[1], total, False
    if total % 7 == 3:
        state.remove()
    else:
        state.update((total, last))
    if total % 4:
        state.setTimeoutTimestamp(max(last * 1000 + 5_000, state.getCurrentWatermarkMs()))


def seconds(stamp: Any) -> int:
    return int(stamp.replace(tzinfo=UTC).timestamp()) if stamp.tzinfo is None else int(stamp.timestamp())


def per_key(key: tuple[Any, ...], rows: Iterator[Row], state: Any) -> Iterator[tuple[Any, ...]]:
    return step(key, [(row.v, round(row.ts.timestamp())) for row in rows], state)


def in_pandas(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    values = [(v, seconds(ts)) for frame in frames for v, ts in zip(frame["v"], frame["ts"], strict=True)]
    rows = list(step(key, [] if state.hasTimedOut else values, state))
    yield pd.DataFrame(rows, columns=["k", "d", "total", "timed_out"])


def drained(frame: DataFrame, checkpoint: Path) -> tuple[dict[int, Counter[tuple[Any, ...]]], int]:
    """Run a query over all its files; return its output by batch, and the rows it dropped as late."""
    out: dict[int, Counter[tuple[Any, ...]]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        rows = Counter((r.k, r.d, r.total, r.timed_out) for r in batch.collect())
        if rows:
            out[number] = rows

    writer = frame.writeStream.outputMode("append").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).foreachBatch(keep).start()
    query.awaitTermination()
    progress = query.recentProgress
    return out, sum(op["numRowsDroppedByWatermark"] for p in progress for op in p["stateOperators"])


def test_it_gives_what_apply_in_pandas_with_state_gives_batch_by_batch(
    spark: SparkSession, tmp_path: Path
) -> None:
    chance = random.Random(7)
    feed = Feed(spark, tmp_path / "in", "k string, d double, v long, ts long")
    for file in range(14):
        rows = [
            {
                "k": chance.choice([None, "a", "b", "c", "d"]),
                "d": chance.choice([0.0, 1.5]),
                "v": chance.randrange(20),
                "ts": file * 4 + chance.randrange(-14, 4),
            }
            for _ in range(12)
        ]
        feed.write(*[{k: v for k, v in row.items() if v is not None} for row in rows])
    frame = feed.stream().withWatermark("ts", "5 seconds").select("k", "d", "v", "ts")
    theirs = frame.groupBy("k", "d").applyInPandasWithState(
        in_pandas, OUT, STATE, "append", GroupStateTimeout.EventTimeTimeout
    )
    from spark_abs.state.declared import Declared, gathering

    with gathering(Declared("both")) as declared:
        ours = spark_abs.flat_map_groups_with_state(
            frame, ["k", "d"], per_key, STATE, OUT, timeout="event-time", key_groups=3
        )
    want, dropped = drained(theirs, tmp_path / "theirs")
    have, _ = drained(ours, tmp_path / "ours")
    assert sum(sum(rows.values()) for rows in want.values()) > 60
    assert any(row[3] for rows in want.values() for row in rows)
    assert dropped > 5
    assert have == want
    assert declared.dropped() == dropped


def highest(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> Row:
    assert state.getCurrentProcessingTimeMs() > 1_700_000_000_000
    seen = [row.total for row in rows]
    if -1 in seen:
        raise ZeroDivisionError("poison")
    top = max([*seen, *(state.get[0] if state.exists else [])])
    state.update(([top], {"calls": 1}))
    return Row(k=key[0], top=top)


def test_functions_that_cannot_be_are_refused_before_anything_starts(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed = Feed(spark, tmp_path / "in", "k long, v long")
    frame = feed.stream()

    def make(key: Any = "k", state: str = "n long", **options: Any) -> DataFrame:
        return spark_abs.map_groups_with_state(frame, key, highest, state, "k long, top long", **options)

    with pytest.raises(UsageError, match="the number of key groups is 0"):
        make(key_groups=0)
    with pytest.raises(UsageError, match="no one key column 'nope'"):
        make(key="nope")
    with pytest.raises(UsageError, match="needs withWatermark before"):
        make(timeout="event-time")
    with pytest.raises(UsageError, match="'soon' is not one of none, processing-time, event-time"):
        make(timeout="soon")
    with pytest.raises(UsageError, match="ttl 'x'"):
        make(ttl="x")
    job = Job("twice", root=str(tmp_path / "root"), spark=spark)
    numbers = job.source("numbers", frame)
    job.stage(
        "two",
        [numbers],
        lambda rows: make_on(make_on(rows).withColumn("v", F.lit(1))),
    )
    with pytest.raises(GraphError, match="stage 'two': two stateful functions have the uid 'state'"):
        job.start()
    other = Job("hdfs", root=str(tmp_path / "other"), spark=spark)
    other.stage("one", [other.source("numbers", frame)], make_on, state_provider="hdfs")
    with pytest.raises(GraphError, match="stage 'one': stateful functions keep their state in RocksDB"):
        other.start()


def make_on(frame: DataFrame) -> DataFrame:
    return spark_abs.map_groups_with_state(frame, "k", highest, "n long", "k long, top long")
