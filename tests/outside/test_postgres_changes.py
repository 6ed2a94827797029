"""Changes by key in PostgreSQL, on a real server: the last of each key of the whole input, however cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from spark_abs.codec import from_json, to_json
from spark_abs.errors import CommitConflict, SinkFailed, UsageError
from spark_abs.model import RunId
from spark_abs.sinks.postgres.sink import Postgres, PostgresSink
from tests.outside.server import PostgresServer
from tests.outside.test_postgres import Sending, Some

Change = tuple[int, int | None, str, int | None, list[str] | None]
"""Key, sequence, what is done, and two values."""
COLUMNS: dict[str, pa.DataType] = {
    "k": pa.int64(),
    "at": pa.int64(),
    "op": pa.string(),
    "a": pa.int64(),
    "tags": pa.list_(pa.string()),
}
TABLE = "CREATE TABLE sums (tags text[], k bigint PRIMARY KEY, at int8, a bigint)"
PLAIN = Postgres("sums", key=("k",), mode="upsert", apply_as_deletes="op = 'D'", except_columns=("op",))
BY_SEQUENCE = replace(PLAIN, sequence_by="at", history=True)
CONFIGS = {
    "as they arrive": PLAIN,
    "by sequence": BY_SEQUENCE,
    "nulls ignored": replace(BY_SEQUENCE, ignore_null_updates=True),
    "nulls ignored as they arrive": replace(PLAIN, ignore_null_updates=True, history=True),
}


class Changes(Some):
    """Changes as they come, in two record batches."""

    def __init__(self, changes: Sequence[Change]) -> None:
        arrays = [pa.array([c[at] for c in changes], t) for at, t in enumerate(COLUMNS.values())]
        self._batch = pa.RecordBatch.from_arrays(arrays, names=list(COLUMNS))
        self.schema, self.count = self._batch.schema, self._batch.num_rows

    def __iter__(self) -> Any:
        yield self._batch.slice(0, self.count // 2)
        yield self._batch.slice(self.count // 2)


class Merging(Sending):
    """A run that sends changes."""

    def __init__(self, config: Postgres, spark: SparkSession, run: int = 1) -> None:
        super().__init__(replace(config, sequence_by=None, apply_as_deletes=None), run)
        self.sink.close()
        self.sink = PostgresSink(config, lambda: spark)
        self.mark = self.sink.recover(self.owner)

    def again(self) -> None:
        """Go on as the next run does."""
        self.owner = replace(self.owner, run=RunId(self.owner.run + 1))
        assert self.sink.recover(self.owner) == self.mark


def last_of_all(changes: Sequence[Change], config: Postgres) -> list[tuple[Any, ...]]:
    """Look at the whole input: the row of each key with the highest sequence that came last."""
    found = []
    for key in sorted({change[0] for change in changes}):
        mine = [change for change in changes if change[0] == key]
        if config.sequence_by:  # one that is older than another before it is late
            mine = [c for i, c in enumerate(mine) if all((c[1] or 0) >= (b[1] or 0) for b in mine[:i])]
        if mine[-1][2] == "D":
            continue
        row = list(mine[-1])
        if config.ignore_null_updates:
            gone = max((i for i, change in enumerate(mine) if change[2] == "D"), default=-1)
            for column in (1, 3, 4):
                there = [c[column] for c in mine[gone + 1 :] if c[column] is not None]
                row[column] = there[-1] if there else None
        found.append((row[0], row[1], row[3], row[4]))
    return found


def drawn(chance: random.Random, number: int) -> list[Change]:
    return [
        (
            chance.randrange(5),
            chance.randrange(12),
            chance.choice("UUUD"),
            chance.choice([None, chance.randrange(100)]),
            chance.choice([None, [], ["x"] * chance.randrange(3), ['a"', "\\"]]),
        )
        for _ in range(number)
    ]


def rows_of(server: PostgresServer) -> list[tuple[Any, ...]]:
    return server.run("SELECT k, at, a, tags FROM sums ORDER BY k")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_of_each_key_stays_however_the_changes_are_cut(
    server: PostgresServer, spark: SparkSession, name: str
) -> None:
    """Sends are repeated, runs replaced, and epochs undone and sent again in other pieces."""
    config = CONFIGS[name]
    chance = random.Random(f"changes {name}")
    server.run(TABLE)
    with Merging(config, spark) as sending:
        sending.sink.check(Changes([]).schema)
        sent: list[list[Change]] = []
        while len(sent) < 12:
            rows = drawn(chance, chance.choice([0, 1, 3, 9]))
            before = sending.mark
            sending.send(Changes(rows))
            sent.append(rows)
            if chance.random() < 0.3 and before is not None:
                done, sending.mark = sending.mark, before
                with pytest.raises(CommitConflict):
                    sending.send(Changes(rows))
                sending.mark = done
                sending.again()
            assert rows_of(server) == last_of_all([change for epoch in sent for change in epoch], config), (
                sent
            )
            if config.history and chance.random() < 0.3:
                back = chance.randrange(1, len(sent) + 1)
                sending.again()
                sending.back(back)
                sent = sent[:back]
                assert rows_of(server) == last_of_all(
                    [change for epoch in sent for change in epoch], config
                ), sent


def test_a_row_that_was_deleted_comes_back_whole(server: PostgresServer, spark: SparkSession) -> None:
    """With columns that only the table has, an identity, and without those that others have deleted."""
    server.run(TABLE)
    server.run(
        "ALTER TABLE sums ADD note text DEFAULT 'new' NOT NULL, ADD id int GENERATED ALWAYS AS IDENTITY, "
        "ADD twice bigint GENERATED ALWAYS AS (a * 2) STORED"
    )
    with Merging(BY_SEQUENCE, spark) as sending:
        sending.send(Changes([(k, 1, "U", k, ["x"]) for k in (1, 2, 3)]))
        server.run("UPDATE sums SET note = 'mine'")
        before = server.run("SELECT * FROM sums ORDER BY k")
        sending.send(Changes([(1, 2, "D", None, None), (2, 2, "U", 7, None), (9, 2, "D", None, None)]))
        server.run("DELETE FROM sums WHERE k = 3")
        assert server.run("SELECT k, a FROM sums") == [(2, 7)]
        sending.back(1)
        assert server.run("SELECT * FROM sums ORDER BY k") == before[:2]
        sending.send(Changes([(1, 1, "U", 5, None)]))  # its tombstone is gone, too
        assert server.run("SELECT a FROM sums WHERE k = 1") == [(5,)]


def test_a_late_change_loses_to_a_delete_as_long_as_that_is_remembered(
    server: PostgresServer, spark: SparkSession
) -> None:
    server.run(TABLE)
    kept = "SELECT k, at FROM sums_spark_abs_deleted WHERE spark_abs_ended IS NULL ORDER BY k"
    with Merging(replace(BY_SEQUENCE, history=False), spark) as sending:
        sending.send(Changes([(1, 5, "D", None, None), (2, 5, "D", None, None)]))
        sending.send(Changes([(1, 4, "U", 1, None), (2, 5, "U", 2, None)]))
        assert rows_of(server) == [(2, 5, 2, None)]
        assert server.run(kept) == [(1, 5)]
    short = replace(BY_SEQUENCE, history=False, tombstones_for="1ms")
    with Merging(short, spark, run=2) as sending:
        sending.send(Changes([]), floor=1)
        assert server.run(kept) == []
        sending.send(Changes([(1, 4, "U", 1, None)]))
        assert rows_of(server) == [(1, 4, 1, None), (2, 5, 2, None)]


def test_a_newer_row_of_another_writer_is_not_replaced(server: PostgresServer, spark: SparkSession) -> None:
    server.run(TABLE)
    server.run("INSERT INTO sums (k, at, a) VALUES (1, 9, 90), (2, NULL, 90)")
    with Merging(BY_SEQUENCE, spark) as sending:
        sending.send(Changes([(1, 8, "U", 1, None), (2, 8, "U", 1, None)]))
        assert rows_of(server) == [(1, 9, 90, None), (2, 8, 1, None)]


def test_a_change_without_a_sequence_is_refused_by_its_key(
    server: PostgresServer, spark: SparkSession
) -> None:
    server.run(TABLE)
    with Merging(BY_SEQUENCE, spark) as sending:
        with pytest.raises(SinkFailed, match=r"key \(k=7\) has a null in sequence_by \(at\)"):
            sending.send(Changes([(1, 1, "U", 1, None), (7, None, "U", 1, None)]))
    assert rows_of(server) == []


def test_text_is_ordered_by_its_bytes_as_spark_orders_it(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, s text, n real, a bigint)")
    config = Postgres("sums", key="k", mode="upsert", sequence_by=("s", "n"))
    with Sending(config) as sending:
        sending.send(Some({"k": [1, 1], "s": ["a", "B"], "n": [1.0, 2.0], "a": [1, 2]}))
        sending.send(Some({"k": [1], "s": ["Z"], "n": [1.0], "a": [3]}))
        assert server.run("SELECT a FROM sums") == [(1,)]
        nan = float("nan")
        sending.send(Some({"k": [1, 1, 1], "s": ["a"] * 3, "n": [nan, 9.0, nan], "a": [4, 5, 6]}))
        assert server.run("SELECT a FROM sums") == [(6,)]


def test_keys_that_the_table_takes_for_one_are_one(server: PostgresServer) -> None:
    """The column's type folds them: the last of them counts, in one epoch and over several."""
    folded: dict[str, tuple[str, list[Any]]] = {
        "varchar(2)": ("trailing blanks", ["ab", "ab  ", "b"]),
        "uuid": (
            "notation",
            [f"{h}0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11" for h in "aAb"],
        ),
        "double precision": ("signed zeros", [0.0, -0.0, 1.0]),
        "float8": ("NaN", [float("nan"), float("nan"), 1.0]),
        "timestamp(0)": ("fractions", [pa.scalar(n, pa.timestamp("us")) for n in (1, 2, 10**6)]),
    }
    for history in (False, True):
        for nulls in (False, True):
            for kind, (what, (first, second, other)) in folded.items():
                server.run("DROP TABLE IF EXISTS t, t_spark_abs_history, spark_abs_marker")
                server.run(f"CREATE TABLE t (k {kind} PRIMARY KEY, a bigint)")
                config = Postgres("t", key=("k",), mode="upsert", history=history, ignore_null_updates=nulls)
                keys = [first, second, other]
                if isinstance(first, pa.Scalar):
                    keys = [key.as_py() for key in keys]
                with Sending(config) as sending:
                    PostgresSink(config).check(Some({"k": keys, "a": [1, 2, 3]}).schema)
                    sending.send(Some({"k": keys, "a": [1, 2, 3]}))
                    assert sorted(server.run("SELECT a FROM t")) == [(2,), (3,)], what
                    sending.send(Some({"k": [keys[0]], "a": [4]}))
                    assert sorted(server.run("SELECT a FROM t")) == [(3,), (4,)], what
                    if history:
                        sending.back(1)
                        assert sorted(server.run("SELECT a FROM t")) == [(2,), (3,)], what


def test_what_the_server_would_fold_behind_our_back_is_refused_by_name(server: PostgresServer) -> None:
    rows = Some({"k": ["a"], "a": [1]}).schema
    for table, said in (
        (
            'CREATE TABLE t (k text NOT NULL, a bigint); CREATE UNIQUE INDEX ON t (k COLLATE "POSIX")',
            "collation",
        ),
        ("CREATE TABLE t (k char(3) PRIMARY KEY, a bigint)", r"'k' is character\(3\)"),
        ("CREATE TABLE t (k text UNIQUE NULLS NOT DISTINCT, a bigint)", "'k' may be null"),
    ):
        server.run("DROP TABLE IF EXISTS t")
        server.run(table)
        with pytest.raises(UsageError, match=said):
            PostgresSink(Postgres("t", key=("k",), mode="upsert")).check(rows)
    server.run("DROP TABLE t; CREATE TABLE t (k text PRIMARY KEY, a timestamp(3))")
    sink = PostgresSink(Postgres("t", key=("k",), mode="upsert", sequence_by="a"))
    with pytest.raises(UsageError, match="does not keep the order"):
        sink.check(pa.schema([("k", pa.string()), ("a", pa.timestamp("us"))]))


@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [("a", "text", "x\0"), ("b", "text[]", ["x", "y\0"]), ("c", "jsonb", {"x": "\0"})],
)
def test_a_string_with_a_nul_is_refused_by_its_column(
    server: PostgresServer, column: str, kind: str, value: object
) -> None:
    server.run(f"CREATE TABLE t (k bigint, fine text, {column} {kind})")
    with Sending(Postgres("t")) as sending:
        with pytest.raises(SinkFailed, match=f"t: column '{column}' has a string with a NUL character"):
            sending.send(Some({"k": [1, 2], "fine": ["x", "y"], column: [None, value]}))
    assert server.run("SELECT * FROM t") == []


def test_words_that_do_not_fit_are_refused(server: PostgresServer, spark: SparkSession) -> None:
    server.run(TABLE)
    for words, said in (
        ({"mode": "append"}, "they go with mode='upsert'"),
        ({"tombstones_for": "soon"}, "tombstones_for='soon'"),
        ({"except_columns": ("k",)}, "except_columns names k"),
    ):
        with pytest.raises(UsageError, match=said):
            replace(PLAIN, **words)
    for predicate, said in (
        ("op = ", "is no predicate"),
        ("gone", "is no predicate"),
        ("k", "is no predicate"),
        ("rand() < k", "another answer"),
    ):
        config = replace(PLAIN, apply_as_deletes=predicate)
        with pytest.raises(UsageError, match=f"public.sums: apply_as_deletes='{predicate[:3]}.* {said}"):
            PostgresSink(config, lambda: spark).check(Changes([]).schema)
    stored = to_json(BY_SEQUENCE)
    assert from_json(Postgres, stored) == BY_SEQUENCE
    assert to_json(from_json(Postgres, stored)) == stored
