"""What a restore leaves to Spark, and reading all tables at one cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.errors import DamageError, Fenced
from spark_abs.restore.prepare import prepare
from spark_abs.restore.refusals import Force
from tests.job_support import grow_old
from tests.root_support import SmallJob

CHANGE_FEED = {"delta.enableChangeDataFeed": "true"}
"""A feature that only Delta's own writer serves."""


def rows(spark: SparkSession, table: str, version: int | None = None) -> list[int]:
    reader = spark.read.format("delta")
    frame = (reader if version is None else reader.option("versionAsOf", version)).load(table)
    return sorted(row.n for row in frame.collect())


def test_a_sink_that_only_spark_can_write_goes_back_through_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = SmallJob(tmp_path, lambda: spark, CHANGE_FEED)
    job.checkpoint(1)
    job.checkpoint(2)
    grow_old(job.table)
    plan = prepare(job.root, 1).plan
    assert plan.needs_spark
    assert any("only Spark can write" in note for note in plan.notes)
    done = spark_abs.open(job.root.uri, spark).restore(to=1)
    head, *tables = str(done).splitlines()
    assert head.startswith(f"job {job.state.job!r} is back at checkpoint 1 as attempt 2, restored by run ")
    assert tables[0].startswith(f"  bring sink b/totals ({job.table}) through Spark from version ")
    assert rows(spark, job.table) == [1]
    with pytest.raises(Fenced):
        job.step(9)
    job.start()
    job.step(3)
    assert rows(spark, job.table) == [1, 3]


def test_read_gives_every_table_at_one_cut(spark: SparkSession, tmp_path: Path) -> None:
    job = SmallJob(tmp_path)
    job.checkpoint(1, name="one")
    job.checkpoint(2)
    job.step(3)
    grow_old(job.table)
    read = spark_abs.open(job.root.uri, spark).read("totals", "one")
    assert sorted(row.n for row in read.collect()) == [1]
    assert sorted(row.n for row in spark_abs.open(job.root.uri).read("totals").collect()) == [1, 2]
    spark_abs.open(job.root.uri).restore(to="one")
    read = spark_abs.open(job.root.uri, spark).read("totals", 2)
    assert sorted(row.n for row in read.collect()) == [1, 2]
    assert DeltaTable(job.table).to_pyarrow_table().num_rows == 1


def test_a_version_without_its_deletion_vectors_is_refused_before_anything_is_changed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Delta's RESTORE would bring it back, and nobody could read it."""
    job = SmallJob(tmp_path, lambda: spark)
    spark.sql(f"ALTER TABLE delta.`{job.table}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    job.step(1, 2, 3)
    spark.sql(f"DELETE FROM delta.`{job.table}` WHERE n = 1")
    job.checkpoint(4)
    spark.sql(f"DELETE FROM delta.`{job.table}` WHERE n = 2")
    assert prepare(job.root, 1, force=[Force.ROWS]).plan.needs_spark
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.sql(f"VACUUM delta.`{job.table}` RETAIN 0 HOURS")
    before = DeltaTable(job.table).version()
    with pytest.raises(DamageError, match=r"deletion vectors of version .* are gone.*deletedFileRetention"):
        spark_abs.open(job.root.uri, spark).restore(to=1, force=["rows"])
    assert DeltaTable(job.table).version() == before
    assert rows(spark, job.table) == [3, 4]
