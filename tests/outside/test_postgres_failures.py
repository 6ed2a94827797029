"""What fails on the way to PostgreSQL: a connection cut at any byte, deadlocks, timeouts, other writers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from spark_abs.errors import CommitConflict, SinkFailed, SinkUnreachable
from spark_abs.sinks.postgres.changes import ChangeStatements
from spark_abs.sinks.postgres.sink import Postgres
from spark_abs.sinks.postgres.sql import Statements
from spark_abs.sinks.postgres.write import EpochWriter
from tests.outside.server import PostgresServer
from tests.outside.test_postgres import KEPT, Sending, Some, mark

APPENDED = Postgres("sums")
CHANGED = Postgres("sums", key="k", mode="upsert", sequence_by="v", ignore_null_updates=True)
TRIES = 5


class Wire:
    """Passes bytes to a server and back, and cuts the line when so many have passed in one direction."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.left: dict[str, int | None] = {"out": None, "back": None}
        self.passed = {"out": 0, "back": 0}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def begin(self, **left: int) -> None:
        """Count anew; the line is cut for good after so many bytes `out` or `back`."""
        with self._lock:
            self.left, self.passed = {"out": None, "back": None, **left}, {"out": 0, "back": 0}

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", self._to))
                    for one, other, way in ((client, server, "out"), (server, client, "back")):
                        threading.Thread(target=self._pass, args=(one, other, way), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                with self._lock:
                    left = self.left[way]
                    self.passed[way] += len(data)
                    if left is not None:
                        data, self.left[way] = data[:left], max(0, left - len(data))
                    cut = self.left[way] == 0
                other.sendall(data)
                if cut:
                    break
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def wire(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    made = Wire(server.port)
    monkeypatch.setenv("PGPORT", str(made.port))
    yield made
    made.close()


@pytest.mark.parametrize("config", [APPENDED, KEPT, CHANGED], ids=["append", "history", "changes"])
def test_a_connection_that_is_lost_at_any_byte_loses_and_repeats_no_row(
    server: PostgresServer, wire: Wire, config: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    sending = Sending(config)
    sending.send(Some({"k": [0], "v": [0]}))  # its statements are as long as those that follow
    wire.begin()
    sending.send(Some({"k": [1], "v": [1]}))
    whole = dict(wire.passed)
    number = 2
    for way, size in whole.items():
        for at in range(1, size + 40, max(1, size // 23)):
            wire.begin(**{way: at})
            with suppress(SinkUnreachable, CommitConflict):
                sending.send(Some({"k": [number], "v": [number]}))
            wire.begin()
            sending.mark = sending.sink.recover(sending.owner)
            sent = sending.mark == mark(number + 1)
            assert server.run(f"SELECT count(*) FROM sums WHERE k = {number}") == [(int(sent),)]
            if not sent:
                assert sending.mark == mark(number)
                sending.send(Some({"k": [number], "v": [number]}))
            number += 1
    sending.sink.close()
    assert server.run("SELECT count(*), max(k) FROM sums") == [(number, number - 1)]


def test_a_deadlock_with_another_writer_is_tried_again(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one holds a row that the epoch replaces, and wants the mark that the epoch holds."""
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    server.run("ALTER ROLE CURRENT_USER SET deadlock_timeout = '50ms'")
    try:
        with Sending(KEPT) as sending, server.connect() as other:
            sending.send(Some({"k": [1], "v": [1]}))
            other.execute("SET deadlock_timeout = '1h'")  # so that the sink is the one that is given up
            other.execute("BEGIN")
            other.execute("UPDATE sums SET v = 10")
            held = threading.Event()
            wait = threading.Thread(target=_want_the_mark, args=(other, held))
            write = EpochWriter.write

            def written(*given: object) -> None:
                wait.start()
                held.wait(60)
                write(*given)  # type: ignore[arg-type]

            with monkeypatch.context() as patched:
                patched.setattr(EpochWriter, "write", written)
                with pytest.raises(SinkUnreachable, match="40P01"):
                    sending.send(Some({"k": [1], "v": [2]}))
            wait.join()
            sending.mark = sending.sink.recover(sending.owner)
            assert sending.mark == mark(1)
            sending.send(Some({"k": [1], "v": [2]}))
            sending.back(1)
        assert server.run("SELECT k, v FROM sums") == [(1, 10)]
    finally:
        server.run("ALTER ROLE CURRENT_USER RESET deadlock_timeout")


def _want_the_mark(other: psycopg.Connection[tuple[object, ...]], held: threading.Event) -> None:
    held.set()
    other.execute("SELECT * FROM spark_abs_marker FOR UPDATE")
    other.execute("COMMIT")


def test_a_statement_timeout_that_is_too_short_ends_the_run_and_is_named(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    server.run(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$; "
        "CREATE TRIGGER slow BEFORE INSERT ON sums FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    server.run("ALTER ROLE CURRENT_USER SET statement_timeout = '200ms'")
    try:
        with Sending(APPENDED) as sending:
            for tries in range(1, TRIES + 1):
                kind = SinkFailed if tries == TRIES else SinkUnreachable
                sending.mark = None
                with pytest.raises(kind, match="57014") as failed:
                    sending.send(Some({"k": [1], "v": [1]}))
                sending.sink.recover(sending.owner)
            assert "ALTER ROLE" in str(failed.value)
            assert "statement_timeout" in str(failed.value)
    finally:
        server.run("ALTER ROLE CURRENT_USER RESET statement_timeout")


def test_a_key_that_another_writer_adds_meanwhile_is_kept_in_the_history(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    with Sending(KEPT) as sending:
        sending.send(Some({"k": [1], "v": [1]}))
        merged = Statements.merge

        def late(of: Statements) -> object:
            server.run("INSERT INTO sums VALUES (2, 77) ON CONFLICT DO NOTHING")
            return merged(of)

        with monkeypatch.context() as patched:
            patched.setattr(Statements, "merge", late)
            with pytest.raises(SinkUnreachable, match="23505"):
                sending.send(Some({"k": [1, 2], "v": [5, 5]}))
        sending.mark = sending.sink.recover(sending.owner)
        assert sending.mark == mark(1)
        sending.send(Some({"k": [1, 2], "v": [5, 5]}))
        assert server.run("SELECT k, v FROM sums ORDER BY k") == [(1, 5), (2, 5)]
        sending.back(1)
    assert server.run("SELECT k, v FROM sums ORDER BY k") == [(1, 1), (2, 77)]


def test_a_key_that_another_writer_adds_meanwhile_is_compared_with_the_change(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint)")
    applied = ChangeStatements.apply

    def late(changes: ChangeStatements) -> object:
        server.run("INSERT INTO sums VALUES (1, 9), (2, 1) ON CONFLICT DO NOTHING")
        return applied(changes)

    with Sending(CHANGED) as sending:
        with monkeypatch.context() as patched:
            patched.setattr(ChangeStatements, "apply", late)
            with pytest.raises(SinkUnreachable, match="23505"):
                sending.send(Some({"k": [1, 2, 3], "v": [5, 5, 5]}))
        sending.mark = sending.sink.recover(sending.owner)
        assert sending.mark is None
        sending.send(Some({"k": [1, 2, 3], "v": [5, 5, 5]}))
    assert server.run("SELECT k, v FROM sums ORDER BY k") == [(1, 9), (2, 5), (3, 5)]


def test_what_another_unique_index_refuses_ends_the_run_in_the_end(server: PostgresServer) -> None:
    server.run("CREATE TABLE sums (k bigint PRIMARY KEY, v bigint UNIQUE)")
    with Sending(KEPT) as sending:
        for tries in range(1, TRIES + 1):
            sending.mark = None
            with pytest.raises(SinkFailed if tries == TRIES else SinkUnreachable, match="23505"):
                sending.send(Some({"k": [1, 2], "v": [5, 5]}))
            sending.sink.recover(sending.owner)
