"""Every checkpoint is one consistent cut: each table at it equals a batch query over the inputs at it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.job import Job
from tests.job_support import (
    Feed,
    assert_tables_at_every_cut,
    caught_up,
    eventually,
    files_read,
    manifests,
    newest_data,
    version_of,
)
from tests.spark.conftest import Start
from tests.spark.shapes import (
    DIAMOND,
    DISTINCT,
    INNER,
    MILESTONES,
    NEIGHBOURS,
    OUTER,
    SCHEMA,
    SPLIT,
    VISITS,
    Shape,
    clicks_of,
    orders_of,
    windows,
)

RELATIONAL = (windows("rocksdb"), windows("hdfs"), DISTINCT, INNER, OUTER)
OF_FUNCTIONS = (MILESTONES, VISITS)
OF_ONE_CHANNEL = (NEIGHBOURS, DIAMOND, SPLIT)


@pytest.mark.parametrize(
    "shapes",
    [RELATIONAL, OF_FUNCTIONS, pytest.param(OF_ONE_CHANNEL, marks=pytest.mark.long)],
    ids=["relational", "functions", "one-channel"],
)
def test_tables_are_one_cut_at_every_checkpoint_also_behind_a_restore(
    spark: SparkSession, tmp_path: Path, start: Start, shapes: tuple[Shape, ...]
) -> None:
    """A job runs, goes back to a savepoint with its native checkpoints lost, and runs on to an exact one."""
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    clicks, orders = Feed(spark, tmp_path / "clicks", SCHEMA), Feed(spark, tmp_path / "orders", SCHEMA)
    two = any(shape in (INNER, OUTER) for shape in shapes)
    feeds = {"clicks": clicks, **({"orders": orders} if two else {})}

    def feed(files: int) -> None:
        for _ in range(files):
            clicks.write(*clicks_of(len(clicks.files)))
            orders.write(*orders_of(len(orders.files)))

    def declare() -> Job:
        job = Job("shapes", root=root, spark=spark, interval="1s", keep=1000)
        sources = [job.source(name, given.stream()) for name, given in feeds.items()]
        for shape in shapes:
            shape.add(job, sources[0], sources[-1], tables)
        return job

    queries = {name: query for shape in shapes for name, query in shape.queries.items()}

    feed(3)
    run = start(declare())
    eventually(run, lambda: caught_up(root, feeds), "a checkpoint after the first files")
    feed(2)
    mid = run.savepoint("mid")
    feed(2)
    eventually(run, lambda: caught_up(root, feeds), "a checkpoint after the files after the savepoint")
    run.stop()
    assert_tables_at_every_cut(spark, root, feeds, queries, tables)

    # Moved away first: a snapshot that Spark still uploads to the old place must not stop the removal.
    shutil.rmtree((tmp_path / "root/native/1").rename(tmp_path / "lost"), ignore_errors=True)
    spark_abs.open(root, spark).restore("mid")
    feed(1)
    run = start(declare())
    eventually(run, lambda: caught_up(root, feeds), "a checkpoint of the restored job after all files")
    end = run.stop(savepoint="end")
    found = assert_tables_at_every_cut(spark, root, feeds, queries, tables)

    assert (found[-1].id, found[-1].attempt) == (end, 2)
    assert len([m for m in found if m.id > mid]) > 2
    assert [version_of(found[-1], name) for name in queries] == [
        newest_data(tables / name) for name in queries
    ]
    assert sum(stage.dropped_late for manifest in found for stage in manifest.stages) == 0


def test_bounded_runs_of_a_graph_end_by_themselves(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    """One source ends long before the other and checkpoints go on (P10); a restore to a last one, too."""
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    clicks, orders = Feed(spark, tmp_path / "clicks", SCHEMA), Feed(spark, tmp_path / "orders", SCHEMA)
    feeds = {"clicks": clicks, "orders": orders}
    shapes = (DIAMOND, INNER)
    queries = {name: query for shape in shapes for name, query in shape.queries.items()}

    def run_to_the_end() -> None:
        job = Job("bounded", root=root, spark=spark, interval="300ms", keep=1000)
        sources = [job.source(name, given.stream()) for name, given in feeds.items()]
        for shape in shapes:
            shape.add(job, sources[0], sources[1], tables)
        assert start(job, available_now=True).await_termination(240)
        newest = assert_tables_at_every_cut(spark, root, feeds, queries, tables)[-1]
        assert [files_read(newest, name) for name in feeds] == [len(feed.files) for feed in feeds.values()]

    clicks.write_all(clicks_of(file) for file in range(4))
    orders.write(*orders_of(0))
    run_to_the_end()
    ended = manifests(root)[-1].id
    clicks.write(*clicks_of(4))
    orders.write_all(orders_of(file) for file in range(1, 5))
    run_to_the_end()
    spark_abs.open(root, spark).restore(ended)
    run_to_the_end()
    assert manifests(root)[-1].attempt == 2
