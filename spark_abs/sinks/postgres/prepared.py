"""Prepared transactions of PostgreSQL sinks: how they are named, found again, and ended.

The rows of an epoch are prepared, then one short transaction moves the mark and names what was prepared, then
that is committed. The mark decides: what it names is committed, by whoever comes next, and all else is rolled
back. So a prepared transaction never waits for anybody's opinion, and ending one twice changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

try:
    from psycopg import errors
except ImportError as missing:
    raise ImportError("a PostgreSQL sink needs psycopg 3: pip install 'spark-abs[postgres]'") from missing
from psycopg.sql import SQL, Identifier, Literal

from spark_abs.errors import UsageError
from spark_abs.protocol.outside import Epoch, Owner
from spark_abs.sinks.postgres.config import Postgres
from spark_abs.sinks.postgres.connection import Connection, Server

_GID = re.compile(r"spark_abs:([0-9a-f]{16}):([0-9a-f]{24}):([A-Za-z0-9_-]{1,64}):(\d+):(\d+):(\d+):(\d+)")
_FIND = (
    r"SELECT gid, (extract(epoch FROM now() - prepared) * 1000)::bigint FROM pg_prepared_xacts "
    r"WHERE database = current_database() AND gid LIKE 'spark\_abs:%' "
    "ORDER BY prepared, gid"
)
_MARKERS = (
    "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON "
    "a.attrelid = c.oid WHERE c.relname = 'spark_abs_marker' AND c.relkind = 'r' AND a.attname = 'prepared' "
    "AND has_table_privilege(c.oid, 'SELECT') ORDER BY 1"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared transaction of a sink, as its name says."""

    gid: str
    sink: str
    run: int
    attempt: int
    checkpoint: int
    version: int
    """The last entry of the channel in it."""
    age_ms: int
    """For how long, by the server's clock."""
    root: str = ""
    """The identity of the root whose mark is there; empty if no mark is, as for a root that is gone."""
    counts: bool = False
    """Whether the mark names it: then it is to be committed, else to be rolled back."""

    @property
    def whose(self) -> str:
        """The digest that tells the sinks of all roots apart."""
        return self.gid.split(":")[2]


def gid_of(epoch: Epoch) -> str:
    """Name the prepared transaction of an epoch: root (a digest), sink, run, attempt, checkpoint, entry."""
    owner, mark = epoch.owner, epoch.mark
    root = hashlib.sha256(owner.root.encode()).hexdigest()[:16]
    numbers = f"{int(owner.run)}:{int(mark.attempt)}:{int(mark.checkpoint)}:{int(mark.version)}"
    return f"spark_abs:{root}:{_whose(owner.root, owner.sink)}:{owner.sink}:{numbers}"


def _whose(root: str, sink: str) -> str:
    return hashlib.sha256(f"{root} {sink}".encode()).hexdigest()[:24]


def require_prepared(server: Server, target: str) -> None:
    """Refuse a server that prepares nothing.

    Raises:
        UsageError: it does not.
    """
    found = server.execute("SELECT current_setting('max_prepared_transactions')::int").fetchone()
    if found is None or not found[0]:
        raise UsageError(
            f"table {target}: prepared=True needs max_prepared_transactions of the server above 0, one for "
            "each such sink; it is 0, and to change it takes a restart of the server"
        )


def is_there(server: Server, gid: str) -> bool:
    """Say whether a transaction is prepared and not ended."""
    found = server.execute("SELECT 1 FROM pg_prepared_xacts WHERE gid = %s", [gid]).fetchone()
    return found is not None


def end(server: Server, gid: str, commit: bool) -> None:
    """Commit or roll back what was prepared, unless somebody has: all who do decide by the mark."""
    statement = SQL("COMMIT PREPARED {}" if commit else "ROLLBACK PREPARED {}")
    with suppress(errors.UndefinedObject):
        server.execute(statement.format(Literal(gid)))


def end_all(server: Server, owner: Owner, counts: str | None) -> None:
    """End what this run and older ones of a sink have prepared; `counts` is what the mark names.

    Call it after the fence: then no older run moves the mark any more. What a newer run has prepared is not
    looked at, by one that has been replaced and does not know it yet.
    """
    mine = _whose(owner.root, owner.sink)
    for found in prepared(server):
        if found.whose == mine and found.run <= owner.run:
            end(server, found.gid, commit=found.gid == counts)


def prepared(server: Server) -> Iterator[Prepared]:
    """Iterate what sinks have prepared in the database, oldest first; what others have is left out."""
    for gid, age in server.execute(_FIND).fetchall():
        found = _GID.fullmatch(gid)
        if found is not None:
            run, attempt, checkpoint, version = map(int, found.groups()[3:])
            yield Prepared(
                gid,
                found[3],
                run=run,
                attempt=attempt,
                checkpoint=checkpoint,
                version=version,
                age_ms=int(age),
            )


def listed(config: Postgres) -> Sequence[Prepared]:
    """Return what sinks of all roots have prepared in a database, each with what its mark says.

    Raises:
        SinkUnreachable: the server cannot be asked now.
        SinkFailed: it refuses to say.
    """
    connection = Connection(config)
    try:
        with connection.working() as server:
            return [_with_mark(server, found)[0] for found in prepared(server)]
    finally:
        connection.close()


def end_one(config: Postgres, gid: str) -> Prepared:
    """Commit what a mark names, roll back what none names; return what it was.

    Safe also while its run is alive: the mark is locked meanwhile, and a run that then finds its transaction
    gone sends the rows again.

    Raises:
        UsageError: no sink has prepared that.
        SinkUnreachable: the server cannot be asked now.
        SinkFailed: it refuses.
    """
    connection, other = Connection(config), Connection(config)
    try:
        with connection.working() as server, server.transaction():
            found = next((one for one in prepared(server) if one.gid == gid), None)
            if found is None:
                raise UsageError(f"no sink has prepared {gid!r} in this database")
            found, schema = _with_mark(server, found)
            if schema is not None:
                server.execute("SELECT set_config('lock_timeout', '10s', true)")
                table = Identifier(schema, "spark_abs_marker")
                server.execute(
                    SQL("SELECT 1 FROM {} WHERE root = %s AND sink = %s FOR UPDATE").format(table),
                    [found.root, found.sink],
                )
                found, _ = _with_mark(server, found)
            with other.working() as second:
                end(second, gid, commit=found.counts)
            return found
    finally:
        connection.close()
        other.close()


def _with_mark(server: Server, found: Prepared) -> tuple[Prepared, str | None]:
    """Look for the mark of a prepared transaction in every schema; also return the schema that has it."""
    known, there = found, None
    for (schema,) in server.execute(_MARKERS).fetchall():
        statement = SQL("SELECT root, sink, prepared FROM {} WHERE sink = %s").format(
            Identifier(schema, "spark_abs_marker")
        )
        for root, sink, named in server.execute(statement, [found.sink]).fetchall():
            if _whose(root, sink) == found.whose and (there is None or named == found.gid):
                known = replace(found, root=root, counts=named == found.gid)
                there = schema
    return known, there
