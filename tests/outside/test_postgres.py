"""Single promises of the PostgreSQL sink, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_abs.errors import SinkUnreachable, UsageError
from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.postgres.sink import Postgres, PostgresSink
from spark_abs.sinks.two_phase import Rows
from tests.outside.server import PASSWORD, PostgresServer


class Some(Rows):
    """The rows of a batch."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._batch = pa.RecordBatch.from_pydict(columns)
        self.schema, self.count = self._batch.schema, self._batch.num_rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        yield self._batch


def mark(number: int) -> Mark:
    """Checkpoint `number`, whose cut is the entry of ten times that."""
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


class Sending:
    """A run that sends to a table, epoch by epoch."""

    def __init__(self, config: Postgres, run: int = 1, name: str = "sent") -> None:
        self.owner = Owner("0123456789abcdef0123456789abcdef", "job", name, RunId(run))
        self.sink = PostgresSink(config)
        self.mark = self.sink.recover(self.owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sink.close()

    def send(self, rows: Rows, floor: int = 0) -> None:
        number = 1 if self.mark is None else self.mark.checkpoint + 1
        before, first = self.mark or mark(0), self.mark is None
        self.mark = mark(number)
        self.sink.commit(Epoch(self.owner, before, self.mark, Version(10 * floor), first=first), rows)

    def back(self, number: int, *, keep: bool = False) -> None:
        self.sink.abort(self.owner, mark(number), keep=keep)
        self.mark = mark(number)


def test_names_with_quotes_and_percent_signs_are_names(server: PostgresServer) -> None:
    server.run('CREATE TABLE "a""b%t%%(root)s;" ("k%" bigint PRIMARY KEY, "%s ""v" text)')
    config = Postgres('a"b%t%%(root)s;', key=("k%",), mode="upsert", history=True)
    rows = Some({"k%": [1], '%s "v': ["one"]})
    PostgresSink(config).check(rows.schema)
    with Sending(config) as sending:
        sending.send(rows)
        sending.send(Some({"k%": [1, 2], '%s "v': ["new", "two"]}))
        sending.back(1)
    assert server.run('SELECT * FROM "a""b%t%%(root)s;"') == [(1, "one")]


_PIECES = st.sampled_from(
    [
        '"',
        "'",
        "`",
        ";",
        "--",
        "/*",
        "\\",
        "\n",
        "\t",
        "..",
        "/",
        "*",
        "?",
        "[a]",
        "%s",
        "%%",
        "{0}",
        "$1",
        "x",
        "é",
    ]
)
_HOSTILE = st.lists(_PIECES, min_size=1, max_size=8).map("".join)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=_HOSTILE, schema=_HOSTILE, columns=st.lists(_HOSTILE, min_size=2, max_size=2, unique=True))
def test_any_text_is_a_name_and_never_a_statement(
    server: PostgresServer, table: str, schema: str, columns: list[str]
) -> None:
    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    key, value = columns
    server.run(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE; CREATE SCHEMA {quoted(schema)}")
    config = Postgres(table, key=(key,), mode="upsert", history=True, schema=schema)
    rows = Some({key: [1], value: ["one"]})
    with pytest.raises(UsageError, match="this statement creates it") as refused:
        PostgresSink(config).check(rows.schema)
    server.run(str(refused.value).partition("this statement creates it:\n")[2])
    with Sending(config) as sending:
        sending.send(rows)
        sending.send(Some({key: [1, 2], value: ["new", "two"]}))
        sending.back(1)
    there = f"{quoted(schema)}.{quoted(table)}"
    assert server.run(f"SELECT {quoted(key)}, {quoted(value)} FROM {there}") == [(1, "one")]
    made = server.run(
        "SELECT nspname, relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE relkind = 'r'"
    )
    assert {name for at, name in made if at == schema} == {
        table,
        f"{table}_spark_abs_history",
        "spark_abs_marker",
    }
    server.run(f"DROP SCHEMA {quoted(schema)} CASCADE")


KEPT = Postgres("sums", key=("k",), mode="upsert", history=True)


def test_the_statement_that_is_proposed_makes_a_table_that_takes_the_rows(server: PostgresServer) -> None:
    types: dict[str, pa.DataType] = {
        'k"': pa.string(),
        "Select": pa.int8(),
        "big": pa.int64(),
        "real": pa.float32(),
        "price": pa.decimal128(12, 2),
        "flag": pa.bool_(),
        "raw": pa.binary(),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "seen": pa.timestamp("us"),
        "tags": pa.list_(pa.string()),
        "more": pa.struct([pa.field("a", pa.int32())]),
        "counts": pa.map_(pa.string(), pa.int64()),
    }
    sink = PostgresSink(Postgres('Order"s', key=('k"',), mode="upsert"))
    with pytest.raises(UsageError, match="this statement creates it") as refused:
        sink.check(pa.schema(types))
    server.run(str(refused.value).partition("this statement creates it:\n")[2])
    sink.check(pa.schema(types))


def test_a_way_back_leaves_columns_alone_that_the_rows_do_not_have(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint, note text DEFAULT 'new' NOT NULL)")
    server.run("ALTER TABLE sums ADD twice bigint GENERATED ALWAYS AS (v * 2) STORED")
    with Sending(KEPT) as sending:
        sending.send(Some({"k": [1], "v": [1]}))
        server.run("UPDATE sums SET note = 'mine'")
        sending.send(Some({"k": [1, 2], "v": [2, 2]}))
        sending.back(1)
    assert server.run("SELECT * FROM sums") == [(1, 1, "mine", 2)]


def test_epochs_are_undone_by_the_columns_and_the_key_that_they_had(server: PostgresServer) -> None:
    """The output got a column and lost one, the key became another, a column of the table was widened."""
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v int, w int, gone int)")
    with Sending(KEPT) as sending:
        sending.send(Some({"k": [1, 2], "gone": [5, 6]}))
        server.run("UPDATE sums SET v = 7")
        sending.send(Some({"k": [1], "gone": [8]}))
    server.run(
        "ALTER TABLE sums ALTER v TYPE bigint, DROP gone, DROP CONSTRAINT sums_pkey, ADD UNIQUE (k, v)"
    )
    with Sending(replace(KEPT, key=("k", "v")), run=2) as sending:
        sending.send(Some({"k": [1, 1], "v": [7, 2**40], "w": [9, 9]}))
        sending.send(Some({"k": [1], "v": [2**40], "w": [10]}))
        sending.back(3)
        assert sorted(server.run("SELECT k, v, w FROM sums")) == [(1, 7, 9), (1, 2**40, 9), (2, 7, None)]
        sending.back(2)
        assert sorted(server.run("SELECT k, v, w FROM sums")) == [(1, 7, None), (2, 7, None)]
        sending.back(1)
        assert sorted(server.run("SELECT k, v, w FROM sums")) == [(1, 7, None), (2, 7, None)]


def test_a_history_that_was_dropped_begins_anew(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    with Sending(KEPT) as sending:
        for number in range(3):
            sending.send(Some({"k": [1], "v": [number]}))
        server.run("DROP TABLE sums_spark_abs_history")
        assert "history" in sending.sink.why_not(sending.owner, mark(1))
    with Sending(KEPT, run=2) as sending:
        sending.send(Some({"k": [1], "v": [3]}))
        assert "history" in sending.sink.why_not(sending.owner, mark(2))
        sending.back(3)
    assert server.run("SELECT v FROM sums") == [(2,)]


def test_history_is_forgotten_up_to_where_no_restore_goes_back_behind(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    with Sending(KEPT) as sending:
        for number in range(3):
            sending.send(Some({"k": [1], "v": [number]}))
        sending.send(Some({"k": [1], "v": [3]}), floor=2)
        kept = "SELECT spark_abs_until FROM sums_spark_abs_history ORDER BY 1"
        assert server.run(kept) == [(30,), (40,)]
        sending.back(2)
    assert server.run("SELECT v FROM sums") == [(1,)]


def test_a_pooler_may_give_each_transaction_another_session(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    with Sending(KEPT) as sending:
        for number in range(8):
            sending.send(Some({"k": [1], "v": [number]}))
        connection = sending.sink._connection._server
        assert connection is not None
        assert connection.execute("SELECT name FROM pg_prepared_statements").fetchall() == []


def test_sinks_with_long_names_leave_each_other_alone(server: PostgresServer) -> None:
    server.run("CREATE TABLE sent (k bigint)")
    name = "orders_of_the_online_shop_in_all_countries_by"
    with Sending(Postgres("sent"), name=f"{name}_day") as days:
        with Sending(Postgres("sent"), name=f"{name}_hour") as hours:
            days.send(Some({"k": [1]}))
            hours.send(Some({"k": [2]}))
        with Sending(Postgres("sent"), run=2, name=f"{name}_day"), pytest.raises(SinkUnreachable):
            days.send(Some({"k": [3]}))  # its connection was ended
    assert sorted(server.run("SELECT k FROM sent")) == [(1,), (2,)]


def test_a_table_of_marks_that_is_there_needs_no_right_to_make_one(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("CREATE TABLE sent (k bigint)")
    with Sending(Postgres("sent"), name="other"):
        pass
    server.run("DROP ROLE IF EXISTS lesser")
    server.run(f"CREATE ROLE lesser LOGIN PASSWORD '{PASSWORD}'")
    try:
        server.run("GRANT USAGE ON SCHEMA public TO lesser; GRANT INSERT ON sent TO lesser")
        server.run("GRANT SELECT, INSERT, UPDATE ON spark_abs_marker TO lesser")
        monkeypatch.setenv("PGUSER", "lesser")
        with Sending(Postgres("sent")) as sending:
            sending.send(Some({"k": [1]}))
    finally:
        server.run("DROP OWNED BY lesser; DROP ROLE lesser")
    assert server.run("SELECT k FROM sent") == [(1,)]


def test_whoever_holds_a_mark_for_long_is_not_waited_for_without_end(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen run of another user, whose connection this one may not end."""
    monkeypatch.setattr("spark_abs.sinks.postgres.sink._LOCK_TIMEOUT", "100ms")
    server.run("CREATE TABLE sent (k bigint)")
    with Sending(Postgres("sent")):
        pass
    with server.connect() as frozen, frozen.transaction():
        frozen.execute("SELECT * FROM spark_abs_marker FOR UPDATE")
        frozen.execute("SET LOCAL idle_in_transaction_session_timeout = '20s'")
        with pytest.raises(SinkUnreachable, match="lock timeout"):
            Sending(Postgres("sent"), run=2)


def test_rows_of_others_are_told_from_those_of_the_root(server: PostgresServer) -> None:
    server.run("CREATE TABLE taken (id bigint)")
    comes = Owner("0123456789abcdef0123456789abcdef", "job", "sent", RunId(1))
    with closing(PostgresSink(Postgres("taken"))) as look:
        assert look.rows_of_others(comes) == ""
        server.run("INSERT INTO taken VALUES (1)")
        assert look.rows_of_others(comes) == "rows"
        with Sending(Postgres("taken")):  # killed right after it came
            assert look.rows_of_others(comes) == ""
        assert look.rows_of_others(replace(comes, sink="renamed")) == ""
        assert look.rows_of_others(replace(comes, root="another")) == "rows"
