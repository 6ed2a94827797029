"""Runs as schedulers start them: short, many, and most of them without anything to do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs import Delta
from spark_abs.job import Job
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.run import nothing_new
from spark_abs.snapshots import tidy
from spark_abs.store.history import History
from spark_abs.store.root import Root
from tests.job_support import Feed


def summed(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.sum("v").alias("v"))


class Scheduled:
    """A job with a channel and two tables, started for what there is."""

    def __init__(self, spark: SparkSession, base: Path) -> None:
        self.spark, self.base = spark.newSession(), base
        self.spark.conf.set("spark.sql.streaming.minBatchesToRetain", "2")
        self.spark.conf.set("spark.sql.shuffle.partitions", "1")
        self.feed = Feed(self.spark, base / "in", "k long, v long")
        self.root = Root(str(base / "root"))

    def start(self) -> None:
        job = Job("short", root=self.root.uri, spark=self.spark, keep=1)
        source = job.source("source", self.feed.stream())
        sums = job.stage("sums", [source], summed, output_mode="update")
        every = job.stage("every", [source], summed, output_mode="complete")
        job.sink("every", every, table=str(self.base / "every"))
        job.sink("rows", source, table=str(self.base / "rows"))
        job.sink("sums", sums, table=str(self.base / "sums"))
        job.sink("whole", source, table=Delta(str(self.base / "whole"), visible="checkpoint"))
        assert job.start(available_now=True).await_termination(240)

    @property
    def versions(self) -> list[int]:
        return [DeltaTable(str(self.base / name)).version() for name in ("rows", "sums", "every", "whole")]

    @property
    def checkpoints(self) -> list[int]:
        return [summary.id for summary in Checkpoints.open(self.root, "short").summaries()]

    def files(self) -> Counter[str]:
        """How many files lie in each folder below the root."""
        paths = (path for path in Path(self.root.uri).rglob("*") if path.is_file())
        return Counter(str(path.parent.relative_to(self.root.uri)) for path in paths)

    def check(self) -> None:
        """Each row is there once, and the last total of each key is that of all rows."""
        sent = [(row["k"], row["v"]) for file in self.feed.files for row in file]
        for name in ("rows", "whole"):
            rows = self.spark.read.format("delta").load(str(self.base / name))
            assert sorted(tuple(row) for row in rows.select("k", "v").collect()) == sorted(sent)
        sums = self.spark.read.format("delta").load(str(self.base / "sums")).groupBy("k").agg(F.max("v"))
        totals = {
            k: sum(v for key, v in sent if key == k)  # type: ignore[misc]
            for k in {k for k, _ in sent}
        }
        assert dict(tuple(row) for row in sums.collect()) == totals
        every = self.spark.read.format("delta").load(str(self.base / "every"))
        assert sorted(tuple(row) for row in every.collect()) == sorted(totals.items())


@pytest.mark.long
def test_starts_without_news_change_nothing_and_leave_as_much_as_those_before(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for slow readers is little here, so that few starts show what many would."""
    monkeypatch.setattr(tidy, "KEPT_COMMITS", 4)
    monkeypatch.setattr(tidy, "MOST_DEAD", 4)
    monkeypatch.setattr(tidy, "KEPT_VERSIONS", 2)
    monkeypatch.setattr(History, "MOST_FILES", 5)
    monkeypatch.setattr(nothing_new, "MOST_ENTRIES", 3)
    job = Scheduled(spark, tmp_path)
    job.feed.write({"k": 1, "v": 1}, {"k": 2, "v": 5})
    job.start()
    job.start()
    (*versions, whole), (checkpoint,) = job.versions, job.checkpoints
    seen = []
    for number in range(12):
        job.start()
        *now, moved = job.versions
        (newest,) = job.checkpoints
        assert now == versions
        assert moved - whole <= 2 * (newest - checkpoint) <= number  # some, so that channels can be trimmed
        seen.append(job.files())
    totals = [sum(found.values()) for found in seen]
    assert max(totals) < 2 * min(totals), seen[-1]

    job.feed.write({"k": 1, "v": 7})
    job.start()
    assert job.versions[:3] == [version + 1 for version in versions]
    job.check()
    spark_abs.open(job.root.uri).restore("latest")
    job.start()
    job.check()
