"""Plain queries whose source or operator stores what others do not: run, rewound by the command, run again.

What tables must hold in the end is computed from the input alone, as of a run that was never rewound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from spark_abs.cli.main import main
from spark_abs.cli.root_command import Context
from tests.job_support import Feed, read_table

Rows = list[tuple[Any, ...]]
CHANGES = "k BIGINT, id BIGINT"


class Running(StatefulProcessor):
    """Counts the rows of each key, and gives each its number."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key, rows, timerValues):  # type: ignore[no-untyped-def] # noqa: N802, N803
        (n,) = self.count.get() or (0,)
        for _ in rows:
            n += 1
            yield Row(k=key[0], n=n)
        self.count.update((n,))

    def close(self) -> None:
        pass


@dataclass
class Queries:
    """Files to `first`, which `second` reads; each query has a checkpoint and a table of its name."""

    spark: SparkSession
    base: Path

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "in", "id long, k long")

    def table(self, name: str) -> str:
        return str(self.base / "t" / name)

    def arrive(self, *ids: int) -> None:
        """Write a file with a row of each id; there are three keys."""
        self.feed.write(*({"id": i, "k": i % 3} for i in ids))

    def rows(self, table: str) -> Rows:
        return sorted(tuple(row.values()) for row in read_table(self.base / "t" / table).to_pylist())

    def reader(self, **options: str) -> DataFrame:
        reader = self.spark.readStream.format("delta").option("maxFilesPerTrigger", 1)
        return reader.options(**options).load(self.table("first"))

    def run(
        self, name: str, frame: DataFrame, function: Callable[[DataFrame, int], None] | None = None
    ) -> None:
        """Run a query to the end of what is there."""
        writer = frame.writeStream.option("checkpointLocation", str(self.base / "c" / name))
        if function is None:
            writer = writer.format("delta").option("path", self.table(name))
        else:
            writer = writer.foreachBatch(function)
        writer.trigger(availableNow=True).start().awaitTermination()

    def rewind(self, *arguments: str, exit_code: int = 0) -> str:
        given = ["--checkpoints", f"{self.base}/c/*", "--tables", f"{self.base}/t/*", *arguments]
        done = CliRunner().invoke(main, ["rewind", *given], obj=Context(pause=lambda _: None))
        assert done.exit_code == exit_code, done.output
        return done.output


@pytest.fixture
def queries(spark: SparkSession, tmp_path: Path) -> Queries:
    return Queries(spark, tmp_path)


def test_state_of_a_transform_with_state_goes_back_with_its_tables(queries: Queries) -> None:
    """Each row gets its number within its key: also after a rewind, from RocksDB's changelogs."""

    def run() -> None:
        queries.run("first", queries.feed.stream())
        numbered = (
            queries.reader().groupBy("k").transformWithState(Running(), "k long, n long", "append", "None")
        )
        queries.run("second", numbered)

    def is_whole() -> None:
        keys = [row["k"] for file in queries.feed.files for row in file]
        numbered = [(k, n + 1) for k in range(3) for n in range(keys.count(k))]
        assert queries.rows("second") == numbered

    for file in range(4):
        queries.arrive(*range(5 * file, 5 * file + 5))
        run()
    is_whole()
    changelogs = list((queries.base / "c/second/state").rglob("*.changelog"))
    assert changelogs
    for batch in (2, 0):
        queries.rewind("--at", f"second={batch}", "--yes")
        assert len(queries.rows("second")) == 5 * (batch + 1)
        queries.arrive(batch, batch + 1)
        run()
        is_whole()


def state_after(files: list[list[Any]]) -> tuple[Rows, Rows]:
    """Return the rows of a table of the newest id of each key, and its changes."""
    newest, changes = dict[Any, Any](), Rows()
    for row in (row for file in files for row in file):
        k, before = row["k"], newest.get(row["k"])
        if before is None:
            changes.append((k, row["id"], "insert"))
        else:
            changes += [(k, before, "update_preimage"), (k, row["id"], "update_postimage")]
        newest[k] = row["id"]
    return sorted(newest.items()), sorted(changes)


@pytest.mark.long
@pytest.mark.parametrize("start", [{"startingVersion": "0"}, {}], ids=["from the start", "from a snapshot"])
def test_a_reader_of_a_change_feed_goes_back_with_its_source(queries: Queries, start: dict[str, str]) -> None:
    """A MERGE changes rows; its reader reads each change once, and nothing of the restore of the table.

    After a MERGE that updates rows the offset names the last file of the version, which is read whole: no
    query goes back further than the batch that was asked for.
    """
    queries.spark.sql(
        f"CREATE TABLE delta.`{queries.table('first')}` ({CHANGES}) USING delta "
        "TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"
    )

    def merge(batch: DataFrame, number: int) -> None:
        session = batch.sparkSession
        session.conf.set("spark.databricks.delta.write.txnAppId", "newest-of-key")
        session.conf.set("spark.databricks.delta.write.txnVersion", str(number))
        batch.createOrReplaceTempView("fresh")
        session.sql(
            f"MERGE INTO delta.`{queries.table('first')}` t USING fresh s ON t.k = s.k "
            "WHEN MATCHED THEN UPDATE SET id = s.id WHEN NOT MATCHED THEN INSERT (k, id) VALUES (s.k, s.id)"
        )
        for name in ("txnAppId", "txnVersion"):
            session.conf.unset(f"spark.databricks.delta.write.{name}")

    def run() -> None:
        queries.run("first", queries.feed.stream(), merge)
        feed = queries.reader(readChangeFeed="true", **start)
        queries.run("second", feed.select("k", "id", F.col("_change_type").alias("how")))

    def hold(files: list[list[Any]]) -> None:
        assert (queries.rows("first"), queries.rows("second")) == state_after(files)

    for file in range(4):
        queries.arrive(2 * file, 2 * file + 1)
        run()
    hold(queries.feed.files)
    offsets = sorted((queries.base / "c/second/offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert json.loads(offsets[-1].read_text().split("\n")[-1])["index"] == 0, "it stays at the last file"
    for batch in (2, 1):
        queries.rewind("--at", f"first={batch}", "--yes")
        hold(queries.feed.files[: batch + 1])
        queries.arrive(10 + batch)
        run()
        hold(queries.feed.files)


@pytest.fixture
def renames(spark: SparkSession) -> Iterator[None]:
    name = "spark.databricks.delta.streaming.allowSourceColumnRename"
    spark.conf.set(name, "always")
    yield
    spark.conf.unset(name)


@pytest.mark.long
@pytest.mark.usefixtures("renames")
def test_the_tracked_schema_of_a_source_goes_back_with_its_query(queries: Queries) -> None:
    """Rows of before the rename have the old name again; the query ends at the change again, and goes on."""
    notes = f"delta.`{queries.base}/notes`"

    def run() -> int:
        for ended in range(4):
            tracking = str(queries.base / "c/seen/schemas")
            reader = queries.spark.readStream.format("delta").option("schemaTrackingLocation", tracking)
            frame = reader.load(str(queries.base / "notes"))
            try:
                seen = frame.select("id", F.lit(frame.columns[1]).alias("called"))
                queries.run("seen", seen)
            except StreamingQueryException as error:
                if "DELTA_STREAMING_METADATA_EVOLUTION" not in str(error):
                    raise
            else:
                return ended
        raise AssertionError("it does not come past a change")

    queries.spark.sql(
        f"CREATE TABLE {notes} (id BIGINT, note STRING) USING delta "
        "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    )
    queries.spark.sql(f"INSERT INTO {notes} VALUES (1, 'a')")
    run()
    queries.spark.sql(f"INSERT INTO {notes} VALUES (2, 'b')")
    run()
    queries.spark.sql(f"ALTER TABLE {notes} RENAME COLUMN note TO title")
    queries.spark.sql(f"INSERT INTO {notes} VALUES (3, 'c')")
    assert run() == 1
    whole = [(1, "note"), (2, "note"), (3, "title")]
    assert queries.rows("seen") == whole
    queries.rewind("--at", "seen=0", "--yes")
    assert queries.rows("seen") == whole[:1]
    assert run() == 1
    assert queries.rows("seen") == whole
