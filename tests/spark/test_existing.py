"""Sinks that first come to tables with rows of others: refused, unless somebody says that they are meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.errors import Refused
from spark_abs.job import Job
from spark_abs.store.failpoint import Failpoint, no_failpoint
from tests.job_support import Feed, manifests, read_table
from tests.spark.conftest import Start, killed_at

THEIRS = [100, 101, 102]


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    feed = Feed(spark, tmp_path / "in", "id long")
    feed.write({"id": 1}, {"id": 2})
    return feed


def job_to(feed: Feed, base: Path, visible: Any, failpoint: Failpoint = no_failpoint, **said: Any) -> Job:
    job = Job("job", root=str(base / "root"), spark=feed.spark)
    job.failpoint = failpoint
    source = job.source("numbers", feed.stream())
    job.sink("out", source, table=spark_abs.Delta(str(base / "out"), visible=visible), **said)
    return job


def theirs(table: Path, *ids: int) -> None:
    write_deltalake(str(table), pa.table({"id": pa.array(ids, pa.int64())}), mode="append")


def ids(table: Path) -> list[int]:
    return sorted(read_table(table)["id"].to_pylist())


@pytest.mark.parametrize("visible", ["batch", "checkpoint"])
def test_rows_of_others_are_kept_apart_unless_they_are_meant(
    feed: Feed, tmp_path: Path, start: Start, visible: str
) -> None:
    """Refused before anything is changed, by `check` too; with `append` they stay, also at a restore."""
    table, root = tmp_path / "out", str(tmp_path / "root")
    theirs(table, *THEIRS)
    before = DeltaTable(str(table)).version()
    refused = rf"sink 'out': table {table} has 3 rows in 1 file at version {before} that this root has not"
    with pytest.raises(Refused, match=f"{refused} written.*existing='append'.*existing='take_over'"):
        start(job_to(feed, tmp_path, visible))
    assert not Path(root).exists()
    checked = job_to(feed, tmp_path, visible).check()
    assert not checked.ok
    assert "existing='append'" in str(checked)
    assert DeltaTable(str(table)).version() == before
    assert ids(table) == THEIRS

    start(job_to(feed, tmp_path, visible, existing="append"), available_now=True).await_termination()
    assert ids(table) == [1, 2, *THEIRS]
    feed.write({"id": 3})
    assert job_to(feed, tmp_path, visible).check().ok
    start(job_to(feed, tmp_path, visible), available_now=True).await_termination()
    assert ids(table) == [1, 2, 3, *THEIRS]
    first = min(manifest.id for manifest in manifests(root))
    spark_abs.open(root, feed.spark).restore(first)
    assert ids(table) == [1, 2, *THEIRS]
    start(job_to(feed, tmp_path, visible), available_now=True).await_termination()
    assert ids(table) == [1, 2, 3, *THEIRS]


@pytest.mark.parametrize("visible", ["batch", "checkpoint"])
def test_a_start_that_was_killed_after_its_sink_came_goes_on_beside_rows_of_others(
    feed: Feed, tmp_path: Path, start: Start, visible: str
) -> None:
    """The table was empty when the sink came; others have written before the next start."""
    table = tmp_path / "out"
    theirs(table)  # made by others, and empty

    point = "start.sinks.after" if visible == "batch" else "start.state.after"
    killed_at(point, lambda kill: start(job_to(feed, tmp_path, visible, kill)))
    theirs(table, *THEIRS)
    start(job_to(feed, tmp_path, visible), available_now=True).await_termination()
    assert ids(table) == [1, 2, *THEIRS]


def test_a_sink_that_a_job_gets_later_is_asked_as_the_first_one(
    feed: Feed, tmp_path: Path, start: Start
) -> None:
    start(job_to(feed, tmp_path, "batch"), available_now=True).await_termination()
    theirs(tmp_path / "more", *THEIRS)
    feed.write({"id": 3})

    def with_more(**said: Any) -> Job:
        job = job_to(feed, tmp_path, "batch")
        job.sink(
            "more",
            job.stage("all", [job.source("again", feed.stream())], lambda f: f),
            table=str(tmp_path / "more"),
            **said,
        )
        return job

    with pytest.raises(Refused, match=r"sink 'more': table .* has 3 rows"):
        start(with_more())
    assert ids(tmp_path / "more") == THEIRS
    start(with_more(existing="append"), available_now=True).await_termination()
    assert ids(tmp_path / "more") == [1, 2, 3, *THEIRS]
    assert ids(tmp_path / "out") == [1, 2, 3]
