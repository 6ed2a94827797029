"""Changes of keys in Delta tables end as a look at the whole input says, however it is cut into batches."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from spark_abs.errors import DamageError, UsageError
from spark_abs.model import AttemptId, BatchId, CheckpointId, RunId, SinkWriter, StageId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.create import check_sink, ensure_sink
from spark_abs.sinks.delta.epoch_files import ORDER
from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink
from spark_abs.sinks.delta.merge_changes import in_files
from spark_abs.sinks.delta.options import Delta, EpochTable
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

SCHEMA = t.StructType(
    [
        t.StructField("country", t.StringType()),
        t.StructField("id", t.LongType()),
        t.StructField("ts", t.IntegerType()),
        t.StructField("op", t.StringType()),
        t.StructField("a", t.IntegerType()),
        t.StructField("b", t.StringType()),
    ]
)
KEY = ("country", "id")
JOB = "job"
OPTIONS: dict[str, dict[str, Any]] = {
    "by sequence": {"sequence_by": "ts", "apply_as_deletes": "op = 'D'", "except_columns": "op"},
    "by arrival": {"apply_as_deletes": "op = 'D'"},
    "history": {
        "sequence_by": "ts",
        "apply_as_deletes": "op = 'D'",
        "scd_type": 2,
        "except_columns": ["op", "ts"],
    },
    "partial": {"sequence_by": "ts", "apply_as_deletes": "op = 'D'", "ignore_null_updates": True},
}
Change = tuple[str | None, int, int, str, int | None, str | None]


def some_changes(seed: int, number: int = 80) -> list[Change]:
    """Changes of few keys, half of them late; the empty country is one with no country."""
    chance = random.Random(seed)
    return [
        (
            chance.choice(["", None, "x"]),
            chance.randrange(4),
            now + chance.choice([0, 0, 0, -3, -15, 1]),
            chance.choice("UUUD"),
            chance.choice([None, now]),
            chance.choice([None, f"b{now}"]),
        )
        for now in range(number)
    ]


def expected(changes: Sequence[Change], options: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Say what a table has after all changes: from the last ones of each key, looking backwards."""
    found = set()
    for key in {(change[0] or None, change[1]) for change in changes}:
        mine = [change for change in changes if (change[0] or None, change[1]) == key]
        if options.get("scd_type") == 2:
            order = sorted({change[2] for change in mine})
            for start, end in itertools.zip_longest(order, order[1:]):
                *_, counts = (change for change in mine if change[2] == start)
                if counts[3] != "D":
                    found.add((*key, counts[4], counts[5], start, end))
            continue
        if "sequence_by" in options:
            mine = [c for i, c in enumerate(mine) if c[2] >= max(earlier[2] for earlier in mine[: i + 1])]
        alive = list(itertools.takewhile(lambda c: c[3] != "D", reversed(mine)))
        if not alive:
            continue
        last = alive[0]
        a, b, op = last[4], last[5], last[3]
        if options.get("ignore_null_updates"):
            a = next((c[4] for c in alive if c[4] is not None), None)
            b = next((c[5] for c in alive if c[5] is not None), None)
        found.add((*key, last[2], *(() if "except_columns" in options else (op,)), a, b))
    return found


def in_table(uri: str) -> list[tuple[Any, ...]]:
    table = DeltaTable(uri).to_pyarrow_table()
    names = (*SCHEMA.names, "__START_AT", "__END_AT")
    return [tuple(row[name] for name in names if name in row) for row in table.to_pylist()]


def cut(changes: list[Change], seed: int) -> Iterator[list[Change]]:
    """Cut changes into batches."""
    chance = random.Random(seed)
    while changes:
        size = chance.choice([5, 20, 40])
        yield changes[:size]
        changes = changes[size:]


class Batches:
    """A sink that writes with each batch; attempts follow one another as restores make them."""

    def __init__(self, spark: SparkSession, base: Path, delta: Delta) -> None:
        self._spark, self._base, self._delta, self._attempt = spark, base, delta, 0
        ensure_sink(Place(delta.path), SCHEMA, delta, spark)
        self._begin()

    def put(self, changes: list[Change]) -> None:
        self.batch += 1
        frame = self._spark.createDataFrame(changes, SCHEMA)
        files = self.sink.write_files(frame, BatchId(self.batch))
        assert self.sink.commit_batch(files, BatchId(self.batch)) is not None
        repeated = self.sink.commit_batch(files, BatchId(self.batch))
        assert repeated is not None
        assert not repeated.fresh

    def now(self) -> Version:
        return self.sink.version_at(BatchId(self.batch))

    def back(self, version: Version) -> None:
        self._begin(version)

    def again(self) -> None:
        """Let another attempt go on with the table as it is: a restore has kept it."""
        self._begin()

    def _begin(self, version: Version | None = None) -> None:
        self._attempt, self.batch = self._attempt + 1, -1
        number = self._attempt
        writer = SinkWriter(JOB, "a", StageId("s"), "out", AttemptId(number))
        root = Root(str(self._base / "a"))
        self.sink = DeltaSink(
            root,
            self._delta.path,
            writer=writer,
            run=RunId(number),
            session=lambda: self._spark,
            key=tuple(self._delta.key),
            changes=self._delta.changes,
        )
        if version is not None:
            self.sink.restore_to(version, Own(JOB, "a", frozenset()))
        self.sink.begin()


class Some(Rows):
    def __init__(self, changes: list[Change]) -> None:
        kinds = [pa.string(), pa.int64(), pa.int32(), pa.string(), pa.int32(), pa.string()]
        columns = zip(zip(*changes, strict=True), kinds, strict=True)
        self._batch = pa.record_batch([pa.array(list(c), k) for c, k in columns], names=SCHEMA.names)
        self.schema, self.count = self._batch.schema, self._batch.num_rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, self.count, 7):
            yield self._batch.slice(start, 7)


class Epochs:
    """A sink that writes after checkpoints, likewise."""

    def __init__(self, spark: SparkSession, base: Path, delta: Delta) -> None:
        ensure_sink(Place(delta.path), SCHEMA, delta, spark)
        config = EpochTable(delta.path, tuple(delta.key), changes=delta.changes)
        self.sink = DeltaEpochSink(config, Root(str(base / "a")), lambda: spark)
        self._run, self._number, self._first = 1, 0, True
        self.sink.recover(self._owner)

    @property
    def _owner(self) -> Owner:
        return Owner("a", JOB, "out", RunId(self._run))

    def put(self, changes: list[Change]) -> None:
        epoch = Epoch(self._owner, mark(self._number), mark(self._number + 1), first=self._first)
        self.sink.commit(epoch, Some(changes))
        self._number, self._first = self._number + 1, False

    def now(self) -> Version:
        return Version(self._number)

    def back(self, version: Version) -> None:
        self._run += 1
        self.sink.abort(self._owner, mark(int(version)), keep=False)
        self._number = int(version)


def mark(number: int) -> Mark:
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("partial", Batches),
        ("by sequence", Epochs),
        pytest.param("by sequence", Batches, marks=pytest.mark.long),
        pytest.param("by arrival", Batches, marks=pytest.mark.long),
        pytest.param("history", Batches, marks=pytest.mark.long),
        ("history", Epochs),
    ],
)
def test_a_table_ends_with_what_the_whole_input_says(
    spark: SparkSession, tmp_path: Path, options: str, kind: Callable[..., Batches | Epochs]
) -> None:
    """Also when it goes back to a cut, deletes included, and the rest comes in other batches."""
    seed, said = sorted(OPTIONS).index(options), OPTIONS[options]
    delta = Delta(str(tmp_path / "table"), key=KEY, partition_by="country", **said)
    sink, changes = kind(spark, tmp_path, delta), some_changes(seed)
    sink.put(changes[:35])
    at = sink.now()
    sink.put(changes[35:])
    assert set(in_table(delta.path)) == expected(changes, said), seed
    sink.back(at)
    assert set(in_table(delta.path)) == expected(changes[:35], said), seed
    for batch in cut(changes[35:], seed):
        sink.put(batch)
    found = in_table(delta.path)
    assert set(found) == expected(changes, said), seed
    assert len(set(found)) == len(found)


def test_tombstones_of_many_batches_become_few_files_and_a_lost_one_is_damage(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_abs.sinks.delta.tombstones._FILES", 2)
    delta = Delta(str(tmp_path / "table"), key="id", **OPTIONS["by sequence"])
    sink = Batches(spark, tmp_path, delta)
    for number in range(4):
        sink.put([("x", number, 10, "D", None, None)])
    commit = sink.sink.log.commit_of(BatchId(3))
    assert commit is not None
    assert commit[1].tombstones is not None
    assert [file.level for file in commit[1].tombstones.files] == [2]
    with monkeypatch.context() as killed:
        killed.setattr(spark_writer, "merge", killed_before_it)
        with pytest.raises(KeyboardInterrupt):
            sink.put([("x", 2, 11, "D", None, None)])
    sink.again()
    sink.put([("x", number, 9, "U", 1, None) for number in range(4)] + [("x", 2, 10, "U", 2, "later")])
    assert in_table(delta.path) == [("x", 2, 10, 2, "later")]
    shutil.rmtree(tmp_path / "a" / commit[1].tombstones.files[0].directory)
    with pytest.raises(DamageError, match="a late change would bring it back"):
        sink.put([("x", 0, 8, "U", 1, None)])


def killed_before_it(*_: object) -> None:
    raise KeyboardInterrupt


def test_keys_are_one_where_delta_stores_one_value(spark: SparkSession, tmp_path: Path) -> None:
    """Blanks at the end of CHAR, also of a sequence, what is empty in a column of partitions; no quotes."""
    uri = str(tmp_path / "table")
    spark.sql(
        f"CREATE TABLE delta.`{uri}` (country STRING, raw BINARY, code CHAR(3), at CHAR(3), n INT) "
        "USING delta PARTITIONED BY (country, raw)"
    )
    kinds = [t.StringType(), t.BinaryType(), t.StringType(), t.StringType(), t.IntegerType()]
    names = ("country", "raw", "code", "at", "n")
    schema = t.StructType([t.StructField(*field) for field in zip(names, kinds, strict=True)])
    delta = Delta(uri, key=("country", "raw", "code"), sequence_by="at")
    ensure_sink(Place(uri), schema, delta, spark)
    writer = SinkWriter(JOB, "a", StageId("s"), "out", AttemptId(1))
    root = Root(str(tmp_path / "a"))
    sink = DeltaSink(
        root,
        uri,
        writer=writer,
        run=RunId(1),
        session=lambda: spark,
        key=tuple(delta.key),
        overwrites=False,
        changes=delta.changes,
    )
    sink.begin()
    rows = [
        ("", b"", "a", "s", 1),
        (None, b"", "a ", "s ", 2),
        ("", None, "a  ", "s", 3),
        ("x'y\\", b"q", "b", "s", 4),
    ]
    for number, batch in enumerate((rows[:1], rows[1:2], rows[2:], rows)):
        frame = spark.createDataFrame(batch, schema)
        sink.commit_batch(sink.write_files(frame, BatchId(number)), BatchId(number))
    found = spark.read.format("delta").load(uri).collect()
    assert sorted((row.n, row.country, row.code.rstrip()) for row in found) == [
        (3, None, "a"),
        (4, "x'y\\", "b"),
    ]


def test_changes_that_cannot_be_applied_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    sink = Batches(spark, tmp_path, Delta(uri, key="id", sequence_by=("ts", "a")))
    with pytest.raises(UsageError, match=r'change with key \{"id":7\} has null in ts, a, by which changes'):
        sink.put([("x", 1, 1, "U", 1, None), ("x", 7, 1, "U", None, None)])
    assert in_table(uri) == []
    maps = t.StructField("m", t.MapType(t.LongType(), t.LongType()))
    more = t.StructType([*SCHEMA.fields, maps, t.StructField("__END_AT", t.LongType())])
    for said, options in {
        "apply_as_deletes cannot be read": {"apply_as_deletes": "nothing = 1"},
        "apply_as_deletes is not a condition: a": {"apply_as_deletes": "a"},
        "may give a row another answer": {"apply_as_deletes": "a < rand()"},
        r"SELECT 1\)' may give a row another answer": {"apply_as_deletes": "a IN (SELECT 1)"},
        "sequence_by names m, and maps cannot be compared": {"sequence_by": ("ts", "m")},
        "sequence_by names at, which the output does not have": {"sequence_by": "at"},
        "scd_type=2 makes the column __END_AT": {"scd_type": 2, "sequence_by": "ts"},
        "partition_by names op, which the table does not have": {
            "except_columns": "op",
            "partition_by": "op",
        },
    }.items():
        with pytest.raises(UsageError, match=said):
            check_sink(Place(uri), more, Delta(uri, key="id", **options), spark)  # type: ignore[arg-type]
    folding = spark.sql("SELECT 'a' COLLATE UTF8_LCASE AS name").schema
    with pytest.raises(UsageError, match="collation makes different texts equal"):
        check_sink(Place(uri), folding, Delta(uri, key="name"), spark)
    with pytest.raises(UsageError, match="tombstones_for='2 days'"):
        Delta(uri, key="id", tombstones_for="2 days")


def test_the_order_of_arrival_outlives_the_digits_of_names(spark: SparkSession, tmp_path: Path) -> None:
    """Spark numbers partitions with five digits or more, and the files of one with three or more."""
    names = ["part-00007-u-c999", "part-00007-u-c1000", "part-100000-u-c1000"]
    for number, name in reversed(list(enumerate(names))):
        rows = pa.table({"n": [2 * number, 2 * number + 1]})
        pq.write_table(rows, f"{tmp_path}/{name}.snappy.parquet")
    found = in_files(spark, [f"{tmp_path}/{name}.snappy.parquet" for name in names])
    assert [row.n for row in found.orderBy(f"`{ORDER}`").collect()] == list(range(6))


def test_moments_that_summer_time_makes_one_are_no_keys_of_partitions(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta's writer takes them through local time: two moments would be one key."""
    uri = str(tmp_path / "table")
    schema = t.StructType([t.StructField("at", t.TimestampType()), t.StructField("day", t.DateType())])
    ensure_sink(Place(uri), schema, Delta(uri, key="at", partition_by="at"), spark)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(spark_writer, "time_zone", lambda _: "Europe/Berlin")
        for delta in (Delta(uri, key="AT"), Delta(f"{uri}2", key="at", partition_by="at")):
            with pytest.raises(UsageError, match=r"is partitioned by at, .*Berlin an hour"):
                check_sink(Place(delta.path), schema, delta, spark)
        check_sink(Place(uri), schema, Delta(uri), spark)
        check_sink(Place(f"{uri}2"), schema, Delta(f"{uri}2", key=("at", "day"), partition_by="day"), spark)
        elsewhere.setattr(spark_writer, "time_zone", lambda _: "Asia/Tokyo")
        check_sink(Place(uri), schema, Delta(uri, key="at"), spark)
