"""Files that a streaming frame does not read: never opened, in whatever plan the source stands."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_abs.plan.fingerprint import operator_shapes, source_shapes
from spark_abs.snapshots.file_sources import FileSources
from spark_abs.spark.file_streams import without_files
from spark_abs.store.storage import Place

TORN, FAILED = "to rn %é.json.gz", "failed"
OFTEN = ("read twice", "totals")
"""Plans of every run of the tests; the others have other operators around the same filter."""


class Input:
    """A directory of partitions; one of its files cannot be read, and a query has failed over it."""

    def __init__(self, spark: SparkSession, base: Path) -> None:
        self.spark, self.base = spark, base
        self.directory = base / "in put"
        for day in (1, 2):
            (self.directory / f"day={day}").mkdir(parents=True)
            (self.directory / f"day={day}" / "whole.json").write_text(f'{{"id": {day}}}\n{{"id": {day}}}\n')
        whole = gzip.compress(b'{"id": 9}\n' * 5_000)
        (self.directory / "day=2" / TORN).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(StreamingQueryException, match=r"to%20rn%20%25é\.json\.gz"):
            self.rows(self.stream(), "append", FAILED)
        planned = FileSources(Place(str(base / FAILED))).planned()
        (self.torn,) = (file for file in planned if file.endswith(".gz"))

    def stream(self, schema: str = "id long, day long") -> DataFrame:
        return self.spark.readStream.schema(schema).json(str(self.directory))

    def rows(self, frame: DataFrame, mode: str, name: str) -> list[tuple[object, ...]]:
        """Return what a query of a frame has put out when it has read everything."""
        found: list[tuple[object, ...]] = []
        query = (
            frame.writeStream.outputMode(mode)
            .option("checkpointLocation", str(self.base / name))
            .foreachBatch(lambda rows, _: found.extend(tuple(row) for row in rows.collect()))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sorted(found, key=str)


Made = Callable[[Input], DataFrame]
PLANS: dict[str, tuple[Made, str, list[tuple[object, ...]]]] = {
    "its own metadata": (
        lambda given: given.stream().select("id", "_metadata.file_name").distinct(),
        "append",
        [(1, "whole.json"), (2, "whole.json")],
    ),
    "a column of that name": (
        lambda given: given.stream("id long, day long, _metadata string").select("_metadata", "id"),
        "append",
        [(None, 1), (None, 1), (None, 2), (None, 2)],
    ),
    "read twice": (
        lambda given: (lambda one: one.where("id = 1").union(one.where("id = 2")))(given.stream()),
        "append",
        [(1, 1), (1, 1), (2, 2), (2, 2)],
    ),
    "totals": (lambda given: given.stream().groupBy("id").count(), "update", [(1, 2), (2, 2)]),
    "windows": (
        lambda given: (
            given.stream()
            .withColumn("at", F.timestamp_seconds(F.col("id") * 100))
            .withWatermark("at", "1 second")
            .groupBy(F.window("at", "10 seconds"), "id")
            .count()
            .select("id", "count")
        ),
        "append",
        [(1, 2)],
    ),
    "grouped in Python": (
        lambda given: (
            given.stream()
            .groupBy("id")
            .applyInPandasWithState(
                lambda key, rows, state: rows, "id long, day long", "n long", "update", "NoTimeout"
            )
        ),
        "update",
        [(1, 1), (1, 1), (2, 2), (2, 2)],
    ),
}


@pytest.fixture(scope="module")
def given(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Input:
    return Input(spark, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in PLANS],
)
def test_a_skipped_file_is_not_opened_and_the_rest_of_its_batch_is_read(given: Input, name: str) -> None:
    """Sources and state are those of the frame that was declared."""
    made, mode, expected = PLANS[name]
    frame = made(given)
    without = without_files(frame, [given.torn])
    assert source_shapes(without) == source_shapes(frame)
    assert operator_shapes(without) == operator_shapes(frame)
    assert without.schema == frame.schema
    assert given.rows(without, mode, name) == expected


def test_a_query_goes_on_from_the_plan_of_the_batch_that_failed(given: Input) -> None:
    without = without_files(given.stream(), [given.torn])
    assert given.rows(without, "append", FAILED) == [(1, 1), (1, 1), (2, 2), (2, 2)]


def test_a_frame_without_skipped_files_stays_as_it_is(spark: SparkSession, given: Input) -> None:
    frame = given.stream()
    assert without_files(frame, []) is frame
    rates = spark.readStream.format("rate").load()
    assert without_files(rates, [given.torn]).schema == rates.schema
