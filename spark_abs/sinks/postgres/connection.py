"""The connection of a PostgreSQL sink: from the environment, with errors that show no secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psycopg
from psycopg import conninfo

from spark_abs.errors import SinkFailed, SinkUnreachable, UsageError
from spark_abs.sinks.environment import without_secrets
from spark_abs.sinks.postgres.config import Postgres

Server = psycopg.Connection[tuple[Any, ...]]
"""A connection on which only explicit transactions group statements."""

UNIQUE_VIOLATION = "23505"
_AGAIN = frozenset(("08", "25", "40", "53", "55", "57", "58"))
"""Classes of errors after which the same transaction may succeed: connection lost, server going down or not
yet the primary, deadlock or serialization failure, no resources, a lock not to be had."""
_SHORT = (
    "raise {0} for this user (ALTER ROLE … SET {0}), or take checkpoints more often: epochs are smaller then"
)
_LIMITED: Mapping[str, str] = {
    "57014": _SHORT.format("statement_timeout"),
    "25P04": _SHORT.format("transaction_timeout"),
    UNIQUE_VIOLATION: "another writer adds the same keys, or another unique index refuses them",
}
"""Errors that are retried a limited number of times, and the advice afterwards."""
_TRIES = 5
_CONNECTION = {
    "connect_timeout": "10",
    "tcp_user_timeout": "60000",
    # A server that vanishes while it works on a statement is noticed within a minute, not in two hours.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}


class Connection:
    """Opens a connection when it is first needed, and anew after every failure. Not thread-safe."""

    def __init__(self, config: Postgres) -> None:
        self._config = config
        self._server: Server | None = None
        self._secrets: list[str] = []
        self._failed: tuple[str, int] = ("", 0)
        """The last failure's SQLSTATE, and how often it came since something was committed."""

    @contextmanager
    def working(self) -> Iterator[Server]:
        """Yield the connection; errors have no secrets, and after an error the connection is not used again.

        Raises:
            SinkUnreachable: the next try may succeed.
            SinkFailed: the server refused it, or failed in the same way again and again.
        """
        try:
            if self._server is None:
                self._server = self._connect()
            yield self._server
        except psycopg.Error as error:
            self.close()
            self._say(error)
        except BaseException:
            self.close()
            raise

    def settled(self) -> None:
        """Take note of a commit: failures are counted anew."""
        self._failed = ("", 0)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with suppress(psycopg.Error):
                server.close()

    def _connect(self) -> Server:
        config = self._config
        given = self._variable(config.dsn_env) or ""
        try:
            parts = conninfo.conninfo_to_dict(given)
        except psycopg.ProgrammingError:
            raise UsageError(f"${config.dsn_env} does not hold a connection string") from None
        if config.service is not None:
            parts["service"] = config.service
        password = self._variable(config.password_env)
        if password is not None:
            parts["password"] = password
        secrets = [given, parts.get("password"), parts.get("sslpassword"), os.environ.get("PGPASSWORD")]
        self._secrets = [str(secret) for secret in secrets if secret]
        for name, value in _CONNECTION.items():
            if name != "connect_timeout" or "PGCONNECT_TIMEOUT" not in os.environ:
                parts.setdefault(name, value)
        # autocommit: transactions are where `transaction()` is written, and nowhere else.
        # Nothing is prepared: a pooler may give each transaction another session.
        parts |= {"autocommit": True, "prepare_threshold": None}
        connection = psycopg.connect(**parts)  # type: ignore[arg-type]
        connection.execute(
            "SELECT set_config('TimeZone', 'UTC', false), set_config('DateStyle', 'ISO', false), "
            "set_config('extra_float_digits', '1', false)"
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
        text = without_secrets(str(error).strip() or type(error).__name__, self._secrets)
        code = error.sqlstate or ""
        lost = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) and not code
        merges = self._config.mode == "upsert" and (self._config.history or self._config.folds)
        said = f"table {self._config.target}: {text}" + (f" (SQLSTATE {code})" if code else "")
        tries = self._failed[1] + 1 if self._failed[0] == code else 1
        if code in _LIMITED:
            self._failed = (code, tries)
        if code in _LIMITED and tries >= _TRIES and (code != UNIQUE_VIOLATION or merges):
            raise SinkFailed(f"{said}, {tries} times in a row: {_LIMITED[code]}") from None
        # From None: the error's own text, and what it was caused by, may hold the connection string.
        if lost or code[:2] in _AGAIN or (code == UNIQUE_VIOLATION and merges):
            raise SinkUnreachable(said) from None
        raise SinkFailed(said) from None
