"""State as data: what every kind of state holds at a checkpoint, against batch queries over what was read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.cli.main import main
from spark_abs.job import Job
from spark_abs.observe.state import changes
from tests.job_support import EPOCH, Feed, manifests
from tests.spark.conftest import Start

LATER = (EPOCH + 10_000_000) * 1000


def add(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> Iterator[tuple[Any, ...]]:
    """Keep the sum and the last value of each id; 99 removes the state and leaves a timeout."""
    total, last = state.get if state.exists else (0, {})
    values = {row.id: row.v for row in rows}
    total, last = total + sum(values.values()), {**last, **{str(i): v for i, v in values.items()}}
    if 99 in values.values():
        state.remove()
        state.setTimeoutTimestamp(LATER)
    else:
        state.update((total, last))
        if total % 2:
            state.setTimeoutTimestamp(LATER + total)
    yield key[0], total


def sums(rows: DataFrame) -> DataFrame:
    return spark_abs.flat_map_groups_with_state(
        rows.withWatermark("ts", "1 hour"), "k", add, "total long, last map<string, long>",
        "k long, total long", uid="sums", timeout="event-time", key_groups=3,
    )  # fmt: skip


def windows(rows: DataFrame) -> DataFrame:
    grouped = rows.withWatermark("ts", "1 hour").groupBy(F.window("ts", "10 seconds"), "k")
    return grouped.agg(F.sum("v").alias("n")).selectExpr("window.end AS until", "k", "n")


def pairs(rows: DataFrame) -> DataFrame:
    left = rows.selectExpr("id", "k", "ts AS lts").withWatermark("lts", "1 hour").alias("l")
    right = rows.where("v > 3").selectExpr("k", "ts AS rts").withWatermark("rts", "1 hour").alias("r")
    near = F.expr("l.k = r.k AND rts BETWEEN lts AND lts + INTERVAL 5 SECONDS")
    return left.join(right, near).select("l.id", "rts")


def test_every_kind_of_state_is_a_frame(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    root, feed = str(tmp_path / "root"), Feed(spark, tmp_path / "in")

    def run() -> int:
        job = Job("held", root=root, spark=spark, interval="1h")
        numbers = job.source("numbers", feed.stream())
        for name, function in (("sums", sums), ("windows", windows), ("pairs", pairs)):
            job.sink(f"{name}_out", job.stage(name, [numbers], function), table=str(tmp_path / name))
        assert start(job, available_now=True).await_termination(240)
        return int(manifests(root)[-1].id)

    feed.write(*[{"id": n, "k": n % 3, "v": n, "ts": n} for n in range(8)])
    feed.write({"id": 8, "k": 3, "v": 1, "ts": 9}, {"id": 9, "k": 4, "v": 99, "ts": 9})
    first = run()
    feed.write({"id": 10, "k": 0, "v": 4, "ts": 11}, {"id": 11, "k": 3, "v": 99, "ts": 12})
    feed.write({"id": 12, "k": 5, "v": 6, "ts": 13})
    second = run()

    def state(stage: str, at: int, **asked: Any) -> list[Row]:
        return spark_abs.open(root, spark).state(stage, at, **asked).collect()

    # A function: a row for each key; key 4 has a timeout alone, at last key 3 as well.
    def held(files: int) -> dict[int, tuple[Any, ...]]:
        read = feed.batch().where(f"file < {files}").groupBy("k").agg(
            F.sum("v").alias("total"), F.max("v").alias("most"), F.map_from_entries(
                F.collect_list(F.struct(F.col("id").cast("string"), "v"))).alias("last"))  # fmt: skip
        return {
            r.k: (None, LATER)
            if r.most == 99
            else ((r.total, r.last), LATER + r.total if r.total % 2 else None)
            for r in read.collect()
        }

    for at, files in ((first, 2), (second, 4)):
        found = {
            r.key.k: (None if r.value is None else (r.value.total, r.value["last"]), r.timeout_ms)
            for r in state("sums", at)
        }
        assert found == held(files)
    differing = {r.key.k: r for r in state("sums", second, operator="sums", diff=first)}
    assert {k: r.change for k, r in differing.items()} == {0: "changed", 3: "changed", 5: "added"}
    assert (differing[0].before.value.total, differing[0].after.value.total) == (9, 13)
    assert (differing[3].after.value, differing[5].before) == (None, None)

    # An aggregation, through Spark's own reader.
    want = (
        feed.batch().where("file < 4").groupBy(F.window("ts", "10 seconds"), "k").agg(F.sum("v").alias("n"))
    )
    have = {(r.key.window.start, r.key.k): r.value["sum"] for r in state("windows", second)}
    assert have == {(r.window.start, r.k): r.n for r in want.collect()}

    # A join: rows of a side repeat under one key, so whole rows come and go.
    assert len(state("pairs", second, store="left")) == 13
    gone = state("pairs", first, store="right", diff=second)
    assert [(r.change, r.key.asDict()) for r in gone].count(("removed", {"field0": 0})) == 1
    assert {r.change for r in gone} == {"removed"}
    assert len(gone) == 3

    command = ["state", root, "sums", "--checkpoint", str(second)]
    alone = [sys.executable, "-m", "spark_abs", *command, "--limit", "2", "--output", "json"]
    done = subprocess.run(alone, capture_output=True, text=True)  # a session that has run no query
    assert (done.returncode, done.stderr) == (0, "")  # rows and nothing else
    shown = json.loads(done.stdout)
    assert (shown["count"], len(shown["rows"]), shown["rows"][0].keys()) == (
        6, 2, {"key", "value", "timeout_ms", "expires_ms"},
    )  # fmt: skip
    text = CliRunner().invoke(main, [*command, "--diff", str(first)])
    assert text.stdout.split("\n")[0].split() == ["change", "key", "before", "after"], text.output
    exported = str(tmp_path / "exported")
    assert CliRunner().invoke(main, [*command, "--export", exported]).exit_code == 0
    assert DeltaTable(exported).to_pyarrow_table().num_rows == 6
    assert CliRunner().invoke(main, [*command, "--export", exported]).exit_code == 1


@pytest.mark.parametrize("identity", [["key"], []])
def test_rows_with_maps_nulls_and_nan_are_compared_by_what_they_hold(
    spark: SparkSession, identity: list[str]
) -> None:
    schema = "key struct<k: string, d: double>, value struct<m: map<string, array<map<int, int>>>>"
    same = [
        ((None, float("nan")), ({"a": [{1: 1, 2: 2}], "b": [{}]},)),
        (("x", 0.0), None),
        ((None, None), (None,)),
    ]
    other = [((None, float("nan")), ({"b": [{}], "a": [{2: 2, 1: 1}]},)), *same[1:]]
    before = spark.createDataFrame([*same, (("y", 1.0), ({"a": []},)), (("z", 1.0), None)], schema)
    after = spark.createDataFrame([*other, (("y", 1.0), ({"a": None},)), (("n", 1.0), None)], schema)
    found = sorted((r.change, r.key.k) for r in changes(before, after, identity).collect())
    alone = [("added", "n"), ("removed", "z")]
    assert found == sorted(
        [*alone, *([("changed", "y")] if identity else [("added", "y"), ("removed", "y")])]
    )
