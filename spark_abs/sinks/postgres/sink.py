"""PostgreSQL as a sink: rows and mark in one transaction, appended, or merged by key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

try:
    import psycopg
except ImportError as missing:
    raise ImportError("a PostgreSQL sink needs psycopg 3: pip install 'spark-abs[postgres]'") from missing
from psycopg import errors
from psycopg.sql import SQL

from spark_abs.errors import UsageError
from spark_abs.model import AttemptId, CheckpointId, Version
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.delete_predicate import DeletePredicate
from spark_abs.sinks.marked import MarkedSink, refuse_moved, refuse_replaced, require_unchanged
from spark_abs.sinks.postgres.changes import (
    forget_tombstones,
    index_tombstones,
    known_columns,
    make_tombstones,
    tombstones,
    undo_tombstones,
)
from spark_abs.sinks.postgres.config import DELETED, HISTORY, Postgres
from spark_abs.sinks.postgres.connection import Connection, Server
from spark_abs.sinks.postgres.schema import COLUMNS, UNIQUE, Column, ddl, misfits
from spark_abs.sinks.postgres.sql import MARKER, Identifier, Statements, add_column, fit_column
from spark_abs.sinks.postgres.write import EpochWriter
from spark_abs.sinks.two_phase import Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Postgres", "PostgresSink"]

_LOCK_TIMEOUT = "10s"


class PostgresSink(MarkedSink["_Row"]):
    """The sink behind `Postgres`. Not thread-safe."""

    def __init__(self, config: Postgres, session: Callable[[], SparkSession] | None = None) -> None:
        """Take the table.

        Args:
            config: the table.
            session: called only where `apply_as_deletes` is evaluated: by Spark.
        """
        self._config, self._session = config, session
        self._deletes = DeletePredicate(config.target, config.changes.apply_as_deletes, session)
        self._writer = EpochWriter(config, self._deletes)
        self.each_batch = config.visible == "batch"
        self._connection = Connection(config)
        self._forgotten = FIRST_ENTRY
        """The entry up to which this object has deleted history."""

    # -- what the job and a restore call

    def check(self, schema: pa.Schema) -> None:
        """Compare the table with the rows; changes nothing."""
        # This object may be at work for a run, in another thread.
        with closing(PostgresSink(self._config, self._session)) as look:
            look._check(schema)

    def _check(self, schema: pa.Schema) -> None:
        config = self._config
        self._deletes.check(schema)
        names = config.changes.stored(schema.names)
        schema = pa.schema([field for field in schema if field.name in names])
        with self._connection.working() as server:
            columns = self._columns(server, config.table)
            unique = bool(config.key) and self._is_unique(server)
        if not columns:
            said = ddl((config.schema, config.table), schema, config.key)
            raise UsageError(f"table {config.target} was not found; this statement creates it:\n{said}")
        found = list(misfits(schema, columns, config.key, unique, config.changes.sequence_by))
        if found:
            raise UsageError(f"table {config.target} cannot take the rows:\n  " + "\n  ".join(found))

    def rows_of_others(self, owner: Owner) -> str:
        """Say whether the table has rows, if no sink of the root has been there."""
        with self._connection.working() as server:
            of, known = self._statements(), {"root": owner.root, "target": self._config.target}
            if self._columns(server, MARKER) and server.execute(of.look_for_root(), known).fetchone():
                return ""
            return "rows" if server.execute(of.look()).fetchone() is not None else ""

    def rests(self, owner: Owner) -> bool:
        """Say whether the mark is about this table: an epoch is never committed in part."""
        row = self._read_mark(owner)
        return row is not None and row.target == self._config.target

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say why committed rows cannot be taken back."""
        config = self._config
        if not config.history:
            return (
                "the sink keeps no history of the rows that it replaced: history=True keeps one from now on"
            )
        with self._connection.working() as server:
            row = self._row(server, owner)
            if row is None or row.history_from is None or row.history_from > back.version:
                return "its history begins after that checkpoint"
            straddling = server.execute(
                self._statements().straddling(), {**_of(owner), "version": int(back.version)}
            ).fetchall()
        ids = ", ".join(str(checkpoint) for (checkpoint,) in straddling)
        if not ids:
            return ""
        return (
            f"the epoch of checkpoint {ids} was sent in one transaction, which also has rows from before the "
            "checkpoint to go back to, and a transaction cannot be undone in part"
        )

    def close(self) -> None:
        super().close()
        self._connection.close()

    # -- the mark, and the transactions

    def _read_mark(self, owner: Owner) -> _Row | None:
        with self._connection.working() as server:
            return self._row(server, owner)

    def _fence(self, owner: Owner) -> _Row:
        """Refuse older runs: their connections are ended, and the row says the newer run."""
        config, of = self._config, self._statements()
        with self._connection.working() as server:
            with server.transaction():
                before = self._row(server, owner)
            refuse_replaced(owner, before)
            if not self._columns(server, MARKER):
                self._make(server, of.make_marker())
            self._end_others(server, owner)
            if config.history:
                self._ensure_history(server)
            if config.changes.keeps_tombstones:
                self._ensure_tombstones(server)
            with server.transaction():
                self._limit_waiting(server)
                server.execute(of.add_marker(), {**_of(owner), "target": config.target})
                row = self._row(server, owner, lock=True)
                assert row is not None
                refuse_replaced(owner, row)
                refuse_moved(owner, f"table {row.target}", f"table {config.target}")
                begins = row.history_from
                if not config.history:
                    begins = None
                elif begins is None:
                    begins = row.mark.version if row.mark is not None else 0
                server.execute(of.take(), {**_of(owner), "run": int(owner.run), "history_from": begins})
            return replace(row, run=owner.run, history_from=begins)

    def _add(self, epoch: Epoch, known: _Row, rows: Rows) -> _Row:
        """Lock the mark, write the rows, store the mark: one transaction."""
        with self._connection.working() as server, server.transaction():
            row = self._lock(server, epoch.owner, known)
            if rows.count:
                self._writer.write(server, self._columns(server, self._config.table), epoch, rows)
            self._move_mark(server, epoch)
        self._connection.settled()
        self._forgotten = max(self._forgotten, epoch.floor)
        return replace(row, mark=epoch.mark)

    def _go_back(self, owner: Owner, known: _Row, back: Mark, *, keep: bool) -> _Row:
        """Undo epochs, newest first, and move the mark back: one transaction."""
        with self._connection.working() as server, server.transaction():
            row = self._lock(server, owner, known)
            of, config = self._statements(), self._config
            there = {column.name: column for column in self._columns(server, config.table)}
            kept = {column.name for column in self._columns(server, config.table + HISTORY)}
            whole = [name for name, column in there.items() if name in kept and not column.computed]
            version = {**_of(owner), "version": int(back.version)}
            if not keep:
                for until, key, columns in server.execute(of.epochs_behind(), version).fetchall():
                    written = [name for name in columns if name in there]
                    for statement in Statements(config.schema, config.table, key, written).undo(whole):
                        server.execute(statement, {**_of(owner), "until": until})
                if self._columns(server, config.table + DELETED):
                    for statement in undo_tombstones(of):
                        server.execute(statement, version)
            if kept:
                server.execute(of.drop_history(), version)
            server.execute(of.set_mark(), {**_of(owner), **_values(back)})
        return replace(row, mark=back)

    def _move_mark(self, server: Server, epoch: Epoch) -> None:
        of, changes = self._statements(), self._config.changes
        # What COMMIT has answered must stay: the channel forgets the rows up to it.
        server.execute(
            "SELECT set_config('synchronous_commit', 'on', true) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        if self._config.history and epoch.floor > self._forgotten:
            server.execute(of.forget_history(), {**_of(epoch.owner), "floor": int(epoch.floor)})
        if changes.keeps_tombstones and epoch.floor > self._forgotten:
            bounds = {"floor": int(epoch.floor), "kept": changes.tombstones_ms}
            for statement in forget_tombstones(of):
                server.execute(statement, {**_of(epoch.owner), **bounds})
        server.execute(of.set_mark(), {**_of(epoch.owner), **_values(epoch.mark)})

    def _lock(self, server: Server, owner: Owner, known: _Row) -> _Row:
        """Lock the mark, if it is the known one."""
        self._limit_waiting(server)
        return require_unchanged(owner, known, self._row(server, owner, lock=True))

    def _limit_waiting(self, server: Server) -> None:
        server.execute(SQL("SELECT set_config('lock_timeout', {}, true)").format(_LOCK_TIMEOUT))

    def _row(self, server: Server, owner: Owner, lock: bool = False) -> _Row | None:
        if not self._columns(server, MARKER):
            return None
        found = server.execute(self._statements().read_marker(lock), _of(owner)).fetchone()
        if found is None:
            return None
        run, target, begins, attempt, checkpoint, version = found
        mark = None
        if version is not None:
            mark = Mark(AttemptId(attempt), CheckpointId(checkpoint), Version(version))
        return _Row(run, target, begins, mark)

    def _end_others(self, server: Server, owner: Owner) -> None:
        """End the connections of older runs: a frozen run would keep its locks."""
        with suppress(errors.InsufficientPrivilege), server.transaction():
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s "
                "AND usename = current_user AND datname = current_database() AND pid <> pg_backend_pid()",
                [_called(owner)],
            )
        server.execute("SELECT set_config('application_name', %s, false)", [_called(owner)])

    def _ensure_history(self, server: Server) -> None:
        table = self._columns(server, self._config.table)
        of = self._statements([column.name for column in table])
        there = self._columns(server, self._config.table + HISTORY)
        self._ensure(server, of.history, table, there, [of.make_history()])
        if there and all(column.name != "spark_abs_deleted" for column in there):
            self._make(server, of.add_deleted())

    def _ensure_tombstones(self, server: Server) -> None:
        config, of = self._config, self._statements()
        names = known_columns(of, config.changes.sequence_by)
        table = [column for column in self._columns(server, config.table) if column.name in names]
        there = self._columns(server, config.table + DELETED)
        made = [make_tombstones(of, config.changes.sequence_by), *index_tombstones(of)]
        self._ensure(server, tombstones(of), table, there, made)
        if any(column.name not in {c.name for c in there} for column in table if there):
            self._make(server, index_tombstones(of)[0])

    def _ensure(
        self,
        server: Server,
        beside: Identifier,
        table: Sequence[Column],
        there: Sequence[Column],
        made: Sequence[psycopg.sql.Composed],
    ) -> None:
        """Give a table beside the sink's own the columns of that table, with their present types."""
        known = {column.name: column for column in there}
        if not there:
            with suppress(errors.UniqueViolation, errors.DuplicateTable), server.transaction():
                self._limit_waiting(server)
                for statement in made:
                    server.execute(statement, {})
        for column in table if there else ():
            if column.name not in known:
                self._make(server, add_column(beside, column))
            elif known[column.name].said != column.said:
                self._make(server, fit_column(beside, column))

    def _make(self, server: Server, statement: psycopg.sql.Composed) -> None:
        """Make a table that another run may make at the same moment."""
        with suppress(errors.UniqueViolation, errors.DuplicateTable), server.transaction():
            self._limit_waiting(server)
            server.execute(statement, {})

    def _columns(self, server: Server, table: str) -> Sequence[Column]:
        return [Column(*row) for row in server.execute(COLUMNS, [self._config.schema, table]).fetchall()]

    def _is_unique(self, server: Server) -> bool:
        config = self._config
        found = server.execute(UNIQUE, [config.schema, config.table, sorted(config.key)]).fetchone()
        return found is not None and bool(found[0])

    def _statements(self, columns: Sequence[str] = ()) -> Statements:
        config = self._config
        return Statements(config.schema, config.table, config.key, columns)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table of marks."""

    run: int
    target: str
    history_from: int | None
    mark: Mark | None


def _of(owner: Owner) -> dict[str, Any]:
    return {"root": owner.root, "sink": owner.sink}


def _values(mark: Mark) -> dict[str, Any]:
    return {
        "attempt": int(mark.attempt),
        "checkpoint": int(mark.checkpoint),
        "version": int(mark.version),
    }


def _called(owner: Owner) -> str:
    """Return the name of a sink's connections, by which a newer run finds those of older runs."""
    digest = hashlib.sha256(f"{owner.root} {owner.sink}".encode()).hexdigest()
    return f"spark_abs {owner.sink[:20]} {digest[:32]}"
