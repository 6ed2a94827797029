"""A job that reads a Delta table goes back to before an OPTIMIZE there, unless VACUUM has taken files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import Refused
from spark_abs.job import Job
from spark_abs.manifest import SourceShape
from spark_abs.plan.fingerprint import source_shapes
from tests.job_support import manifests, read_table
from tests.spark.conftest import Start


def append(table: Path, *numbers: int) -> None:
    for number in numbers:
        write_deltalake(str(table), pa.table({"n": pa.array([number] * 3, pa.int64())}), mode="append")


def by_number(rows: DataFrame) -> DataFrame:
    return rows.groupBy("n").agg(F.count("*").alias("count"))


def job_of(spark: SparkSession, base: Path) -> Job:
    job = Job("reader", root=str(base / "root"), spark=spark, keep=20)
    source = job.source("source", spark.readStream.format("delta").load(str(base / "in")))
    counts = job.stage("counts", [source], by_number, output_mode="update")
    job.sink("rows", source, table=str(base / "rows"))
    job.sink("counts", counts, table=spark_abs.Delta(str(base / "counts"), key="n"))
    return job


def tables(base: Path) -> tuple[list[int], list[tuple[int, int]]]:
    counts = read_table(base / "counts").to_pylist()
    return sorted(read_table(base / "rows")["n"].to_pylist()), sorted((r["n"], r["count"]) for r in counts)


def expected(numbers: int) -> tuple[list[int], list[tuple[int, int]]]:
    return [n for n in range(numbers) for _ in range(3)], [(n, 3) for n in range(numbers)]


def test_back_to_before_an_optimize_and_refused_once_vacuum_has_taken_the_files(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Refused with what is missing, and nothing is changed; with the files back it goes on."""
    source, root = tmp_path / "in", str(tmp_path / "root")
    append(source, 0, 1)
    start(job_of(spark, tmp_path), available_now=True).await_termination()
    append(source, 2, 3)
    start(job_of(spark, tmp_path), available_now=True).await_termination()
    assert tables(tmp_path) == expected(4)
    early, late = min(m.id for m in manifests(root)), max(m.id for m in manifests(root))

    DeltaTable(str(source)).optimize.compact()
    spark_abs.open(root, spark).restore(early)  # OPTIMIZE alone takes nothing from it
    assert tables(tmp_path) == expected(2)
    append(source, 4)
    start(job_of(spark, tmp_path), available_now=True).await_termination()
    assert tables(tmp_path) == expected(5)
    spark_abs.open(root, spark).restore(late)
    assert tables(tmp_path) == expected(4)
    start(job_of(spark, tmp_path), available_now=True).await_termination()
    assert tables(tmp_path) == expected(5)

    shutil.copytree(source, tmp_path / "copy")
    DeltaTable(str(source)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    before = {name: DeltaTable(str(tmp_path / name)).version() for name in ("rows", "counts", "root/control")}
    said = rf"stage 'source' resumes at version 2 of {source}, and 2 of 3 files .* those of version 2 to 3"
    for dry_run in (True, False):
        with pytest.raises(Refused, match=rf"{said}, the first part-.*force="):
            spark_abs.open(root, spark).restore(early, dry_run=dry_run)
    assert before == {name: DeltaTable(str(tmp_path / name)).version() for name in before}
    assert tables(tmp_path) == expected(5)
    forced = spark_abs.open(root, spark).restore(early, dry_run=True, force=["inputs"])
    assert any("2 of 3 files" in note for note in forced.plan.notes)
    spark_abs.open(root, spark).restore("latest")  # what is after it is there
    start(job_of(spark, tmp_path), available_now=True).await_termination()
    assert tables(tmp_path) == expected(5)

    shutil.copytree(tmp_path / "copy", source, dirs_exist_ok=True)
    spark_abs.open(root, spark).restore(early)
    start(job_of(spark, tmp_path), available_now=True).await_termination()
    assert tables(tmp_path) == expected(5)


def test_a_source_is_known_by_its_location_however_it_is_named(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "in", 0)
    spark.sql(f"CREATE TABLE named_source USING delta LOCATION '{tmp_path / 'in'}'")
    try:
        frames = [
            spark.readStream.table("named_source"),
            spark.readStream.format("delta").table("default.named_source"),
            spark.readStream.format("delta").load(f"file://{tmp_path}/in"),
        ]
        for frame in frames:
            assert source_shapes(frame) == (SourceShape("delta", str(tmp_path / "in")),)
            assert source_shapes(frame)[0].at == ""
        feed = spark.readStream.option("readChangeFeed", "true").option("startingVersion", 0)
        assert source_shapes(feed.table("named_source"))[0].at == "changes"
    finally:
        spark.sql("DROP TABLE named_source")
