"""Rows of a job go to an Iceberg table once, and go back with a restore."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, NestedField
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.errors import SinkFailed, SinkUnreachable, UsageError
from spark_abs.model import ChannelId
from spark_abs.sinks.sending import epoch_rows
from spark_abs.sinks.sending.epoch_rows import FileRows
from spark_abs.sinks.sending.tasks import SendTasks
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually, manifests
from tests.spark.conftest import Start

SECRET = "c0rrect-h0rse-never-written"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    place = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/lake"}
    monkeypatch.setenv("LAKE", json.dumps({**place, "s3.secret-access-key": SECRET}))
    found = load_catalog("default", **place)
    found.create_namespace("shop")
    yield found
    found.close()


def wide(rows: DataFrame) -> DataFrame:
    return rows.selectExpr(
        "id",
        "k",
        "ts",
        "CAST(v / 4 AS decimal(12,2)) AS price",
        "array(v) AS tags",
        "named_struct('k', k) AS more",
        "CAST(ts AS date) AS day",
    )


def declare(
    spark: SparkSession,
    root: Path,
    feed: Feed,
    evolve: bool = True,
    interval: str = "300ms",
    retained: int = 10,
) -> spark_abs.Job:
    job = spark_abs.Job(
        "lake", root=str(root), spark=spark, interval=interval, keep=retained, skip_unchanged=False
    )
    rows = job.source("rows", feed.stream(), outputs={"wide": wide})
    lake = spark_abs.Iceberg("shop.rows", catalog_env="LAKE", evolve=evolve)
    job.sink("lake", rows["wide"], iceberg=lake)
    return job


def fill(feed: Feed, files: int) -> None:
    for _ in range(files):
        at = len(feed.files)
        feed.write(*({"id": at * 3 + n, "k": n, "v": at + n, "ts": at} for n in range(3)))


def ids(table: Table) -> list[int]:
    """Read them as another engine does: by the files of the newest snapshot."""
    table.refresh()
    files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    if not files:
        return []
    found = duckdb.sql(f"SELECT id FROM read_parquet({files!r}) ORDER BY id")
    assert found is not None
    return [number for (number,) in found.fetchall()]


def test_rows_are_in_the_table_once_and_go_back_with_a_restore(
    spark: SparkSession,
    catalog: Catalog,
    tmp_path: Path,
    start: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")
    fill(feed, 2)
    with pytest.raises(UsageError, match=r"has no table shop\.rows") as refused:
        start(declare(spark, root, feed))
    table = catalog.create_table("shop.rows", spark_schema())
    with pytest.raises(UsageError, match=r"(?s)cannot take the rows.*price.*evolve=True"):
        start(declare(spark, root, feed, evolve=False))

    run = start(declare(spark, root, feed))
    eventually(run, lambda: len(ids(table)) == 6, "two files in the table")
    run.stop(savepoint="early")
    fill(feed, 2)
    start(declare(spark, root, feed), available_now=True).await_termination()
    assert ids(table) == list(range(12))
    first = table.scan(row_filter="id = 4").to_arrow().to_pylist()[0]
    assert (str(first["price"]), first["tags"], first["more"], str(first["day"])) == (
        "0.50",
        [2],
        {"k": 1},
        "2023-11-14",
    )

    done = spark_abs.open(str(root)).restore("early")
    said = str(done.plan.plain())
    assert ids(table) == list(range(6))
    assert [name for name in table.refs() if name.startswith("spark_abs_abandoned_")]
    start(declare(spark, root, feed), available_now=True).await_termination()
    assert ids(table) == list(range(12))
    table.refresh()
    (tagged,) = (ref for name, ref in table.refs().items() if name.startswith("spark_abs_early_lake_"))
    rows = table.scan(snapshot_id=tagged.snapshot_id).to_arrow()["id"].to_pylist()
    assert sorted(rows) == list(range(6))

    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [1 for data in written if SECRET.encode() in data]
    assert SECRET not in caplog.text + said + str(refused.value)


def test_an_old_savepoint_lets_no_mark_grow_and_is_gone_back_to(
    spark: SparkSession, catalog: Catalog, tmp_path: Path, start: Start
) -> None:
    table = catalog.create_table("shop.rows", spark_schema())
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")

    def versions() -> list[int]:
        (text,) = (t for name, t in table.refresh().properties.items() if name.startswith("spark_abs."))
        return [kept["version"] for kept in json.loads(text)["kept"]]

    fill(feed, 1)
    run = start(declare(spark, root, feed, retained=2))
    eventually(run, lambda: len(ids(table)) == 3, "a file in the table")
    run.stop(savepoint="early")
    (early,) = versions()[-1:]
    run = start(declare(spark, root, feed, retained=2))
    for rows in range(6, 42, 3):
        fill(feed, 1)
        eventually(run, lambda: len(ids(table)) == rows, "a file more in the table")  # noqa: B023 - called here
    after = versions()[-1]
    eventually(run, lambda: versions()[1] > after, "what no restore asks for is forgotten")
    run.stop()
    assert versions()[0] == early
    newest = max(manifest.id for manifest in manifests(str(root)))
    spark_abs.open(str(root)).restore(newest)
    spark_abs.open(str(root)).restore("early")
    assert ids(table) == list(range(3))
    start(declare(spark, root, feed), available_now=True).await_termination()
    assert ids(table) == list(range(39))


def test_many_rows_are_written_by_tasks_and_committed_once_by_the_driver(
    spark: SparkSession, catalog: Catalog, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_rows, "PART_BYTES", 1)
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "k", LongType()))
    buckets = PartitionSpec(PartitionField(2, 1000, BucketTransform(8), "bucket"))
    table = catalog.create_table("shop.rows", schema, partition_spec=buckets)
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")
    fill(feed, 4)
    start(declare(spark, root, feed, interval="1h"), available_now=True).await_termination()
    assert ids(table) == list(range(12))
    assert len(list(table.scan(row_filter="k = 1").plan_files())) >= 4, "a file for each task and bucket"
    assert table.scan(row_filter="id = 4").to_arrow()["tags"].to_pylist() == [[2]]
    said = [s.summary.additional_properties for s in table.snapshots() if s.summary is not None]
    assert len([each for each in said if each.get("added-records")]) == 1, "one commit"


def empty_parts(tmp_path: Path) -> list[FileRows]:
    return [FileRows(Root(str(tmp_path)), ChannelId("a.main"), (), spark_schema()) for _ in range(2)]


def test_a_module_that_executors_lack_is_named_with_the_remedy(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_in_the_driver.py").write_text("def work(rows): return rows.count\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    work = importlib.import_module("only_in_the_driver").work
    with pytest.raises(SinkFailed, match=r"(?s)only_in_the_driver.*Install there.*spark-abs\[iceberg\]"):
        SendTasks(spark, "sink out of job lake")(work, empty_parts(tmp_path))


def test_tasks_end_when_the_run_does(spark: SparkSession, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def work(_: Rows) -> None:
        begun.touch()
        threading.Event().wait()

    def cancel() -> None:
        while not begun.exists():
            pause.wait(0.05)
        tasks.cancel()

    tasks, pause = SendTasks(spark, "sink out of job lake"), threading.Event()
    other = threading.Thread(target=cancel)
    other.start()
    with pytest.raises(SinkUnreachable, match="failed or were lost"):
        tasks(work, empty_parts(tmp_path))
    other.join()
    with pytest.raises(SinkUnreachable, match="has stopped"):
        tasks(work, empty_parts(tmp_path))


def spark_schema() -> pa.Schema:
    return pa.schema([("id", pa.int64()), ("k", pa.int64())])
