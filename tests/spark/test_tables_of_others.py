"""What others do to the table of a sink while a job runs; each line of the guide's table is run here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.errors import CommitConflict, Refused, StageFailed, TableChanged, UsageError
from spark_abs.model import AttemptId, BatchId, CheckpointId, RunId, SinkWriter, StageId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.create import ensure_sink
from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink
from spark_abs.sinks.delta.options import Delta, EpochTable
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.channel_support import JOB, NUMBERS
from tests.job_support import Feed
from tests.spark.conftest import Start
from tests.spark.test_delta_epochs import Some

GUIDE = Path(spark_abs.__file__).parent / "guide" / "shared-tables.md"
OWN = Own(JOB, "a", frozenset())
Sql = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    """What others do, `t` being the table, and what the job makes of its next batch, `[3]` after `[1, 2]`."""

    does: tuple[str, ...]
    rows: tuple[int, ...] = (1, 2, 3)
    refused: str = ""
    back: bool = True
    """Whether a restore to before goes back unforced."""


NAME = "table_of_others"
REPLACED = "OVERWRITE SELECT CAST(n AS {}) AS n, 'x' AS m FROM t WHERE false"
LINES = {
    "add rows": Line(("INSERT INTO t VALUES (10)",), (1, 2, 3, 10), back=False),
    "change or delete rows": Line(("DELETE FROM t WHERE n = 1",), (2, 3), back=False),
    "`OPTIMIZE`": Line(("INSERT INTO t SELECT 0 WHERE false", "OPTIMIZE t")),
    "`VACUUM`": Line(("VACUUM t",)),
    "`RESTORE` to an older version": Line(("RESTORE TABLE t TO VERSION AS OF 0",), (3,), back=False),
    "overwrite all rows": Line(("INSERT OVERWRITE t VALUES (10)",), (3, 10), back=False),
    "add a column": Line(("ALTER TABLE t ADD COLUMN m STRING",)),
    "set a property, a constraint or a feature": Line(
        (
            "ALTER TABLE t ADD CONSTRAINT small CHECK (n < 100)",
            "ALTER TABLE t SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')",
        )
    ),
    "overwrite it with `overwriteSchema`, keeping the columns of the rows": Line(
        (REPLACED.format("BIGINT"),), (3,), back=False
    ),
    "overwrite it with `overwriteSchema` so that a column of the rows is missing or has another type": Line(
        (REPLACED.format("STRING"),), (), "column n is string in it, and long in the rows"
    ),
    "rename or drop a column of the rows": Line(
        (
            "ALTER TABLE t SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",
            "ALTER TABLE t RENAME COLUMN n TO m",
        ),
        (),
        "it has no column n",
    ),
    "replace it (`CREATE OR REPLACE TABLE`)": Line(("REPLACE (n BIGINT)",), (), "it is another table"),
    "drop it and create it again": Line(
        ("DROP", "CREATE TABLE t (n BIGINT) USING delta"), (), "it was made anew: it is at version 0"
    ),
}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def sql(spark: SparkSession, uri: str) -> Sql:
    """Run a statement of somebody else's, with `t` for the table."""
    theirs = spark.newSession()

    def run(statement: str) -> None:
        kind, _, query = statement.partition(" ")
        at = f"delta.`{uri}`"
        if kind == "DROP":
            shutil.rmtree(uri)
        elif kind == "REPLACE":
            theirs.sql(f"CREATE TABLE {NAME} USING delta LOCATION '{uri}'")
            theirs.sql(f"CREATE OR REPLACE TABLE {NAME} {query} USING delta LOCATION '{uri}'")
            theirs.sql(f"DROP TABLE {NAME}")
        elif kind == "OVERWRITE":
            found = theirs.sql(re.sub(r"\bt\b", at, query))
            found.write.format("delta").mode("overwrite").option("overwriteSchema", True).save(uri)
        else:
            theirs.sql(re.sub(r"\bt\b", at, statement)).collect()

    return run


Open = Callable[..., DeltaSink]


@pytest.fixture
def sink(spark: SparkSession, tmp_path: Path, uri: str) -> Open:
    def make(attempt: int = 1, run: int = 1, begin: bool = True, key: tuple[str, ...] = ()) -> DeltaSink:
        writer = SinkWriter(JOB, "a", StageId("s"), "out", AttemptId(attempt))
        found = DeltaSink(
            Root(str(tmp_path / "a")), uri, writer=writer, run=RunId(run), session=lambda: spark, key=key
        )
        if begin:
            found.begin()
        return found

    return make


def put(spark: SparkSession, table: DeltaSink, number: int, *values: int) -> bool | None:
    frame: DataFrame = spark.createDataFrame([(value,) for value in values], NUMBERS)
    standing = table.commit_batch(table.write_files(frame, BatchId(number)), BatchId(number))
    return None if standing is None else standing.fresh


def rows(spark: SparkSession, uri: str) -> tuple[int, ...]:
    """Read the table with plain Spark."""
    return tuple(sorted(row.n for row in spark.newSession().read.format("delta").load(uri).collect()))


@pytest.mark.parametrize("what", LINES)
def test_others_change_a_table_between_two_batches(
    spark: SparkSession, uri: str, sql: Sql, sink: Open, what: str
) -> None:
    line = LINES[what]
    ensure_sink(Place(uri), NUMBERS, Delta(uri), spark)
    table = sink()
    put(spark, table, 0, 1, 2)
    cut = table.version_at(BatchId(0))
    frame = spark.createDataFrame([(3,)], NUMBERS)
    files = table.write_files(frame, BatchId(1))  # files of the table as it was
    for statement in line.does:
        sql(statement)
    before = DeltaTable(uri).version()
    if line.refused:
        with pytest.raises(TableChanged, match=re.escape(line.refused)):
            table.commit_batch(files, BatchId(1))
        with pytest.raises(TableChanged, match=re.escape(line.refused)):
            put(spark, table, 1, 3)
        assert DeltaTable(uri).version() == before
        return
    standing = table.commit_batch(files, BatchId(1))
    assert standing is not None
    assert standing.fresh
    assert put(spark, table, 1, 3) is False  # killed after the commit, and repeated
    assert rows(spark, uri) == line.rows
    back = sink(attempt=2, run=2, begin=False)
    if not line.back:
        with pytest.raises(Refused, match="was changed by others since version"):
            back.restore_to(cut, OWN)
        return
    back.restore_to(cut, OWN)
    assert rows(spark, uri) == (1, 2)
    assert put(spark, sink(attempt=2, run=3), 1, 3) is True
    assert rows(spark, uri) == line.rows


def test_the_guide_has_each_line() -> None:
    section = GUIDE.read_text().partition("## What others may do to a table while the job runs")[2]
    table = section.partition("\n## ")[0]
    first = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert first[2:] == list(LINES)


def test_what_is_new_holds_for_files_that_were_written_before(
    spark: SparkSession, uri: str, sql: Sql, sink: Open
) -> None:
    """A constraint that came after the files: rows that break it end the batch, the others get in."""
    ensure_sink(Place(uri), NUMBERS, Delta(uri), spark)
    table = sink()
    frame = spark.createDataFrame([(500,)], NUMBERS)
    files = table.write_files(frame, BatchId(0))
    sql("ALTER TABLE t ADD CONSTRAINT small CHECK (n < 100)")
    with pytest.raises(Exception, match="CHECK constraint small"):
        table.commit_batch(files, BatchId(0))
    assert put(spark, table, 0, 5) is True
    assert rows(spark, uri) == (5,)


@pytest.mark.parametrize("merge", [True, False])
def test_a_column_that_is_renamed_while_delta_writes_gets_no_nulls(
    spark: SparkSession, uri: str, sql: Sql, sink: Open, monkeypatch: pytest.MonkeyPatch, merge: bool
) -> None:
    """Between our look and Delta's: Delta refuses, ours looks again, and the table is as others left it."""
    sql(
        "CREATE TABLE t (n BIGINT) USING delta "
        "TBLPROPERTIES ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = '2', "
        "'delta.minWriterVersion' = '5')"
    )
    table = sink(key=("n",) if merge else ())
    put(spark, table, 0, 1)
    name = "merge" if merge else "append"
    writes: Callable[..., None] = getattr(spark_writer, name)

    def late(*given: Any) -> None:
        sql("ALTER TABLE t RENAME COLUMN n TO m")
        writes(*given)

    monkeypatch.setattr(spark_writer, name, late)
    spark.conf.set("spark.databricks.delta.schema.autoMerge.enabled", "true")
    try:
        with pytest.raises(TableChanged, match="it has no column n"):
            put(spark, table, 1, 2)
    finally:
        spark.conf.unset("spark.databricks.delta.schema.autoMerge.enabled")
    found = spark.newSession().read.format("delta").load(uri)
    assert (found.columns, [row.m for row in found.collect()]) == (["m"], [1])


def epochs(spark: SparkSession, tmp_path: Path, uri: str) -> tuple[DeltaEpochSink, Owner]:
    """Return a sink that writes after checkpoints, ready to send, and whose it is."""
    schema = spark.createDataFrame([], "id long, text string").schema
    ensure_sink(Place(uri), schema, Delta(uri), spark)
    owner = Owner("a", JOB, "out", RunId(1))
    made = DeltaEpochSink(EpochTable(uri), Root(str(tmp_path / "a")), lambda: spark)
    made.recover(owner)
    return made, owner


def test_rows_of_a_checkpoint_are_refused_by_a_table_that_has_changed(
    spark: SparkSession, tmp_path: Path, uri: str, sql: Sql
) -> None:
    """Also where it changes between the writing of the files and the commit."""
    made, owner = epochs(spark, tmp_path, uri)

    def send(number: int, first: bool = False) -> None:
        after, until = (Mark(AttemptId(1), CheckpointId(n), Version(10 * n)) for n in (number - 1, number))
        made.commit(Epoch(owner, after, until, first=first), Some("x", number))

    send(1, first=True)
    sql("ALTER TABLE t ADD COLUMN m STRING")
    send(2)
    sql("ALTER TABLE t SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')")
    send(3)
    sql("OVERWRITE SELECT CAST(id AS STRING) AS id, text, m FROM t")
    before = DeltaTable(uri).version()
    with pytest.raises(TableChanged, match="column id is string in it, and long in the rows"):
        send(4)
    assert DeltaTable(uri).version() == before
    sql(f"RESTORE TABLE t TO VERSION AS OF {before - 1}")
    made.recover(owner)
    send(4)
    found = spark.newSession().read.format("delta").load(uri).collect()
    assert sorted(row.id for row in found) == [1, 2, 3, 4]


def test_a_change_between_the_files_of_an_epoch_and_its_commit(
    spark: SparkSession, tmp_path: Path, uri: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table gets a constraint there: Delta's own writer takes over, and the constraint holds."""
    made, owner = epochs(spark, tmp_path, uri)
    commit_next = Table.commit_next

    def late(table: Table, commit: Any) -> Version:
        monkeypatch.undo()
        sql("ALTER TABLE t ADD CONSTRAINT small CHECK (id < 100)")
        return commit_next(table, commit)

    after, until = (Mark(AttemptId(1), CheckpointId(n), Version(10 * n)) for n in (0, 1))
    monkeypatch.setattr(Table, "commit_next", late)
    with pytest.raises(Exception, match="CHECK constraint small") as broken:
        made.commit(Epoch(owner, after, until, first=True), Some("x", 500))
    assert not isinstance(broken.value, CommitConflict)
    made.recover(owner)
    made.commit(Epoch(owner, after, until, first=True), Some("x", 5))
    assert [row.id for row in spark.newSession().read.format("delta").load(uri).collect()] == [5]


def test_a_job_whose_table_is_overwritten_with_another_schema_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, uri: str, sql: Sql, start: Start
) -> None:
    """The batch is in a channel when its table refuses it; the table comes back, and the batch comes once."""
    feed, root = Feed(spark, tmp_path / "in", "n long"), str(tmp_path / "root")

    def job() -> spark_abs.Job:
        made = spark_abs.Job("others", root=root, spark=spark, interval="1h")
        numbers = made.source("numbers", feed.stream())
        total = made.stage("total", [numbers], lambda rows: rows.groupBy().sum("n"), output_mode="complete")
        made.sink("out", numbers, table=uri)
        made.sink("sums", total, table=f"{uri}-sums")
        return made

    def run_all() -> None:
        job().start(available_now=True).await_termination()

    def sums() -> list[int]:
        return [row[0] for row in spark.newSession().read.format("delta").load(f"{uri}-sums").collect()]

    feed.write({"n": 1})
    run = start(job())
    run.query("numbers").processAllAvailable()
    run.savepoint("before")
    feed.write({"n": 2})
    run.query("numbers").processAllAvailable()
    good = DeltaTable(uri).version()
    sql("OVERWRITE SELECT CAST(n AS STRING) AS n, 'x' AS m FROM t")
    feed.write({"n": 3})
    with pytest.raises(StageFailed, match="column n is string in it, and long in the rows") as failed:
        run.await_termination()
    assert "n long" in str(failed.value)
    assert "m string" in str(failed.value)
    assert DeltaTable(uri).version() == good + 1
    with pytest.raises(UsageError, match="n: string in the table, bigint in the query"):
        run_all()
    sql(f"RESTORE TABLE t TO VERSION AS OF {good}")
    run_all()
    assert (rows(spark, uri), sums()) == ((1, 2, 3), [6])
    with pytest.raises(Refused, match="others"):
        spark_abs.open(root, spark).restore("before")
    spark_abs.open(root, spark).restore("before", force=["rows"])
    assert rows(spark, uri) == (1,)
    run_all()
    assert (rows(spark, uri), sums()) == ((1, 2, 3), [6])


def test_a_start_notices_a_table_that_is_not_what_the_last_run_left(
    spark: SparkSession, tmp_path: Path, uri: str
) -> None:
    """A backup, a table made anew, none at all: each is refused, with both values, until it is said so."""
    feed, root = Feed(spark, tmp_path / "in", "n long"), str(tmp_path / "root")
    backup, kept = tmp_path / "backup", tmp_path / "kept"

    def job(name: str = "out", **said: Any) -> spark_abs.Job:
        made = spark_abs.Job("down", root=root, spark=spark, interval="1h")
        made.sink(name, made.source("numbers", feed.stream()), table=uri, **said)
        return made

    def run_all(**said: Any) -> None:
        job(**said).start(available_now=True).await_termination()

    def put_there(place: Path | None) -> None:
        shutil.rmtree(uri, ignore_errors=True)
        if place is not None:
            shutil.copytree(place, uri)

    feed.write({"n": 1})
    run_all()
    older, table_id = DeltaTable(uri).version(), DeltaTable(uri).metadata().id
    shutil.copytree(uri, backup)
    feed.write({"n": 2})
    run_all()
    shutil.copytree(uri, kept)
    at = DeltaTable(uri).version()

    put_there(backup)
    with pytest.raises(TableChanged, match=rf"is at version {older}, older than version \d+ of the newest"):
        run_all()
    assert any(f"is at version {older}" in said for said in job().check().obstacles)
    assert DeltaTable(uri).version() == older
    put_there(None)
    with pytest.raises(TableChanged, match=f"is gone: its id was {table_id}"):
        run_all()
    assert not Path(uri).exists()
    spark.range(0).selectExpr("id AS n").write.format("delta").save(uri)
    with pytest.raises(
        TableChanged, match=f"was replaced by a different table: .* recorded id is {table_id}"
    ):
        run_all()
    assert DeltaTable(uri).version() == 0

    put_there(kept)
    feed.write({"n": 3})
    run_all()
    assert rows(spark, uri) == (1, 2, 3)
    assert DeltaTable(uri).version() > at
    put_there(None)
    spark.range(0).selectExpr("id AS n").write.format("delta").save(uri)
    feed.write({"n": 4})
    run_all(existing="take_over")
    assert rows(spark, uri) == (4,)
    feed.write({"n": 5})
    run_all(existing="take_over")
    assert rows(spark, uri) == (4, 5)
    put_there(None)
    spark.range(0).selectExpr("id AS n").write.format("delta").save(uri)
    with pytest.raises(TableChanged, match=r"declare it with existing='take_over' \(run \d+ has used"):
        run_all(existing="take_over")
    feed.write({"n": 6})
    job("anew", existing="take_over").start(available_now=True).await_termination()
    assert rows(spark, uri) == (6,)


def test_without_a_checkpoint_a_start_from_one_looks_at_the_table_too(
    spark: SparkSession, tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on from where the job is: rows that are gone with the table would not come again."""
    feed, root = Feed(spark, tmp_path / "in", "n long"), str(tmp_path / "root")

    def job() -> spark_abs.Job:
        made = spark_abs.Job("down", root=root, spark=spark, interval="1h")
        made.sink("out", made.source("numbers", feed.stream()), table=uri)
        return made

    feed.write({"n": 1})
    run = job().start()
    run.query("numbers").processAllAvailable()
    run.stop()
    assert rows(spark, uri) == (1,)
    shutil.rmtree(uri)
    with pytest.raises(TableChanged, match="is gone"):
        job().start(available_now=True, restart="checkpoint")
    assert "the stages resume after their last batches" in caplog.text
    assert not Path(uri).exists()
