"""Rows of a job go to an Iceberg table once, and go back with a restore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.errors import UsageError
from spark_abs.restore.plan import plan_plain
from tests.job_support import Feed, eventually
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


def declare(spark: SparkSession, root: Path, feed: Feed, evolve: bool = True) -> spark_abs.Job:
    job = spark_abs.Job("lake", root=str(root), spark=spark, interval="300ms")
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

    done = spark_abs.restore(str(root), "early")
    said = str(plan_plain(done.plan))
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


def spark_schema() -> pa.Schema:
    return pa.schema([("id", pa.int64()), ("k", pa.int64())])
