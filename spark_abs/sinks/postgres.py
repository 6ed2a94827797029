"""PostgreSQL as a sink: rows and mark in one transaction, appended, or merged by key.

It is long because every part of the contract of a `TwoPhaseSink` is one transaction, with its refusals.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

try:
    import psycopg
except ImportError as missing:
    raise ImportError("a PostgreSQL sink needs psycopg 3: pip install 'spark-abs[postgres]'") from missing
from psycopg import conninfo, errors
from psycopg.sql import SQL

from spark_abs.errors import CommitConflict, Fenced, Refused, SinkFailed, SinkUnreachable, UsageError
from spark_abs.model import AttemptId, CheckpointId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.postgres_copy import copy_text
from spark_abs.sinks.postgres_schema import COLUMNS, NAME, UNIQUE, Column, ddl, is_name, misfits
from spark_abs.sinks.postgres_sql import HISTORY, MARKER, Statements
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink

_AGAIN = frozenset(("08", "25", "40", "53", "55", "57", "58"))
"""Classes of errors behind which the same transaction may succeed: connection lost, server going down or not
yet the primary, deadlock or serialization failure, no resources, a lock not to be had."""
_CONNECTION = {"connect_timeout": "10", "tcp_user_timeout": "60000"}
_LOCK_TIMEOUT = "10s"


@dataclass(frozen=True, slots=True)
class Postgres:
    """A table of PostgreSQL that takes the rows of an output; names only, never a secret.

    Where the server is comes from libpq's own environment (`PGHOST`, `PGDATABASE`, `PGUSER`, `PGPASSWORD`,
    `PGPASSFILE`, …), a service of `pg_service.conf`, or a connection string in a variable of the environment.
    """

    table: str
    key: tuple[str, ...] = ()
    """Columns that tell rows apart; a unique index must be on them."""
    mode: str = "append"
    """`append` adds each row. `upsert` replaces the row of the same key; the last of an epoch counts."""
    schema: str = "public"
    """Of the table, and of the table of marks, `spark_abs_marker`."""
    history: bool = False
    """Keep what each epoch changed, in `<table>_spark_abs_history`, so that a restore takes it back: for as
    long as there is a checkpoint before it. Needs a key."""
    service: str | None = None
    """A service of `pg_service.conf`."""
    dsn_env: str | None = None
    """The name of an environment variable with the connection string."""
    password_env: str | None = None
    """The name of an environment variable with the password."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", tuple(self.key))
        if self.mode not in ("append", "upsert"):
            raise UsageError(f"mode={self.mode!r} is neither 'append' nor 'upsert'")
        if not self.key and (self.mode == "upsert" or self.history):
            raise UsageError(
                f"table {self.table!r}: {'history=True' if self.history else 'upsert'} needs key=[…], the "
                "columns that tell rows apart"
            )
        for variable in (self.dsn_env, self.password_env):
            if variable is not None and not variable.replace("_", "a").isalnum():
                raise UsageError(f"{variable!r} is not the name of an environment variable")
        for name, what in (
            (self.table, "table"),
            (self.schema, "schema"),
            *((k, "column") for k in self.key),
        ):
            if not is_name(name):
                raise UsageError(
                    f"{name!r} is not the name of a {what}: 1 to {NAME} bytes of UTF-8, none of them NUL"
                )
        if self.history and len(self.table.encode()) > NAME - len(HISTORY):
            raise UsageError(f"table {self.table!r}: its name is too long for one with {HISTORY!r} behind it")

    @property
    def target(self) -> str:
        """The table as messages name it."""
        return f"{self.schema}.{self.table}"


class PostgresSink(TwoPhaseSink):
    """The sink behind `Postgres`. Not thread-safe."""

    def __init__(self, config: Postgres) -> None:
        self._config = config
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._secrets: list[str] = []

    # -- what the job and a restore call

    def check(self, schema: pa.Schema) -> None:
        """Compare the table with the rows; changes nothing."""
        config = self._config
        with self._working() as server:
            columns = self._columns(server, config.table)
            unique = bool(config.key) and self._is_unique(server)
        self.close()
        if not columns:
            said = ddl((config.schema, config.table), schema, config.key)
            raise UsageError(f"no table {config.target} is to be seen; this makes one:\n{said}")
        found = list(misfits(schema, columns, config.key, unique))
        if found:
            raise UsageError(f"table {config.target} cannot take the rows:\n  " + "\n  ".join(found))

    def mark(self, owner: Owner) -> Mark | None:
        """Return the mark; changes nothing."""
        with self._working() as server:
            row = self._row(server, owner)
        return None if row is None else row.mark

    def recover(self, owner: Owner) -> Mark | None:
        """Fence older runs: their connections are ended, and the row says the newer run."""
        config, of = self._config, self._statements()
        with self._working() as server:
            with server.transaction():
                before = self._row(server, owner)
            self._refuse_replaced(owner, before)
            if not self._columns(server, MARKER):
                self._make(server, of.make_marker())
            self._end_others(server, owner)
            if config.history:
                self._ensure_history(server)
            with server.transaction():
                self._limit_waiting(server)
                server.execute(of.add_marker(), {**_of(owner), "target": config.target})
                row = self._row(server, owner, lock=True)
                assert row is not None
                self._refuse_replaced(owner, row)
                if row.target != config.target:
                    raise Refused(
                        f"sink {owner.sink!r} has written to {row.target}, and now says {config.target}: "
                        "its mark is about that one; give the sink another name"
                    )
                begins = row.history_from
                if not config.history:
                    begins = None
                elif begins is None:
                    begins = row.mark.version if row.mark is not None else 0
                server.execute(of.take(), {**_of(owner), "run": int(owner.run), "history_from": begins})
            return row.mark

    def commit(self, epoch: Epoch, rows: Rows) -> None:
        """Lock the mark, take the rows, move the mark: one transaction."""
        owner, config = epoch.owner, self._config
        of = self._statements(rows.schema.names)
        with self._working() as server, server.transaction():
            self._lock(server, owner, None if epoch.first else epoch.after)
            # What COMMIT has answered must stay: the channel forgets the rows behind it.
            server.execute(
                "SELECT set_config('synchronous_commit', 'on', true) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            if rows.count:
                self._write(server, of, epoch, rows)
            if config.history and epoch.floor:
                server.execute(of.forget_history(), {**_of(owner), "floor": int(epoch.floor)})
            server.execute(of.set_mark(), {**_of(owner), **_values(epoch.mark)})

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say what keeps committed rows from being taken back."""
        config = self._config
        if not config.history:
            return "it keeps no history (history=True would)"
        with self._working() as server:
            row = self._row(server, owner)
            if row is None or row.history_from is None or row.history_from > back.version:
                return "its history begins later"
            straddling = server.execute(
                self._statements().straddling(), {**_of(owner), "version": int(back.version)}
            ).fetchall()
        ids = ", ".join(str(checkpoint) for (checkpoint,) in straddling)
        return f"epoch {ids} was sent as one and begins before that" if ids else ""

    def abort(self, owner: Owner, back: Mark, *, keep: bool) -> None:
        """Undo epochs, newest first, and move the mark back: one transaction."""
        why = "" if keep else self.why_not(owner, back)
        if why:
            raise Refused(f"what sink {owner.sink!r} has sent cannot be taken back: {why}")
        with self._working() as server, server.transaction():
            row = self._lock(server, owner, None, compare=False)
            if row.mark == back:
                return
            of, config = self._statements(), self._config
            there = {column.name for column in self._columns(server, config.table)}
            version = {**_of(owner), "version": int(back.version)}
            if not keep:
                for until, key, columns in server.execute(of.epochs_behind(), version).fetchall():
                    written = [name for name in columns if name in there]
                    for statement in Statements(config.schema, config.table, key, written).undo():
                        server.execute(statement, {**_of(owner), "until": until})
            if self._columns(server, config.table + HISTORY):
                server.execute(of.drop_history(), version)
            server.execute(of.set_mark(), {**_of(owner), **_values(back)})

    def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    # -- the parts of a transaction

    def _write(self, server: psycopg.Connection[Any], of: Statements, epoch: Epoch, rows: Rows) -> None:
        config = self._config
        there = {column.name: column for column in self._columns(server, config.table)}
        arrays = [name in there and there[name].is_array for name in rows.schema.names]
        staged = config.mode == "upsert" or config.history
        if staged:
            for statement in of.make_stage():
                server.execute(statement, {})
        with server.cursor() as cursor, cursor.copy(of.copy(staged)) as copy:
            for batch in rows:
                copy.write(copy_text(batch, arrays))
        if config.history:
            server.execute(of.lock_replaced(), {})
            kept = {"after": int(epoch.after.version), **_values(epoch.mark)}
            kept |= {"key": list(of.key), "columns": list(of.columns)}
            server.execute(of.keep_replaced(), {**_of(epoch.owner), **kept})
        if staged:
            server.execute(of.upsert() if config.mode == "upsert" else of.append(), {})

    def _lock(
        self, server: psycopg.Connection[Any], owner: Owner, expected: Mark | None, compare: bool = True
    ) -> _Row:
        self._limit_waiting(server)
        row = self._row(server, owner, lock=True)
        self._refuse_replaced(owner, row)
        if row is None or row.run != owner.run or (compare and row.mark != expected):
            raise CommitConflict(f"the mark of sink {owner.sink!r} is not what was read: {row}")
        return row

    def _limit_waiting(self, server: psycopg.Connection[Any]) -> None:
        server.execute(SQL("SELECT set_config('lock_timeout', {}, true)").format(_LOCK_TIMEOUT))

    def _refuse_replaced(self, owner: Owner, row: _Row | None) -> None:
        if row is not None and row.run > owner.run:
            raise Fenced(f"run {owner.run} of sink {owner.sink!r} was replaced by run {row.run}")

    def _row(self, server: psycopg.Connection[Any], owner: Owner, lock: bool = False) -> _Row | None:
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

    def _end_others(self, server: psycopg.Connection[Any], owner: Owner) -> None:
        """End the connections of older runs: a frozen one would hold its locks as long."""
        with suppress(errors.InsufficientPrivilege), server.transaction():
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s "
                "AND usename = current_user AND datname = current_database() AND pid <> pg_backend_pid()",
                [_called(owner)],
            )
        server.execute("SELECT set_config('application_name', %s, false)", [_called(owner)])

    def _ensure_history(self, server: psycopg.Connection[Any]) -> None:
        config = self._config
        table = {c.name: c for c in self._columns(server, config.table)}
        kept = {c.name: c for c in self._columns(server, config.table + HISTORY)}
        of = self._statements(list(table))
        if not kept:
            self._make(server, of.make_history())
        for name, column in table.items() if kept else ():
            if name not in kept:
                self._make(server, of.add_history_column(name, column.said))
            elif kept[name].said != column.said:
                self._make(server, of.fit_history_column(name, column.said))

    def _make(self, server: psycopg.Connection[Any], statement: psycopg.sql.Composed) -> None:
        """Make a table that another run may make at the same moment."""
        with suppress(errors.UniqueViolation, errors.DuplicateTable), server.transaction():
            server.execute(statement, {})

    def _columns(self, server: psycopg.Connection[Any], table: str) -> Sequence[Column]:
        return [Column(*row) for row in server.execute(COLUMNS, [self._config.schema, table]).fetchall()]

    def _is_unique(self, server: psycopg.Connection[Any]) -> bool:
        config = self._config
        found = server.execute(UNIQUE, [config.schema, config.table, sorted(config.key)]).fetchone()
        return found is not None and bool(found[0])

    def _statements(self, columns: Sequence[str] = ()) -> Statements:
        config = self._config
        return Statements(config.schema, config.table, config.key, columns)

    # -- the connection

    @contextmanager
    def _working(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Give out the connection; what fails is said without secrets, and the connection is not used again.

        Raises:
            SinkUnreachable: it may succeed when it is tried again.
            SinkFailed: the server refused it.
        """
        try:
            if self._connection is None:
                self._connection = self._connect()
            yield self._connection
        except psycopg.Error as error:
            self.close()
            self._say(error)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        config = self._config
        given = self._variable(config.dsn_env) or ""
        try:
            parts = conninfo.conninfo_to_dict(given)
        except psycopg.ProgrammingError:
            raise UsageError(f"what is in ${config.dsn_env} is no connection string") from None
        if config.service is not None:
            parts["service"] = config.service
        password = self._variable(config.password_env)
        if password is not None:
            parts["password"] = password
        secrets = [given, parts.get("password"), parts.get("sslpassword"), os.environ.get("PGPASSWORD")]
        self._secrets = sorted({str(s) for s in secrets if s}, key=len, reverse=True)
        for name, value in _CONNECTION.items():
            if name != "connect_timeout" or "PGCONNECT_TIMEOUT" not in os.environ:
                parts.setdefault(name, value)
        # autocommit: transactions are where `transaction()` is written, and nowhere else.
        # Nothing is prepared: a pooler may give each transaction another session.
        parts |= {"autocommit": True, "prepare_threshold": None}
        connection = psycopg.connect(**parts)  # type: ignore[arg-type]
        connection.execute(
            "SELECT set_config('TimeZone', 'UTC', false), set_config('DateStyle', 'ISO', false)"
        )
        return connection

    def _variable(self, name: str | None) -> str | None:
        if name is None:
            return None
        value = os.environ.get(name)
        if value is None:
            raise UsageError(f"table {self._config.target}: ${name} is not set in the environment")
        return value

    def _say(self, error: psycopg.Error) -> NoReturn:
        text = str(error).strip() or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        code = error.sqlstate or ""
        connection = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) and not code
        said = f"table {self._config.target}: {text}" + (f" (SQLSTATE {code})" if code else "")
        # From None: the error's own text, and what it was caused by, may hold the connection string.
        if connection or code[:2] in _AGAIN:
            raise SinkUnreachable(said) from None
        raise SinkFailed(said) from None


@dataclass(frozen=True, slots=True)
class _Row:
    """What the table of marks says of a sink."""

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
    """Name the connections of a sink, so that a newer run finds those of older ones."""
    digest = hashlib.sha256(f"{owner.root} {owner.sink}".encode()).hexdigest()
    return f"spark_abs {owner.sink[:20]} {digest[:32]}"
