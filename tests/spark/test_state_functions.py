"""Stateful functions on real Spark: beside applyInPandasWithState, and through a job that goes back."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

import spark_abs
from spark_abs.errors import GraphError, Refused, StageFailed, UsageError
from spark_abs.job import Job
from spark_abs.spark.local_disk import local_disk_conf
from spark_abs.stages.queries import session_conf
from spark_abs.state.keys import group_of, hashes
from tests.job_support import Feed, eventually, manifests, read_table
from tests.spark.conftest import Start

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
    with session_conf(frame.sparkSession, local_disk_conf(frame.sparkSession)):
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


def totals(rows: pa.Table, states: pa.Table, _: spark_abs.GroupBatch) -> tuple[pa.Table, pa.Table]:
    both = pa.concat_tables([rows.select(["k", "v"]), states.rename_columns(["k", "v"])])
    new = both.group_by("k").aggregate([("v", "sum")]).rename_columns(["k", "total"])
    return new, new


def highest(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> Row:
    assert state.getCurrentProcessingTimeMs() > 1_700_000_000_000
    seen = [row.total for row in rows]
    if -1 in seen:
        raise ZeroDivisionError("poison")
    top = max([*seen, *(state.get[0] if state.exists else [])])
    state.update(([top], {"calls": 1}))
    return Row(k=key[0], top=top)


class Totals:
    """numbers -> totals (vectorised, two to a stage) -> highest (per key)."""

    def __init__(self, spark: SparkSession, tmp: Path) -> None:
        self.spark, self.tmp, self.root = spark, tmp, str(tmp / "root")
        self.feed = Feed(spark, tmp / "in", "k long, v long")

    def job(self, key_groups: int = 4, function: Callable[..., Any] = highest) -> Job:
        one_file: dict[str, Any] = {"interval": "1h", "max_entries_per_batch": 1}  # and so one batch
        job = Job("totals", root=self.root, spark=self.spark, **one_file)
        numbers = job.source("numbers", self.feed.stream())
        sums = job.stage(
            "totals",
            [numbers],
            lambda frame: spark_abs.map_batches_with_state(
                frame, "k", totals, "total long", "k long, total long", key_groups=key_groups
            ),
        )
        top = job.stage(
            "highest",
            [sums],
            lambda frame: spark_abs.map_groups_with_state(
                frame, ["k"], function, "tops array<long>, notes map<string, int>", "k long, top long"
            ),
        )
        job.sink("sums", sums, table=str(self.tmp / "sums"))
        job.sink("tops", top, table=str(self.tmp / "tops"))
        return job

    def write(self, files: int) -> None:
        for _ in range(files):
            at = len(self.feed.files)
            self.feed.write(*({"k": k, "v": at + 1} for k in range(at % 3, 40)))

    def expected(self, files: int) -> Counter[tuple[int, int]]:
        sums: Counter[int] = Counter()
        out: Counter[tuple[int, int]] = Counter()
        for rows in self.feed.files[:files]:
            for row in rows:
                sums[cast("int", row["k"])] += cast("int", row["v"])
            out.update((cast("int", row["k"]), sums[cast("int", row["k"])]) for row in rows)
        return out

    def sum_of(self, key: int) -> int:
        return max(n for k, n in self.expected(len(self.feed.files)) if k == key)

    def has(self, sink: str, column: str) -> Counter[tuple[int, int]]:
        try:
            table = read_table(self.tmp / sink)
        except FileNotFoundError:
            return Counter()
        return Counter(zip(table["k"].to_pylist(), table[column].to_pylist(), strict=True))


def test_a_job_goes_back_to_a_savepoint_and_its_functions_with_it(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    line = Totals(spark, tmp_path)
    run = start(line.job())
    line.write(3)
    eventually(run, lambda: line.has("tops", "top") == line.expected(3), "three files are through")
    run.savepoint("three")
    line.write(2)
    eventually(run, lambda: line.has("tops", "top") == line.expected(5), "five files are through")
    run.stop()
    (manifest,) = [m for m in manifests(line.root) if m.name == "three"]
    (function,) = next(s for s in manifest.graph if s.stage == "totals").functions
    assert (function.uid, function.key_groups, function.timeout) == ("state", 4, "none")
    assert (function.key, function.state) == (("k: int64",), ("total: int64",))
    spark_abs.open(line.root).restore(to="three")
    assert line.has("sums", "total") == line.expected(3)
    with pytest.raises(
        Refused, match=r"'totals': function 'state' .*: the state has 4 key groups, 8 are declared"
    ):
        start(line.job(key_groups=8))
    run = start(line.job())
    eventually(run, lambda: line.has("tops", "top") == line.expected(5), "the two files came again")
    line.feed.write({"k": 3, "v": -1 - line.sum_of(3)})
    with pytest.raises(StageFailed, match=r"'highest', function 'state', key \(3,\), batch \d+: Zero"):
        run.await_termination(120)
    assert line.has("tops", "top") == line.expected(5)


def test_functions_that_cannot_be_are_refused_before_anything_starts(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed = Feed(spark, tmp_path / "in", "k long, v long")
    frame = feed.stream()

    def make(key: Any = "k", state: str = "n long", **options: Any) -> DataFrame:
        return spark_abs.map_groups_with_state(frame, key, highest, state, "k long, top long", **options)

    with pytest.raises(UsageError, match="key groups must be 1 to 32768, found 0"):
        make(key_groups=0)
    with pytest.raises(UsageError, match="exactly one key column 'nope'"):
        make(key="nope")
    with pytest.raises(UsageError, match="needs a watermark: call withWatermark"):
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


Batches = dict[int, set[tuple[Any, ...]]]


def waiting(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> tuple[Any, ...]:
    """Count rows; a key that has been silent for a millisecond is let go."""
    if state.hasTimedOut:
        (n,) = state.get
        state.remove()
        return key[0], n, True
    n = (state.get[0] if state.exists else 0) + sum(1 for _ in rows)
    state.update((n,))
    state.setTimeoutDuration(1)
    return key[0], n, False


def counting(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> tuple[Any, ...]:
    n = (state.get[0] if state.exists else 0) + sum(1 for _ in rows)
    state.update((n,))
    return key[0], n, False


def test_silence_and_age_are_measured_in_the_time_of_batches(spark: SparkSession, tmp_path: Path) -> None:
    """Batches are further apart than a millisecond: what is to last so long is over in the next."""
    feed = Feed(spark, tmp_path / "in", "k string, v long")
    for keys in ("a", "bb", "b", "c"):
        feed.write(*({"k": k, "v": 1} for k in keys))

    def run(name: str, function: Callable[..., Any], last: tuple[int, str], **options: Any) -> Batches:
        """Run until a batch from a number on has a row of a key; return the rows of each batch."""
        out: Batches = {}
        done = threading.Event()

        def keep(batch: DataFrame, number: int) -> None:
            out[number] = {tuple(row) for row in batch.collect()}
            if number >= last[0] and any(row[0] == last[1] for row in out[number]):
                done.set()

        schema = "k string, n long, timed_out boolean"
        frame = spark_abs.map_groups_with_state(
            feed.stream(), "k", function, "n long", schema, key_groups=2, **options
        )
        writer = frame.writeStream.option("checkpointLocation", str(tmp_path / name)).foreachBatch(keep)
        query = writer.start()
        assert done.wait(120)
        query.stop()
        return out

    silent = run("silent", waiting, (4, "c"), timeout="processing-time")
    assert [silent.pop(n) for n in range(4)] == [
        {("a", 1, False)},
        {("b", 2, False), ("a", 1, True)},
        {("b", 3, False)},
        {("c", 1, False), ("b", 3, True)},
    ]
    assert [row for rows in silent.values() for row in rows] == [("c", 1, True)]
    short = run("short", counting, (3, "c"), ttl="1ms")
    assert [short[n] for n in range(4)] == [
        {("a", 1, False)},
        {("b", 2, False)},
        {("b", 1, False)},
        {("c", 1, False)},
    ]
    assert run("long", counting, (3, "c"), ttl="1h")[2] == {("b", 3, False)}


def never_let_go(rows: pa.Table, states: pa.Table, batch: spark_abs.GroupBatch) -> tuple[pa.Table, pa.Table]:
    """Keep the newest time of each key, with a timeout ten seconds later: past, once a key has timed out."""
    ms = rows["ts"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    both = pa.concat_tables([pa.table({"k": rows["k"], "last": ms}), states])
    new = both.group_by("k").aggregate([("last", "max")]).rename_columns(["k", "last"])
    timed_out = pc.is_in(new["k"], batch.timed_out["k"].combine_chunks())
    out = pa.table({"k": new["k"], "timed_out": timed_out})
    return new.append_column("timeout_ms", pc.add(new["last"], 10_000)), out


def test_a_timeout_that_is_past_is_had_in_its_batch_or_when_the_watermark_has_moved_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    names, groups = list("abcdefgh"), 3
    numbers = group_of(hashes([pa.array(names)]), groups).tolist()
    (a, b, *_), (other, *_), (late, *_) = (
        [name for name, number in zip(names, numbers, strict=True) if number == group]
        for group in range(groups)
    )
    feed = Feed(spark, tmp_path / "in", "k string, ts long")
    feed.write({"k": a, "ts": 0}, {"k": b, "ts": 20})
    feed.write({"k": other, "ts": 25})
    feed.write({"k": other, "ts": 40})
    feed.write({"k": late, "ts": 28}, {"k": other, "ts": 41})
    frame = spark_abs.map_batches_with_state(
        feed.stream().withWatermark("ts", "0 seconds"), "k", never_let_go, "last long",
        "k string, timed_out boolean", timeout="event-time", key_groups=groups,
    )  # fmt: skip
    out: list[list[tuple[str, bool]]] = []

    def keep(batch: DataFrame, _: int) -> None:
        out.append(sorted(map(tuple, batch.collect())))

    writer = frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).foreachBatch(keep).start().awaitTermination()
    assert out == [
        sorted([(a, False), (b, False)]),
        sorted([(other, False), (a, True)]),
        sorted([(other, False), (a, True)]),
        sorted([(other, False), (late, False), (a, True), (b, True), (late, True)]),
        sorted([(a, True), (b, True), (late, True)]),
    ]
