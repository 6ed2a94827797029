"""A function's state lives on through poisoned input and changes of form; a failed batch leaves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import spark_abs
from spark_abs.errors import Refused, StageFailed, UsageError
from spark_abs.job import Job
from spark_abs.manifest import StateFunction
from tests.job_support import Feed, eventually, manifests, read_table
from tests.spark.conftest import Start

RAISES, MISSHAPEN, HUGE = -1, -2, -3
"""Values of rows on which the function does something wrong, where it is not mended; they add nothing."""


@dataclass(frozen=True)
class Form:
    """The function in one release: the names of its state's fields, and on which value it goes wrong."""

    fields: tuple[str, ...]
    schema: str
    options: dict[str, Any] = field(default_factory=dict)
    poison: int = 0

    def __call__(
        self, key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
    ) -> tuple[Any, ...]:
        old = dict(zip(self.fields, state.get, strict=True)) if state.exists else {}
        values = [row.v for row in rows]
        total = (old.get("total") or old.get("sum") or 0) + sum(v for v in values if v > 0)
        note = old.get("note", "new") if "note" in self.fields else None
        if RAISES in values and self.poison == RAISES:
            raise ZeroDivisionError("poison")
        if HUGE in values and self.poison == HUGE:
            note = "x" * 2_000_000
        new = {"total": total, "sum": total, "hits": 1, "note": note}
        state.update(tuple(new[name] for name in self.fields))
        if MISSHAPEN in values and self.poison == MISSHAPEN:
            return key[0], "not a number", note
        return key[0], total, note


FIRST = Form(("total", "hits"), "total int, hits int")
SECOND = Form(
    ("sum", "hits", "note"),
    "sum long, hits int, note string",
    options={"renamed": {"sum": "total"}, "defaults": {"note": "old"}},
)
THIRD = Form(("note", "sum"), "note string, sum long", options={"dropped": "hits"})
NARROW = Form(("note", "sum"), "note string, sum int", options={"dropped": "hits"})


class Sums:
    """numbers -> sums, one file a batch."""

    def __init__(self, spark: SparkSession, tmp: Path) -> None:
        self.spark, self.root, self.table = spark, str(tmp / "root"), str(tmp / "sums")
        self.feed = Feed(spark, tmp / "in", "k long, v long")

    def job(self, form: Form) -> Job:
        one_file: dict[str, Any] = {"interval": "1h", "max_entries_per_batch": 1, "max_group_bytes": "1mb"}
        job = Job("sums", root=self.root, spark=self.spark, **one_file)

        def sums(frame: DataFrame) -> DataFrame:
            return spark_abs.map_groups_with_state(
                frame, "k", form, form.schema, "k long, total long, note string", key_groups=3, **form.options
            )

        stage = job.stage("sums", [job.source("numbers", self.feed.stream())], sums)
        job.sink("sums", stage, table=self.table)
        return job

    def write(self, *keys: int) -> None:
        self.feed.write(*({"k": k, "v": len(self.feed.files) + 1} for k in keys))

    def expected(self, files: int) -> Counter[tuple[int, int]]:
        sums: Counter[int] = Counter()
        out: Counter[tuple[int, int]] = Counter()
        for rows in self.feed.files[:files]:
            for row in rows:
                sums[cast("int", row["k"])] += max(0, cast("int", row["v"]))
            out.update((cast("int", row["k"]), sums[cast("int", row["k"])]) for row in rows)
        return out

    def has(self, files: int) -> bool:
        try:
            found = read_table(self.table)
        except FileNotFoundError:
            return False
        return Counter(zip(*(found[c].to_pylist() for c in ("k", "total")), strict=True)) == self.expected(
            files
        )

    def notes(self, at_least: int) -> dict[int, str]:
        """Return the note of each key in its rows with so high a total."""
        rows = read_table(self.table).to_pylist()
        return {row["k"]: row["note"] for row in rows if row["total"] >= at_least}


def test_poisoned_batches_leave_nothing_and_the_state_goes_on_in_other_forms(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    line = Sums(spark, tmp_path)

    def runs_into(form: Form, value: int, said: str) -> None:
        """Let the job take one good file, then a poisoned one for key 3; it ends, with the good one only."""
        line.write(*range(6))
        line.feed.write({"k": 2, "v": 1}, {"k": 3, "v": value})
        good = len(line.feed.files) - 1
        run = start(line.job(replace(form, poison=value)))
        with pytest.raises(StageFailed, match=said):
            run.await_termination(120)
        assert line.has(good), value

    runs_into(
        FIRST, RAISES, r"stage 'sums', function 'state', key \(3,\), batch \d+: ZeroDivisionError: poison"
    )
    run = start(line.job(FIRST))
    eventually(run, lambda: line.has(2), "the mended function takes the same batch")
    run.stop(savepoint="first")

    runs_into(SECOND, MISSHAPEN, r"key \(3,\), batch \d+: its output does not fit its schema: .*'total'")
    runs_into(SECOND, HUGE, r"batch \d+: the state of key group \d .*maxGroupBytes is 1048576; keys .*3")
    line.write(7)
    run = start(line.job(SECOND))
    eventually(run, lambda: line.has(7), "all files are through in the second form")
    run.stop(savepoint="second")
    assert line.notes(5) == {**dict.fromkeys(range(6), "old"), 7: "new"}

    with pytest.raises(
        Refused, match=r"'sums': .* 'sum' changes from int64 to int32.*\n(.*\n)*.*sum: int64 +sum: int32"
    ):
        start(line.job(NARROW))
    with pytest.raises(Refused, match=r"field 'hits' is no longer(.*\n)+.* hits: int32 +-(.*\n)+.*dropped="):
        start(line.job(replace(THIRD, options={})))
    line.write(*range(8))
    run = start(line.job(THIRD))
    eventually(run, lambda: line.has(8), "the last file is through in the third form")
    run.stop(savepoint="third")
    assert line.notes(8) == {**dict.fromkeys(range(6), "old"), 6: "new", 7: "new"}

    forms = {m.name: f for m in manifests(line.root) for shape in m.graph for f in shape.functions}
    past = {name: (dict(f.renamed), f.dropped, len(f.older)) for name, f in forms.items()}
    assert past == {
        "first": ({}, (), 0),
        "second": ({"sum": ("total",)}, (), 1),
        "third": ({"sum": ("total",)}, ("hits",), 2),
    }
    assert isinstance(forms["third"], StateFunction)


@pytest.mark.long
def test_functions_of_one_stage_keep_their_own_state_whatever_becomes_of_the_others(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    root, table = str(tmp_path / "root"), tmp_path / "sums"
    feed = Feed(spark, tmp_path / "in", "k long, v long")

    def run(*uids: str, value: int, **fields: str) -> dict[str, int]:
        """Run over one more file with these functions, in this order; return what each has put out last."""
        feed.write({"k": 1, "v": value})
        job = Job("two", root=root, spark=spark, interval="1h")

        def both(frame: DataFrame) -> DataFrame:
            def one(uid: str) -> DataFrame:
                field = fields.get(uid, "total")
                form = Form((field, "hits"), f"{field} int, hits int")
                out = spark_abs.map_groups_with_state(
                    frame, "k", form, form.schema, "k long, total long, note string", uid=uid, key_groups=2
                )
                return out.selectExpr(f"'{uid}' AS uid", "total")

            first, *others = map(one, uids)
            return reduce(DataFrame.union, others, first)

        stage = job.stage("two", [job.source("numbers", feed.stream())], both)
        job.sink("sums", stage, table=str(table))
        assert start(job, available_now=True).await_termination(240)
        rows = read_table(table).to_pylist()
        return {uid: max(row["total"] for row in rows if row["uid"] == uid) for uid in uids}

    def total(uid: str, at: str | int = "latest") -> int:
        (row,) = spark_abs.open(root, spark).state("two", at, operator=uid).collect()
        return int(row.value[0])

    assert run("a", "b", value=1) == {"a": 1, "b": 1}
    with pytest.raises(Refused, match=r"'a', 'b' changed places.* with 'a', 'b', this plan has 'b', 'a'"):
        run("b", "a", value=2)
    with pytest.raises(Refused, match=r"function 'b' .*'total' is no longer.*renamed={'sum': 'total'}"):
        run("a", "b", value=3, b="sum")
    with pytest.raises(Refused, match="'c' is new, and a stage that has run"):
        run("a", "b", "c", value=4)

    edit = spark_abs.open(root, spark).edit("latest")
    sixty = edit.state("two", operator="b").selectExpr("key", "named_struct('total', 60, 'hits', 1) AS value")
    edit.correct("two", sixty, operator="b")
    edit.remove("two", operator="a").write("without-a")
    assert total("b", "without-a") == 60
    with pytest.raises(UsageError, match="operator 0, was removed by the edit"):
        spark_abs.open(root, spark).state("two", "without-a", operator=0)
    spark_abs.open(root, spark).restore("without-a")
    with pytest.raises(Refused, match=r"'b' changed places.* with \(none\), 'b', this plan has 'b', 'c'"):
        run("b", "c", value=5)
    assert run("c", "b", value=6) == {"c": 20, "b": 80}
    assert (total("c"), total("b")) == (20, 80)
