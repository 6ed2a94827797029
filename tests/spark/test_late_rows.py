"""What Spark drops behind a watermark is said by the next checkpoint, and is no more than that."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from spark_abs.job import Job
from tests.job_support import Feed, manifests
from tests.spark.conftest import Start


def test_a_checkpoint_says_how_many_rows_were_late(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    root, feed = str(tmp_path / "root"), Feed(spark, tmp_path / "events")

    def run() -> int:
        job = Job("late", root=root, spark=spark)
        events = job.source("events", feed.stream())
        first = job.stage("first", [events], lambda f: f.withWatermark("ts", "1 minute").dropDuplicates())
        job.sink("kept", first, table=str(tmp_path / "kept"))
        assert start(job, available_now=True).await_termination(240)
        return sum(stage.dropped_late for stage in manifests(root)[-1].stages)

    feed.write({"id": 1, "ts": 0}, {"id": 2, "ts": 1800})
    assert run() == 0
    feed.write({"id": 3, "ts": 0}, {"id": 4, "ts": 60}, {"id": 5, "ts": 1860})
    assert run() == 2

    kept = spark.read.format("delta").load(str(tmp_path / "kept"))
    assert sorted(row.id for row in kept.collect()) == [1, 2, 5]
