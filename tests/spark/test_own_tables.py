"""Jobs that read a table which they write: refused at the start, whatever path leads to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import DataFrame, SparkSession

from spark_abs.errors import GraphError
from spark_abs.job import Job

READS: dict[str, Callable[[DataFrame, SparkSession, str], DataFrame]] = {
    "as a stream": lambda ticks, spark, table: ticks.select("value").union(
        spark.readStream.format("delta").load(table).select("value")
    ),
    "as a lookup": lambda ticks, spark, table: ticks.join(
        spark.read.format("delta").option("versionAsOf", 0).load(table), "value"
    ),
    "in a condition": lambda ticks, spark, table: ticks.where(
        f"value IN (SELECT value FROM delta.`{table}` VERSION AS OF 0)"
    ),
}


def job_with_tables(spark: SparkSession, base: Path) -> tuple[Job, str]:
    """A job with a sink, and another path to its table."""
    write_deltalake(str(base / "out"), pa.table({"value": pa.array([1], pa.int64())}))
    (base / "link").symlink_to(base / "out")
    return Job("own", root=str(base / "root"), spark=spark), str(base / "link")


@pytest.mark.parametrize("how", READS)
def test_a_stage_that_reads_the_table_of_a_sink(spark: SparkSession, tmp_path: Path, how: str) -> None:
    job, link = job_with_tables(spark, tmp_path)
    ticks = job.source("ticks", spark.readStream.format("rate").load())
    looked = job.stage("look", [ticks], lambda frame: READS[how](frame, spark, link).select("value"))
    job.sink("out", looked, table=str(tmp_path / "out"))
    said = "the table of sink 'out' of this job: .*Use look.main as the input instead"
    with pytest.raises(GraphError, match=said):
        job.start()
    assert not (tmp_path / "root").exists()


def test_two_sinks_that_write_one_table(spark: SparkSession, tmp_path: Path) -> None:
    job, link = job_with_tables(spark, tmp_path)
    ticks = job.source("ticks", spark.readStream.format("rate").load().select("value"))
    job.sink("one", ticks, table=str(tmp_path / "out"))
    job.sink("two", ticks, table=link)
    with pytest.raises(
        GraphError, match=re.escape(f"'two' write the same table {tmp_path / 'out'} ({link} is the same)")
    ):
        job.start()
    assert not (tmp_path / "root").exists()
