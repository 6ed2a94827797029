"""Wrapped queries of which one reads the other's table: cuts that fit, and the way back of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import spark_abs
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import StageId
from spark_abs.restore import steps
from spark_abs.sinks.delta import spark_writer
from spark_abs.snapshots.table_edges import commits_at, edges_of, misaligned
from spark_abs.store.root import Root
from spark_abs.store.table import Table
from tests.job_support import Feed
from tests.wrapped_support import SCHEMA, append_to, begin, command, holds, ids, stop, wait


class Line:
    """Queries one behind the other: each reads the table of the one before, the first one files."""

    where = "true"
    """Which of its rows."""

    def __init__(self, spark: SparkSession, base: Path, *names: str, **options: str) -> None:
        self.spark, self.names, self.options = spark, names, options
        self.root = str(base / "root")
        self.feed = Feed(spark, base / "in", SCHEMA)
        self.tables = {name: str(base / f"out-{name}") for name in names}

    def frame(self, name: str) -> DataFrame:
        place = self.names.index(name)
        if not place:
            return self.feed.stream()
        read = self.spark.readStream.format("delta").options(**self.options)
        return read.load(self.tables[self.names[place - 1]]).where(self.where).select("id")

    def start(self, name: str, every: str = "0 seconds", timeout: str = "10m") -> StreamingQuery:
        table, write = self.tables[name], self.function(name)
        return begin(self.frame(name), self.root, name, table, every=every, timeout=timeout, function=write)

    def function(self, name: str) -> Callable[[DataFrame, int], None]:
        return append_to(self.tables[name])

    @contextmanager
    def running(self, until: list[int]) -> Iterator[list[StreamingQuery]]:
        """Start all, first the first; let the last one have rows; stop all when they are idle."""
        queries: list[StreamingQuery] = []
        try:
            for name in self.names:
                queries.append(self.start(name))
                wait(partial(DeltaTable.is_deltatable, self.tables[name]), "a table", queries[-1])
            self.wait_for(until, queries)
            yield queries
        finally:
            stop(self.root, *queries)

    @contextmanager
    def begun(self) -> Iterator[list[StreamingQuery]]:
        """Let all have ended two batches: a query that reads a table takes part from its second one on."""
        self.feed.write({"id": 1})
        with self.running([1]) as queries:
            self.feed.write({"id": 2})
            self.wait_for([1, 2], queries)
            yield queries

    def wait_for(self, rows: list[int], queries: list[StreamingQuery]) -> None:
        def there() -> bool:
            for query in queries:
                assert query.isActive, query.exception()
            return all(holds(table, rows) for table in self.tables.values())

        wait(there, f"rows {rows[-1:]}")

    def checkpoints(self) -> list[Manifest]:
        return list(Checkpoints.open(Root(self.root), "queries").load_all())


class MergedLine(Line):
    """The first query merges: its commits add more files than they have files of changes."""

    where = "_change_type = 'insert'"

    def function(self, name: str) -> Callable[[DataFrame, int], None]:
        table = self.tables[name]
        if self.names.index(name):
            return append_to(table)

        def merge(batch: DataFrame, number: int) -> None:
            session = batch.sparkSession
            if number == 0:
                append_to(table)(batch, number)
                return
            session.conf.set("spark.sql.shuffle.partitions", 8)
            session.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")
            batch.createOrReplaceTempView("new")
            session.sql(
                f"MERGE INTO delta.`{table}` old USING new ON old.id = new.id "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )

        return merge


@pytest.fixture
def feeds(spark: SparkSession) -> Iterator[None]:
    """Let new tables have a change feed."""
    name = "spark.databricks.delta.properties.defaults.enableChangeDataFeed"
    spark.conf.set(name, "true")
    yield
    spark.conf.unset(name)


def test_both_go_back_together_from_checkpoints_under_load(spark: SparkSession, tmp_path: Path) -> None:
    """Each checkpoint fits, and after a way back, and one to what that undid, every row is there once."""
    line = Line(spark, tmp_path, "writes", "reads")
    with line.begun() as queries:
        assert command(line.root, "good", queries[0]).ok
        line.feed.write_all([[{"id": number}] for number in range(3, 9)])
        line.wait_for(list(range(1, 9)), queries)
        assert command(line.root, "later", queries[0]).ok
    taken = [one for one in line.checkpoints() if len(one.stages) == 2]
    storage = Root(line.root).storage
    assert [len(list(edges_of(one.stages, storage))) for one in taken] == [1] * len(taken)
    assert [misaligned(one.stages, storage) for one in taken] == [""] * len(taken)

    rows = list(range(1, 9))
    for at, checkpoint in enumerate(("good", "later")):
        result = spark_abs.open(line.root).restore(checkpoint)
        assert ids(line.tables["writes"]) == ids(line.tables["reads"])
        assert any("continues to read it behind that" in step.sentence() for step in result.plan.steps)
        assert spark_abs.open(line.root).verify().num_rows == 0
        rows.append(9 + at)
        line.feed.write({"id": 9 + at})
        with line.running(rows):
            pass


def test_a_restore_that_is_killed_before_it_moves_the_reader_is_repeated(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is back, the position is not yet; others have compacted the table, and added a row."""
    line = Line(spark, tmp_path, "writes", "reads")
    with line.begun() as queries:
        DeltaTable(line.tables["writes"]).optimize.compact()
        assert command(line.root, "good", queries[0]).ok
        write_deltalake(line.tables["writes"], pa.table({"id": pa.array([3], pa.int64())}), mode="append")
        line.wait_for([1, 2, 3], queries)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "continue_at", killed)
        with pytest.raises(KeyboardInterrupt):
            spark_abs.open(line.root).restore("good")
    assert ids(line.tables["writes"]) == [1, 2]
    spark_abs.open(line.root).restore("good")
    line.feed.write({"id": 4})
    with line.running([1, 2, 4]):
        pass


@pytest.mark.long
@pytest.mark.parametrize("option", ["skipChangeCommits", "readChangeFeed"])
def test_three_in_a_line_that_do_not_fail_at_changes(
    spark: SparkSession, tmp_path: Path, option: str, feeds: None
) -> None:
    """They would get rows twice if their positions did not go back with the tables."""
    line = Line(spark, tmp_path, "bronze", "silver", "gold", **{option: "true"})
    with line.begun() as queries:
        assert command(line.root, "good", queries[0]).ok
        line.feed.write_all([[{"id": number}] for number in range(3, 8)])
        line.wait_for(list(range(1, 8)), queries)
        assert command(line.root, "later", queries[0]).ok
    for at, checkpoint in enumerate(("good", "later")):
        spark_abs.open(line.root).restore(checkpoint)
        assert len({tuple(ids(table)) for table in line.tables.values()}) == 1
        line.feed.write({"id": 8 + at})
        with line.running(list(range(1, 9 + at))):
            pass


@pytest.mark.long
def test_the_feed_of_a_table_that_is_merged_is_read_to_its_end(
    spark: SparkSession, tmp_path: Path, feeds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta leaves the reader at the last file of changes, of which a merge has fewer than it adds files.

    Such a table goes back by two commits, and a row that others add between them is read, too.
    """
    line = MergedLine(spark, tmp_path, "writes", "reads", readChangeFeed="true")
    line.feed.write(*({"id": number} for number in range(20)))
    with line.running(list(range(20))) as queries:
        line.feed.write({"id": 0}, {"id": 20})
        line.wait_for(list(range(21)), queries)
        assert command(line.root, "good", queries[0]).ok
        line.feed.write({"id": 1}, {"id": 21})
        line.wait_for(list(range(22)), queries)
    good = next(one for one in line.checkpoints() if one.name == "good")
    (edge,) = edges_of(good.stages, Root(line.root).storage)
    merged = commits_at(Root(line.root).storage, edge.table)(edge.version)
    assert merged is not None
    assert merged.read_plain > merged.read_as_feed

    def mark_late(session: SparkSession, table: Table, stamp: spark_writer.Stamp) -> None:
        if stamp.app.endswith("/restore") and table.uri.endswith("/out-writes"):
            spark.range(90, 91).write.format("delta").mode("append").save(table.uri)
        mark(session, table, stamp)

    mark = spark_writer.mark
    with monkeypatch.context() as patch:
        patch.setattr(spark_writer, "mark", mark_late)
        spark_abs.open(line.root).restore("good")
    assert ids(line.tables["reads"]) == list(range(21))
    assert ids(line.tables["writes"]) == [*range(21), 90]
    line.feed.write({"id": 2}, {"id": 22})
    with line.running([*range(23), 90]):
        pass


@pytest.mark.long
def test_a_savepoint_fails_while_the_reader_does_not_run_and_has_not_read_all(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The answer names both versions; the writer is held up for no longer. With the reader it succeeds."""
    line = Line(spark, tmp_path, "writes", "reads")
    with line.begun() as queries:
        assert command(line.root, "both", queries[0]).ok
        queries[1].processAllAvailable()
        queries[1].stop()
        line.feed.write({"id": 3})
        wait(partial(holds, line.tables["writes"], [1, 2, 3]), "a row that is not read", queries[0])
        answer = command(line.root, "alone", queries[0])
        assert not answer.ok
        assert "query 'reads' has read" in answer.message
        line.feed.write({"id": 4})
        wait(partial(holds, line.tables["writes"], [1, 2, 3, 4]), "the writer goes on", queries[0])
        queries[1] = line.start("reads")
        line.wait_for([1, 2, 3, 4], queries)
        assert command(line.root, "again", queries[0]).ok
    spark_abs.open(line.root).restore("again")
    line.feed.write({"id": 5})
    with line.running([1, 2, 3, 4, 5]):
        pass


@pytest.mark.long
def test_a_reader_with_a_long_trigger_holds_its_writer_up_for_a_timeout_only(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The savepoint fails, the log has both versions, and the writer goes on."""
    line = Line(spark, tmp_path, "writes", "reads")
    with line.begun():
        pass
    line.feed.write({"id": 3})
    writer = line.start("writes", timeout="2s")
    wait(partial(holds, line.tables["writes"], [1, 2, 3]), "a row that is not read", writer)
    reader = line.start("reads", every="1 hour")
    wait(partial(holds, line.tables["reads"], [1, 2, 3]), "the only batch of the reader", reader)
    for number in (4, 5):
        line.feed.write({"id": number})
        rows = list(range(1, number + 1))
        wait(partial(holds, line.tables["writes"], rows), "the writer goes on", writer)
        answer = command(line.root, f"held-{number}", writer)
        assert not answer.ok
        assert "without reads" in answer.message
        assert f"until the beginning of version 3, and the table was at version {number - 1}" in caplog.text
    reader.stop()
    stop(line.root, writer)


@pytest.mark.long
def test_a_writer_that_waits_for_its_reader_may_be_stopped(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not wait to the end; the batch that has not begun is the next run's."""
    line, rows = Line(spark, tmp_path, "writes", "reads"), [1, 2]
    with line.begun():
        pass
    writer, reader = line.start("writes"), line.start("reads", every="1 hour")

    def waits() -> bool:
        if holds(line.tables["writes"], rows):  # its batches have come before the barrier so far
            rows.append(rows[-1] + 1)
            line.feed.write({"id": rows[-1]})
        told = {stage.stage: stage.activity for stage in spark_abs.open(line.root).status().stages}
        writes = told.get(StageId("writes"))
        return writes is not None and writes.what == "the readers of its tables"

    wait(waits, "a batch waits for the reader", writer)
    caplog.clear()
    writer.stop()
    assert "has waited for that for" not in caplog.text
    assert writer.exception() is None
    reader.stop()
    stop(line.root)
    with line.running(rows):
        pass
