"""A Delta source whose columns are renamed: its schema is tracked with the stage, and goes back with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import StageFailed
from spark_abs.job import Job
from spark_abs.snapshots.schema_log import is_schema_entry
from spark_abs.store.history import HistoryEvent
from tests.job_support import events, eventually, manifests, read_table
from tests.spark.conftest import Start

ALLOW = "spark.databricks.delta.streaming.allowSourceColumnRename"


@dataclass
class Renamed:
    """notes ── seen: table seen, of the columns by their place."""

    spark: SparkSession
    base: Path

    def __post_init__(self) -> None:
        mapped = "USING delta TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
        self.sql(f"CREATE TABLE {{}} (id BIGINT, note STRING) {mapped}")

    def sql(self, text: str) -> None:
        self.spark.sql(text.format(f"delta.`{self.base / 'notes'}`"))

    def stream(self, tracking: str) -> DataFrame:
        read = self.spark.readStream.format("delta").option("schemaTrackingLocation", tracking)
        return read.load(str(self.base / "notes"))

    def job(self, **settings: Any) -> Job:
        job = Job("renamed", root=str(self.base / "root"), spark=self.spark, interval="1h", **settings)
        notes = job.stage("notes", [self.stream], by_place)
        job.sink("seen", notes, table=str(self.base / "seen"))
        return job

    def run(self, start: Start) -> int:
        """Run until it goes through; return how often a change of the schema has ended it."""
        for ended in range(4):
            said = ""
            try:
                assert start(self.job(), available_now=True).await_termination(120)
            except StageFailed as error:
                said = str(error)
            if not said:
                return ended
            assert "DELTA_STREAMING_METADATA_EVOLUTION" in said
        raise AssertionError("it does not come past a change")

    @property
    def seen(self) -> list[tuple[object, ...]]:
        return sorted(tuple(row.values()) for row in read_table(self.base / "seen").to_pylist())


def by_place(frame: DataFrame) -> DataFrame:
    return frame.select("id", F.col(frame.columns[1]).alias("text"), F.lit(frame.columns[1]).alias("called"))


@pytest.fixture
def renamed(spark: SparkSession, tmp_path: Path) -> Iterator[Renamed]:
    spark.conf.set(ALLOW, "always")
    yield Renamed(spark, tmp_path)
    spark.conf.unset(ALLOW)


def test_a_renamed_column_goes_through_and_back(renamed: Renamed, start: Start) -> None:
    """A checkpoint has the log of its cut: rows from before the change have the old name again."""
    root = str(renamed.base / "root")
    renamed.sql("INSERT INTO {} VALUES (1, 'a')")
    renamed.run(start)
    first = [(1, "a", "note")]
    assert renamed.seen == first
    before = manifests(root)[-1]
    renamed.sql("INSERT INTO {} VALUES (2, 'b')")
    renamed.sql("ALTER TABLE {} RENAME COLUMN note TO title")
    renamed.sql("INSERT INTO {} VALUES (3, 'c')")
    assert renamed.run(start) == 1
    second = [*first, (2, "b", "note"), (3, "c", "title")]
    assert renamed.seen == second
    after = manifests(root)[-1]
    logs = [[f.path for s in m.stages for f in s.files if is_schema_entry(f.path)] for m in (before, after)]
    assert [len(entries) for entries in logs] == [1, 2]

    spark_abs.open(root, renamed.spark).restore(before.id)
    assert renamed.seen == first
    assert renamed.run(start) == 1
    assert renamed.seen == second
    renamed.sql("INSERT INTO {} VALUES (4, 'd')")
    spark_abs.open(root, renamed.spark).restore(after.id)
    assert renamed.seen == second
    assert renamed.run(start) == 0
    assert renamed.seen == [*second, (4, "d", "title")]


def test_a_restart_goes_on_with_the_columns_as_they_are_then(renamed: Renamed, start: Start) -> None:
    """The function that opens the source is called anew, with the log of the stage: the run does not end."""
    renamed.sql("INSERT INTO {} VALUES (1, 'a')")
    run = start(renamed.job(restart_strategy="fixed-delay", restart_delay="10ms"))
    first = [(1, "a", "note")]
    eventually(run, lambda: renamed.seen == first, "the first row")
    renamed.sql("ALTER TABLE {} RENAME COLUMN note TO title")
    renamed.sql("INSERT INTO {} VALUES (2, 'b')")
    eventually(run, lambda: renamed.seen == [*first, (2, "b", "title")], "the row under the new name")
    told = [str(e["detail"]) for e in events(str(renamed.base / "root"), HistoryEvent.STAGE_RESTARTED)]
    assert told
    assert all("DELTA_STREAMING_METADATA_EVOLUTION" in detail for detail in told)
    run.stop()
