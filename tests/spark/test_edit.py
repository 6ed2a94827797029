"""Edited savepoints on real Spark: corrected, removed, keyed anew, filled from history, and gone on from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import Refused, UsageError
from spark_abs.job import Job
from spark_abs.manifests.find import lookup
from spark_abs.store.root import Root
from tests.job_support import EPOCH, Feed, manifests, read_table
from tests.spark.conftest import Start

OUT = "key string, total long, gone boolean"
LATER = (EPOCH + 10_000_000) * 1000


def add(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> Iterator[tuple[Any, ...]]:
    """Sum up; what a timeout lets go says so."""
    total = state.get[0] if state.exists else 0
    if state.hasTimedOut:
        yield str(key), total, True
        state.remove()
        return
    total += sum(row.v for row in rows)
    state.update((total,))
    state.setTimeoutTimestamp(LATER)
    yield str(key), total, False


def test_a_job_goes_on_from_what_was_edited(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    root, feed = str(tmp_path / "root"), Feed(spark, tmp_path / "in")

    def sums(rows: DataFrame, key: list[str], groups: int) -> DataFrame:
        marked = rows.withColumn("odd", F.col("id") % 2).withWatermark("ts", "1 second")
        return spark_abs.flat_map_groups_with_state(
            marked, key, add, "total long", OUT, uid="sums", timeout="event-time", key_groups=groups
        )

    def windows(rows: DataFrame) -> DataFrame:
        grouped = rows.withWatermark("ts", "1 hour").groupBy(F.window("ts", "10 seconds"), "k")
        return grouped.agg(F.sum("v").alias("n")).selectExpr("window.end AS until", "n")

    def out() -> Counter[tuple[str, int, bool]]:
        rows = read_table(tmp_path / "sums").to_pylist() if (tmp_path / "sums").exists() else []
        return Counter((r["key"], r["total"], r["gone"]) for r in rows)

    def run(key: list[str], groups: int) -> dict[str, tuple[int, bool]]:
        """Run to the end of what was fed; return what came out, a row for each key."""
        before = out()
        job = Job("edited", root=root, spark=spark, interval="1h")
        numbers = job.source("numbers", feed.stream())
        for name, function in (("sums", lambda rows: sums(rows, key, groups)), ("windows", windows)):
            job.sink(name, job.stage(name, [numbers], function), table=str(tmp_path / name))
        assert start(job, available_now=True).await_termination(240)
        return {key: (total, gone) for key, total, gone in out() - before}

    def state(stage: str, at: str | int) -> list[Row]:
        return spark_abs.open(root, spark).state(stage, at).collect()

    def totals(at: str | int) -> dict[tuple[Any, ...], tuple[int, int | None]]:
        return {tuple(r.key): (r.value.total, r.timeout_ms) for r in state("sums", at)}

    for file in range(2):
        feed.write(*[{"id": n, "k": n, "v": 10 * n + file, "ts": file * 3 + n} for n in range(4)])
    run(["k"], 3)
    first = int(manifests(root)[-1].id)
    before = {(n,): (20 * n + 1, LATER) for n in range(4)}
    assert totals(first) == before

    # Key 0 is corrected, key 1 removed, key 7 added with a timeout that is due soon; the windows are emptied.
    edit = spark_abs.open(root, spark).edit(first)
    with pytest.raises(UsageError, match="column 'value' is struct<total:string>"):
        edit.correct("sums", edit.state("sums").withColumn("value", F.struct(F.lit("x").alias("total"))))
    with pytest.raises(UsageError, match="is Spark's own"):
        edit.replace("windows", edit.state("windows"))
    due = (EPOCH + 8) * 1000
    rows = [((0,), (1000,), LATER, None), ((1,), None, None, None), ((7,), (70,), due, None)]
    schema = "key struct<k: long>, value struct<total: long>, timeout_ms long, expires_ms long"
    twice = spark.createDataFrame([*rows, rows[0]], schema)
    with pytest.raises(UsageError, match=r"key \(0,\) has 2 rows"):
        edit.correct("sums", twice)
    with pytest.raises(UsageError, match="number of key groups must be 1 to 32768, found 0"):
        edit.rekey("sums", edit.state("sums"), key_groups=0)
    nobody = spark.createDataFrame([(None, (1,), None, None)] * 2, schema)
    with pytest.raises(UsageError, match="a row of state has no key"):
        edit.correct("sums", nobody)
    with pytest.raises(UsageError, match=r"key \(1,\) has neither a value nor a timeout"):
        spark_abs.open(root, spark).edit(first).replace("sums", spark.createDataFrame(rows, schema)).write(
            "no"
        )
    some = spark.createDataFrame(rows[:2], schema).drop("timeout_ms", "expires_ms")
    edit.correct("sums", some)  # key 0 keeps its timeout
    edit.correct("sums", spark.createDataFrame(rows[2:], schema))  # adds to the first
    written = edit.remove("windows").write("corrected")
    expected = {**before, (0,): (1000, LATER), (7,): (70, due)}
    del expected[1,]
    assert totals("corrected") == expected
    assert (totals(first), len(state("windows", first))) == (before, 4)
    assert state("windows", "corrected") == []
    assert (lookup(Root(root), "latest").manifest.id, written) == (first, manifests(root)[-1].id)

    spark_abs.open(root, spark).restore("corrected")
    feed.write({"id": 0, "k": 0, "v": 5, "ts": 20}, {"id": 1, "k": 1, "v": 5, "ts": 20})
    feed.write({"id": 2, "k": 2, "v": 5, "ts": 21})
    assert run(["k"], 3) == {
        "(0,)": (1005, False),
        "(1,)": (5, False),
        "(2,)": (46, False),
        "(7,)": (70, True),
    }
    assert sorted(r.value["sum"] for r in state("windows", "latest")) == [5, 5, 5]

    # From history, by other keys and in other groups: the function is declared so from then on.
    history = (
        feed.batch().withColumn("odd", F.col("id") % 2).groupBy("k", "odd").agg(F.sum("v").alias("total"))
    )
    rows_of = history.select(F.struct("k", "odd").alias("key"), F.struct("total").alias("value"))
    spark_abs.open(root, spark).edit("latest").rekey("sums", rows_of, key_groups=5).write("by-parity")
    with pytest.raises(
        UsageError, match=r"differs: struct<key:struct<k:bigint>,.* at checkpoint 1, and struct<key:"
    ):
        spark_abs.open(root, spark).state("sums", "by-parity", diff=first)
    spark_abs.open(root, spark).restore("by-parity")
    with pytest.raises(Refused, match="the state has 5 key groups, 3 are declared"):
        run(["k"], 3)
    feed.write({"id": 2, "k": 2, "v": 100, "ts": 22})
    assert run(["k", "odd"], 5)["(2, 0)"] == (146, False)
    want = feed.batch().withColumn("odd", F.col("id") % 2).groupBy("k", "odd").agg(F.sum("v").alias("t"))
    assert {k: v[0] for k, v in totals("latest").items()} == {(r.k, r.odd): r.t for r in want.collect()}

    # Emptied: it reads on from where it was, and may be declared anew in any form.
    spark_abs.open(root, spark).edit("latest").remove("sums").write("emptied")
    with pytest.raises(
        UsageError, match="the state of the function of stage 'sums', operator 0, was removed"
    ):
        state("sums", "emptied")
    spark_abs.open(root, spark).restore("emptied")
    feed.write({"id": 2, "k": 2, "v": 7, "ts": 23}, {"id": 9, "k": 9, "v": 8, "ts": 23})
    assert run(["odd"], 2) == {"(0,)": (7, False), "(1,)": (8, False)}
    assert {k: v[0] for k, v in totals("latest").items()} == {(0,): 7, (1,): 8}


KEY_OF_K = {
    "name": "if(k = 0, null, concat('k', k))",
    "share": "CASE k WHEN 0 THEN double('NaN') WHEN 1 THEN -0.0D WHEN 2 THEN null ELSE k / 2D END",
    "price": "CASE WHEN k <> 3 THEN cast(k - 1.25 AS decimal(12, 2)) END",
    "day": "date_add(DATE'1969-12-30', cast(k AS int))",
    "at": "timestamp_millis(k * 1000 - 1)",
    "even": "k % 2 = 0",
    "raw": "cast(repeat('x', cast(k AS int)) AS binary)",
}
"""One key for each k, in columns of every kind: null, NaN, -0.0, empty and before 1970 among them."""
KEPT = (
    "total long, seen array<long>, by map<string, double>, last struct<v: long, price: decimal(12, 2)>, "
    "none string"
)


def keep(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> Iterator[tuple[Any, ...]]:
    """Keep a sum, and values of every shape."""
    total, seen, by, last, none = state.get if state.exists else (0, [], {}, None, None)
    for row in rows:
        total, seen, k = total + row.v, [*seen, row.v], row.k
        by, last = {**by, str(row.v): math.nan if row.v % 2 else row.v / 4}, (row.v, key[2])
    state.update((total, seen, by, last, none))
    yield k, total, seen, len(by)


def test_keys_and_values_of_every_type_are_edited(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    root, feed = str(tmp_path / "root"), Feed(spark, tmp_path / "in")

    def kept(rows: DataFrame) -> DataFrame:
        keyed = rows.selectExpr("*", *(f"{what} AS {name}" for name, what in KEY_OF_K.items()))
        return spark_abs.flat_map_groups_with_state(
            keyed, list(KEY_OF_K), keep, KEPT, "k long, total long, seen array<long>, n int", uid="kept"
        )

    def run() -> None:
        job = Job("types", root=root, spark=spark, interval="1h")
        job.sink("out", job.stage("kept", [job.source("rows", feed.stream())], kept), table=f"{root}/out")
        assert start(job, available_now=True).await_termination(240)

    def newest() -> dict[int, tuple[int, list[int], int]]:
        rows = [r for r in read_table(Path(root) / "out").to_pylist() if r["seen"][-1] % 10 == 7]
        return {r["k"]: (r["total"], r["seen"], r["n"]) for r in rows}

    def state(at: str | int) -> list[str]:
        return sorted(map(repr, spark_abs.open(root, spark).state("kept", at).collect()))

    for file in range(2):
        feed.write(*({"id": k, "k": k, "v": 10 * k + file, "ts": 0} for k in range(5)))
    run()
    before = state("latest")
    assert len(before) == 5

    edit = spark_abs.open(root, spark).edit("latest")
    edit.replace("kept", edit.state("kept")).write("same")
    assert state("same") == before

    # The key of null and NaN is corrected, that with a null price removed; the rest stays.
    edit = spark_abs.open(root, spark).edit("same")
    chosen = edit.state("kept").where("key.name IS NULL OR key.price IS NULL")
    to_1000 = F.when(F.col("key.name").isNull(), F.col("value").withField("total", F.lit(1000).cast("long")))
    edit.correct("kept", chosen.withColumn("value", to_1000).select("key", "value")).write("corrected")
    after = state("corrected")
    assert len(after) == 4
    (changed,) = (row for row in after if row not in before)
    assert changed.replace("total=1000", "total=1") in before

    spark_abs.open(root, spark).restore("corrected")
    feed.write(*({"id": k, "k": k, "v": 10 * k + 7, "ts": 0} for k in range(5)))
    run()
    want = {k: (30 * k + 8, [10 * k, 10 * k + 1, 10 * k + 7], 3) for k in range(5)}
    assert newest() == {**want, 0: (1007, [0, 1, 7], 3), 3: (37, [37], 1)}
