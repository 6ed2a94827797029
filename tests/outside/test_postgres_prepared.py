"""Prepared transactions: killed, restarted or replaced between any two steps, they are ended by the mark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from spark_abs.cli.main import main
from spark_abs.errors import CommitConflict, Fenced, UsageError
from spark_abs.sinks.postgres import sink as postgres
from spark_abs.sinks.postgres.connection import Server
from spark_abs.sinks.postgres.prepared import is_there
from spark_abs.sinks.postgres.sink import Postgres, PostgresSink
from tests.outside.server import PostgresServer
from tests.outside.test_postgres import Sending, Some, mark

APPENDED = Postgres("sent", prepared=True)
MERGED = Postgres("sent", key=("k",), mode="upsert", history=True, prepared=True)
GIDS = "SELECT gid FROM pg_prepared_xacts"
KILLED = """
import os, signal
from spark_abs.sinks.postgres import sink as postgres
from tests.outside.test_postgres import Sending, Some
from spark_abs.sinks.postgres.sink import Postgres

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

sending = Sending({config!r}, run=2)
setattr(postgres, "{step}", die)
sending.send(Some({{"k": [2]}}))
"""


class Killed(BaseException):
    """As by SIGKILL."""


def die(*_: object, **__: object) -> None:
    raise Killed


@pytest.fixture(autouse=True)
def table(server: PostgresServer) -> Iterator[None]:
    server.run("CREATE TABLE sent (k bigint PRIMARY KEY)")
    yield
    for (gid,) in server.run(GIDS):
        server.run(f"ROLLBACK PREPARED '{gid}'")


def left_behind(config: Postgres, step: str, monkeypatch: pytest.MonkeyPatch, run: int = 1) -> Sending:
    """Let a run end before a step of its commit: `is_there` before the mark, `end` after it."""
    sending = Sending(config, run=run)
    with monkeypatch.context() as patched:
        patched.setattr(postgres, step, die)
        with pytest.raises(Killed):
            sending.send(Some({"k": [1]}))
    return sending


@pytest.mark.parametrize("config", [APPENDED, MERGED], ids=["append", "history"])
@pytest.mark.parametrize(("step", "there"), [("is_there", [1]), ("end", [1, 2])])
def test_killed_between_prepare_and_commit_it_is_ended_by_the_mark(
    server: PostgresServer, config: Postgres, step: str, there: list[int]
) -> None:
    with Sending(config) as first:
        first.send(Some({"k": [1]}))
    code = KILLED.format(config=config, step=step)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(server.run(GIDS)) == 1
    server.restart()
    assert len(server.run(GIDS)) == 1
    assert server.run("SELECT k FROM sent") == [(1,)]
    with Sending(config, run=3) as next_one:
        assert next_one.mark == mark(len(there))
        assert server.run(GIDS) == []
        assert server.run("SELECT k FROM sent ORDER BY k") == [(k,) for k in there]
        next_one.send(Some({"k": [7]}))
    assert server.run("SELECT count(*) FROM sent") == [(len(there) + 1,)]


def test_a_run_that_was_replaced_between_prepare_and_commit_commits_nothing(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer run has looked, and sends the same; then the older one goes on where it stood."""
    lock, looks, newer = PostgresSink._lock, list[PostgresSink](), list[Sending]()

    def late(sink: PostgresSink, *given: Any, **named: Any) -> Any:
        looks.append(sink)
        if len(looks) == 2:  # the first look is before anything is prepared
            assert len(server.run(GIDS)) == 1
            newer.append(Sending(APPENDED, run=2))
            newer[0].send(Some({"k": [1]}))
        return lock(sink, *given, **named)

    with Sending(APPENDED) as old, monkeypatch.context() as patched:
        patched.setattr(PostgresSink, "_end_others", lambda *_: None)  # it may not end the older one
        patched.setattr(PostgresSink, "_lock", late)
        with pytest.raises(Fenced):
            old.send(Some({"k": [1]}))
    newer[0].sink.close()
    assert server.run(GIDS) == []
    assert server.run("SELECT k FROM sent") == [(1,)]


def test_a_job_that_prepares_no_more_ends_what_it_has_prepared(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(APPENDED, "end", monkeypatch)
    with Sending(Postgres("sent"), run=2) as sending:
        assert sending.mark == mark(1)
    assert server.run("SELECT k FROM sent") == [(1,)]
    assert server.run(GIDS) == []


def test_an_empty_epoch_prepares_nothing_and_moves_the_mark(server: PostgresServer) -> None:
    with Sending(APPENDED) as sending:
        sending.send(Some({"k": []}))
        assert sending.sink.mark(sending.owner) == mark(1)


def test_a_server_that_prepares_nothing_is_refused_by_the_name_of_its_setting(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Some({"k": [1]})
    server.stop(signal.SIGINT)
    monkeypatch.setattr(server, "prepared", 0)
    server.start()
    try:
        with pytest.raises(UsageError, match="max_prepared_transactions"):
            PostgresSink(APPENDED).check(rows.schema)
        with pytest.raises(UsageError, match="max_prepared_transactions"):
            Sending(APPENDED)
    finally:
        monkeypatch.undo()
        server.stop(signal.SIGINT)
        server.start()


def test_the_command_lists_what_is_ours_and_ends_it_by_the_mark(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.export(monkeypatch)
    with server.connect() as other:
        other.execute("CREATE TABLE theirs (k bigint)")
        other.execute("BEGIN; INSERT INTO theirs VALUES (1); PREPARE TRANSACTION 'spark_abs:theirs'")
    old = left_behind(APPENDED, "is_there", monkeypatch)

    def said(*words: str) -> dict[str, list[dict[str, object]]]:
        done = CliRunner().invoke(main, ["prepared", "--output", "json", *words])
        assert done.exit_code == 0, done.output
        found: dict[str, list[dict[str, object]]] = json.loads(done.output)
        return found

    (listed,) = said()["prepared"]
    assert [listed[name] for name in ("sink", "run", "checkpoint", "counts")] == ["sent", 1, 1, False]
    assert CliRunner().invoke(main, ["prepared"]).output.count("spark_abs:") == 1
    gid = str(listed["gid"])
    assert "rolled back" in str(said("--end", gid))
    assert [g for (g,) in server.run(GIDS)] == ["spark_abs:theirs"]
    for wrong in (gid, "spark_abs:theirs"):
        assert CliRunner().invoke(main, ["prepared", "--end", wrong]).exit_code == 2
    assert server.run("SELECT k FROM sent") == []

    # The run was alive: it finds nothing that its mark could name, and sends again.
    def ended(connection: Server, name: str) -> bool:
        server.run(f"ROLLBACK PREPARED '{name}'")
        return is_there(connection, name)

    old.mark = old.sink.recover(old.owner)
    monkeypatch.setattr(postgres, "is_there", ended)
    with pytest.raises(CommitConflict):
        old.send(Some({"k": [1]}))
    monkeypatch.setattr(postgres, "is_there", is_there)
    old.mark = old.sink.recover(old.owner)
    old.sink.close()
    left_behind(APPENDED, "end", monkeypatch, run=2)
    (listed,) = said()["prepared"]
    assert listed["counts"] is True
    assert "committed" in str(said("--end", str(listed["gid"])))
    assert server.run("SELECT k FROM sent") == [(1,)]
