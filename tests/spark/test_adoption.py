"""A job takes the place of a native query: its position, its state, and its table, with every row once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import GraphError, Refused
from spark_abs.job import Job
from spark_abs.store.failpoint import Failpoint, no_failpoint
from tests.job_support import Feed, manifests
from tests.spark.conftest import Start, killed_at

Frame = Callable[[DataFrame], DataFrame]


def as_it_is(rows: DataFrame) -> DataFrame:
    return rows


def without_repeats(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["id"])


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"))


@dataclass
class Native:
    """A native query over files, one a batch, that writes a Delta table."""

    spark: SparkSession
    base: Path
    frame: Frame = as_it_is
    mode: Any = "append"

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "in", "id long, k long")

    @property
    def checkpoint(self) -> Path:
        return self.base / "old"

    @property
    def table(self) -> Path:
        return self.base / "table"

    @property
    def root(self) -> str:
        return str(self.base / "root")

    def arrive(self, *ids: int) -> None:
        self.feed.write(*({"id": i, "k": i % 3} for i in ids))

    def run(self) -> None:
        writer = self.frame(self.feed.stream()).writeStream.format("delta").outputMode(self.mode)
        at = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
        at.start(str(self.table)).awaitTermination()

    def crash(self, newest: int, *, written: bool) -> None:
        """Let it be as after a kill in its newest batch: before the table had it, or before Spark knew."""
        for file in self.checkpoint.glob(f"commits/*{newest}*"):
            file.unlink()
        if not written:
            version = DeltaTable(str(self.table)).version()
            for file in (self.table / "_delta_log").glob(f"*{version:020}*"):
                file.unlink()

    def job(self, failpoint: Failpoint = no_failpoint, **said: Any) -> Job:
        job = Job("job", root=self.root, spark=self.spark, keep=20)
        job.failpoint = failpoint
        given = {"adopt": str(self.checkpoint), "output_mode": self.mode}
        existing = said.pop("existing", None)
        table = said.pop("table", str(self.table))
        source = job.source("numbers", self.frame(self.feed.stream()), **(given | said))
        job.sink("out", source, table=table, existing=existing)
        return job

    @property
    def ids(self) -> list[int]:
        return sorted(DeltaTable(str(self.table)).to_pyarrow_table()["id"].to_pylist())

    @property
    def sent(self) -> list[int]:
        return sorted(int(str(row["id"])) for rows in self.feed.files for row in rows)


@pytest.mark.parametrize("crashed", ["", "written", "planned"])
@pytest.mark.parametrize("plain", [True, False])
def test_every_row_is_there_once_wherever_the_query_was(
    spark: SparkSession,
    tmp_path: Path,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    crashed: str,
    plain: bool,
) -> None:
    """Ended, or killed with its newest batch planned, or in the table; the old query writes no more."""
    old = Native(spark, tmp_path)
    old.arrive(1, 2)
    old.arrive(3)
    if not plain:
        spark.sql(
            f"CREATE TABLE delta.`{old.table}` (id LONG, k LONG) USING delta "
            "TBLPROPERTIES (delta.enableChangeDataFeed = true)"
        )
    old.run()
    assert old.ids == [1, 2, 3]
    if crashed:
        old.crash(1, written=crashed == "written")
    old.arrive(4, 5)
    checked = old.job().check()
    assert checked.ok, str(checked)
    assert f"adopts {old.checkpoint}: query" in str(checked)
    assert "starts where its options say" not in str(checked)
    start(old.job(), available_now=True).await_termination()
    assert old.ids == old.sent
    assert old.job().check().ok
    old.arrive(6)
    old.run()  # started again by mistake
    assert old.ids == [1, 2, 3, 4, 5]
    said = f"stage 'numbers' has adopted {old.checkpoint}, and the adopted query has planned batch"
    assert said not in caplog.text
    start(old.job(), available_now=True).await_termination()
    assert old.ids == old.sent
    assert said in caplog.text


def test_state_comes_along_and_the_first_checkpoint_has_it(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Also after the old checkpoint is gone, and back to before and forth."""
    old = Native(spark, tmp_path, without_repeats)
    old.arrive(1, 2)
    old.arrive(2, 3)
    old.run()
    old.crash(1, written=True)
    old.arrive(1, 4)
    start(old.job(), available_now=True).await_termination()
    assert old.ids == [1, 2, 3, 4]
    first = max(m.id for m in manifests(old.root))
    old.checkpoint.rename(tmp_path / "elsewhere")
    old.arrive(2, 4, 5)
    start(old.job(), available_now=True).await_termination()
    assert old.ids == [1, 2, 3, 4, 5]
    second = max(m.id for m in manifests(old.root))

    for to, ids in ((first, [1, 2, 3, 4]), (second, [1, 2, 3, 4, 5]), (first, [1, 2, 3, 4])):
        spark_abs.open(old.root, spark).restore(to)
        assert old.ids == ids
    old.arrive(5, 6)
    start(old.job(), available_now=True).await_termination()
    assert old.ids == [1, 2, 3, 4, 5, 6]


def test_a_complete_aggregation_goes_on(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    old = Native(spark, tmp_path, counts, "complete")
    old.arrive(*range(7))
    old.run()
    old.arrive(*range(5))
    start(old.job(), available_now=True).await_termination()
    rows = DeltaTable(str(old.table)).to_pyarrow_table().to_pylist()
    assert {row["k"]: row["n"] for row in rows} == {k: sum(i % 3 == k for i in old.sent) for k in range(3)}


def test_a_start_that_adopts_may_be_killed_anywhere(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    old = Native(spark, tmp_path, without_repeats)
    old.arrive(1, 2)
    old.arrive(2, 3)
    old.run()
    old.crash(1, written=True)
    old.arrive(3, 4)
    points = [
        "adopt.numbers.copy.before",
        "adopt.numbers.copy.after",
        "change.record.before",
        "change.record.after",
        "start.natives.after",
        "adopt.numbers.fence.before",
        "adopt.numbers.fence.after",
        "start.sinks.after",
        "start.state.after",
    ]
    for point in points:
        killed_at(point, lambda kill: start(old.job(kill), available_now=True))
        assert old.ids == [1, 2, 3]
    start(old.job(), available_now=True).await_termination()
    assert old.ids == [1, 2, 3, 4]


def test_a_query_that_has_gone_on_after_a_killed_start_is_adopted_where_it_is_then(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    old = Native(spark, tmp_path)
    old.arrive(1)
    old.run()

    killed_at("adopt.numbers.fence.before", lambda kill: start(old.job(kill)))
    old.arrive(2)
    old.run()
    old.arrive(3)
    start(old.job(), available_now=True).await_termination()
    assert old.ids == [1, 2, 3]

    other = Job("job", root=str(tmp_path / "second"), spark=spark)
    source = other.source("numbers", old.feed.stream(), adopt=str(old.checkpoint))
    other.sink("out", source, table=str(old.table), existing="take_over")
    with pytest.raises(Refused, match="another root has adopted query"):
        start(other)
    assert old.ids == [1, 2, 3]


def test_rows_of_others_beside_those_of_the_query_must_be_meant(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    old = Native(spark, tmp_path)
    old.arrive(1)
    old.run()
    spark.createDataFrame([(7, 7)], "id long, k long").write.format("delta").mode("append").save(
        str(old.table)
    )
    with pytest.raises(
        Refused,
        match=r"has rows from other writers than the query \(versions 1\): declare the sink with existing",
    ):
        start(old.job())
    assert not old.job().check().ok
    start(old.job(existing="append"), available_now=True).await_termination()
    assert old.ids == [1, 7]


def test_what_does_not_fit_is_refused_before_anything_is_changed(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    old = Native(spark, tmp_path, without_repeats)
    old.arrive(1)
    old.run()
    version = DeltaTable(str(old.table)).version()
    fit = old.frame
    other = Feed(spark, tmp_path / "more", "id long, k long")
    wrong: list[tuple[str, Frame, dict[str, Any]]] = [
        (
            "its query reads 1 sources, and the declared frame reads 2",
            lambda f: fit(f.union(other.stream())),
            {},
        ),
        ("has state for dropDuplicates, and the declared frame needs state for nothing", as_it_is, {}),
        (
            "has state for dropDuplicates, and the declared frame needs state for an aggregation",
            lambda f: f.groupBy("id", "k").count().select("id", "k"),
            {"output_mode": "complete"},
        ),
        ("holds a batch of query .*checkpoint_location", fit, {"table": str(tmp_path / "another")}),
        ("merges by key", fit, {"table": spark_abs.Delta(str(old.table), key="id")}),
        ("it is not the checkpoint of a query", fit, {"adopt": str(tmp_path / "in")}),
    ]
    for said, frame, given in wrong:
        old.frame = frame
        with pytest.raises(Refused, match=rf"(?s)stage 'numbers' cannot adopt .*{said}"):
            start(old.job(**given))
    old.frame = lambda f: spark.readStream.format("delta").load(str(old.table))
    with pytest.raises(
        GraphError, match=r"the table of sink 'out' of this job.*also if the stage adopts a query"
    ):
        start(old.job())
    assert DeltaTable(str(old.table)).version() == version

    (old.checkpoint / "commits" / "0").unlink()
    old.frame = fit
    with pytest.raises(Refused, match="has finished no batch"):
        start(old.job())
    assert json.loads((old.checkpoint / "metadata").read_text())["id"]
    assert old.ids == [1]


def test_back_to_before_the_stage_came_the_query_is_adopted_anew(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """The job had another stage before; its restore takes its own rows, and leaves those of the query."""
    old, more = Native(spark, tmp_path), Feed(spark, tmp_path / "more", "id long")
    old.arrive(1)
    old.arrive(2)
    old.run()
    old.crash(1, written=True)
    more.write({"id": 1})

    def job(*, both: bool) -> Job:
        made = old.job() if both else Job("job", root=old.root, spark=spark, keep=20)
        made.sink("more", made.source("others", more.stream()), table=str(tmp_path / "others"))
        return made

    start(job(both=False), available_now=True).await_termination()
    first = max(m.id for m in manifests(old.root))
    old.arrive(3)
    start(job(both=True), available_now=True).await_termination()
    assert old.ids == [1, 2, 3]
    spark_abs.open(old.root, spark).restore(first)
    assert old.ids == [1, 2]
    old.arrive(4)
    start(job(both=True), available_now=True).await_termination()
    assert old.ids == [1, 2, 3, 4]


def test_a_query_over_a_delta_table_goes_on_there_if_that_has_what_is_next(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    source = tmp_path / "source"

    def append(number: int) -> None:
        write_deltalake(str(source), pa.table({"id": pa.array([number], pa.int64())}), mode="append")

    def frame(_: DataFrame) -> DataFrame:
        return spark.readStream.format("delta").load(str(source))

    old = Native(spark, tmp_path, frame)
    append(1)
    old.run()
    append(2)
    append(3)
    shutil.copytree(source, tmp_path / "copy")
    DeltaTable(str(source)).optimize.compact()
    DeltaTable(str(source)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(Refused, match=r"resumes at version 1 of .*, and 2 of 2 files that it reads are gone"):
        start(old.job())
    shutil.copytree(tmp_path / "copy", source, dirs_exist_ok=True)
    start(old.job(), available_now=True).await_termination()
    assert old.ids == [1, 2, 3]


def test_a_stage_that_has_run_without_the_query_is_told_that_it_comes_too_late(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """It has another position than the query, which still writes the table."""
    old = Native(spark, tmp_path)
    old.arrive(1)
    old.run()
    beside: dict[str, Any] = {"adopt": None, "existing": "append"}
    start(old.job(**beside), available_now=True).await_termination()
    assert old.ids == [1, 1]
    old.arrive(2)
    for job in (old.job(), old.job(existing="append")):
        with pytest.raises(Refused, match=r"(?s)the stage has run already, without .*or leave adopt= out"):
            start(job, available_now=True)
        assert not job.check().ok
    assert old.ids == [1, 1]
    start(old.job(**beside), available_now=True).await_termination()
    assert old.ids == [1, 1, 2]
