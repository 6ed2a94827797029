"""One existing query with two changed lines: checkpoints, a savepoint, the way back, adoption."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_BATCH, StageId
from spark_abs.observe.headline import headline
from spark_abs.observe.status import StageStatus
from spark_abs.store.activity import Phase, StageActivity
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from tests.job_support import EPOCH, Feed
from tests.wrapped_support import SCHEMA, append_to, begin, command, covers, holds, ids, running, stop, wait


@pytest.mark.parametrize("app", ["", "an id of its own"])
def test_savepoint_and_the_way_back(spark: SparkSession, tmp_path: Path, app: str) -> None:
    """Wrong rows are let in, the table and the query go back together, the right ones follow."""
    feed, root, table = Feed(spark, tmp_path / "in", SCHEMA), str(tmp_path / "root"), str(tmp_path / "out")
    feed.write_all([[{"id": 1}], [{"id": 2}]])
    with running(feed.stream(), root, "copy", table, app=app) as query:
        wait(lambda: ids(table) == [1, 2], "both rows", query)
        assert command(root, "good", query).ok
        feed.write({"id": -1})
        wait(lambda: -1 in ids(table), "the wrong row", query)
    plan = spark_abs.open(root).restore("good").plan
    assert ids(table) == [1, 2]
    assert plan.attempt == 2
    (wrong,) = [p for p in (tmp_path / "in").iterdir() if "-1" in p.read_text()]
    wrong.unlink()
    feed.write({"id": 3})
    with running(feed.stream(), root, "copy", table, app=app) as query:
        wait(lambda: ids(table) == [1, 2, 3], "the right row", query)


def test_status_shows_a_query_from_its_first_batch_on_and_after_its_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What the open checkpoint waits for is the function that is called; no checkpoint is complete yet."""
    root, table = str(tmp_path / "root"), str(tmp_path / "table")
    feed, freed = Feed(spark, tmp_path / "in", "id long, ts long"), threading.Event()
    write = append_to(table)

    def held(batch: DataFrame, number: int) -> None:
        write(batch, number)
        assert freed.wait(120)

    def stage() -> StageStatus | None:
        return next(iter(spark_abs.open(root).status().stages), None)

    def told() -> StageActivity:
        found = stage()
        return StageActivity(StageId("copy")) if found is None or found.activity is None else found.activity

    feed.write({"id": 1, "ts": 100})
    function = spark_abs.foreach_batch(held, root=root, stage="copy", interval="300ms", tables=[table])
    rows = feed.stream().withWatermark("ts", "10 seconds").dropDuplicates(["id", "ts"])
    started = rows.writeStream.foreachBatch(function)
    query = started.option("checkpointLocation", spark_abs.checkpoint_location(root, "copy")).start()
    try:
        wait(lambda: told().phase is Phase.CALLING, "the function is called", query)
        wait(lambda: (found := stage()) and found.first, "an open checkpoint waits for it", query)
        found = spark_abs.open(root).status()
        (copy,) = found.stages
        assert found.last is None
        assert (copy.planned, copy.finished) == (0, NO_BATCH)
        assert "batch 0 has been under way for " in headline(found, now_ms())
        freed.set()
        query.processAllAvailable()
        wait(lambda: told().rows_per_s is not None, "Spark's figures", query)
        wait(lambda: told().watermark_ms > 0, "a watermark", query)
        wait(partial(covers, root, "copy"), "a checkpoint", query)
    finally:
        freed.set()
        stop(root, query)
    last = stage()
    assert last is not None
    assert (last.activity, last.finished, last.finished_ms is None) == (None, last.planned, False)
    assert last.watermark_ms == (EPOCH + 90) * 1000


def test_a_backup_of_the_table_that_was_put_back_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    """Its rows would be missing for good; with the table as it was the query goes on, and loses nothing."""
    feed, root, table = Feed(spark, tmp_path / "in", SCHEMA), str(tmp_path / "root"), str(tmp_path / "out")
    kept, backup = tmp_path / "kept", tmp_path / "backup"
    feed.write({"id": 1})
    with running(feed.stream(), root, "copy", table) as query:
        wait(partial(holds, table, [1]), "the first row", query)
        shutil.copytree(table, backup)
        feed.write({"id": 2})
        wait(partial(holds, table, [1, 2]), "the second row", query)
        assert command(root, "good", query).ok
    shutil.copytree(table, kept)
    feed.write({"id": 3})
    shutil.rmtree(table)
    shutil.copytree(backup, table)
    older = DeltaTable(table).version()
    query = begin(feed.stream(), root, "copy", table)
    with pytest.raises(StreamingQueryException, match=f"is at version {older}, and was at {older + 1}"):
        query.awaitTermination()
    stop(root)
    assert ids(table) == [1]
    shutil.rmtree(table)
    shutil.copytree(kept, table)
    with running(feed.stream(), root, "copy", table) as query:
        wait(partial(holds, table, [1, 2, 3]), "all rows", query)


def test_an_existing_checkpoint_is_adopted(spark: SparkSession, tmp_path: Path) -> None:
    """What the query has read so far is not read again; its old checkpoint stays as it was."""
    feed, root, table = Feed(spark, tmp_path / "in", SCHEMA), str(tmp_path / "root"), str(tmp_path / "out")
    feed.write_all([[{"id": 1}], [{"id": 2}]])
    old = tmp_path / "old"
    plain = feed.stream().writeStream.format("delta").option("checkpointLocation", str(old))
    plain.trigger(availableNow=True).start(table).awaitTermination()
    before = sorted(p.relative_to(old) for p in old.rglob("*"))
    feed.write({"id": 3})
    for number in (4, 5):  # the second start finds what was adopted and goes on from there
        expected = list(range(1, number))
        with running(feed.stream(), root, "copy", table, adopt=str(old)) as query:
            wait(partial(holds, table, expected), "only what is new", query)
            wait(lambda: Checkpoints.open(Root(root), "queries").summaries(), "a checkpoint", query)
        feed.write({"id": number})
    spark_abs.open(root).restore("latest")
    with running(feed.stream(), root, "copy", table, adopt=str(old)) as query:  # as the script still says
        wait(partial(holds, table, [1, 2, 3, 4, 5]), "on from what was restored", query)
    assert sorted(p.relative_to(old) for p in old.rglob("*")) == before


def test_a_reader_of_another_root_ends_at_the_restore_of_the_writer(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the pair, and the plan what a restore does to such a reader: no row comes to it twice.

    Unless it passes over changes, as Delta's error advises: so the guide does not.
    """
    feed, first, second = (
        Feed(spark, tmp_path / "in", SCHEMA),
        str(tmp_path / "first"),
        str(tmp_path / "second"),
    )
    roots = str(tmp_path / "writers"), str(tmp_path / "readers")

    def read(**options: str) -> DataFrame:
        return spark.readStream.format("delta").options(**options).load(first)

    feed.write({"id": 1})
    with running(feed.stream(), roots[0], "writes", first) as writer:
        wait(lambda: ids(first) == [1], "a table", writer)
        assert command(roots[0], "good", writer).ok
        with running(read(), roots[1], "reads", second) as reader:
            feed.write({"id": 2})
            wait(lambda: ids(second) == [1, 2], "both rows", reader)
            assert command(roots[1], "beyond", reader).ok
    (warning,) = {
        r.getMessage() for r in caplog.records if "reads" in r.getMessage() and first in r.getMessage()
    }
    assert warning.startswith(
        f"query 'reads' reads {first}, which query 'writes' of the root {roots[0]} writes"
    )

    plan = spark_abs.open(roots[0]).restore("good").plan
    assert any(f"{first} loses rows" in note for note in plan.notes)
    with running(feed.stream(), roots[0], "writes", first) as writer:
        wait(lambda: ids(first) == [1, 2], "the row again", writer)
    reader = begin(read(), roots[1], "reads", second)
    wait(lambda: not reader.isActive, "the reader ends")
    assert "DELTA_SOURCE_IGNORE_DELETE" in str(reader.exception())
    assert ids(second) == [1, 2]
    with running(read(skipChangeCommits="true"), roots[1], "reads", second) as reader:
        wait(lambda: ids(second) == [1, 2, 2], "the row twice", reader)


def test_another_checkpoint_location_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A query whose offsets are elsewhere cannot be captured; it is told which location to use."""
    feed, root = Feed(spark, tmp_path / "in", SCHEMA), str(tmp_path / "root")
    feed.write({"id": 1})
    function = spark_abs.foreach_batch(append_to(str(tmp_path / "out")), root=root, stage="copy")
    writer: Any = feed.stream().writeStream.foreachBatch(function)
    query = writer.option("checkpointLocation", str(tmp_path / "elsewhere")).start()
    wait(lambda: not query.isActive, "the query is refused")
    assert "does not run on spark_abs.checkpoint_location" in str(query.exception())
    assert not (tmp_path / "out").exists()
