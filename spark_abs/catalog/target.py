"""Which table a text leads to: a place, and where the text is a name, what its catalog says now.

A name is asked for once, where it is declared. What is recorded from then on, the location and the table's
id, needs no catalog.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.catalog import session_catalog
from spark_abs.catalog.names import TableName, parse, readings
from spark_abs.catalog.session_catalog import FullName
from spark_abs.errors import UsageError
from spark_abs.store.storage import Storage, location_of, table_location
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OF_FILES = re.compile(r"file:/+")
_CREATABLE = re.compile(r"[A-Za-z0-9_]+")
"""The names that the session's own catalog takes for a new table."""


@dataclass(frozen=True, slots=True)
class TableTarget:
    """The table that a text leads to."""

    text: str
    """As it was declared."""
    uri: str
    """Where the table is, or will be."""
    name: FullName | None = None
    """Its name, with catalog and schema; None if the text is a path."""
    entered: bool = False
    """Whether a catalog has the name."""
    managed: bool = True
    """Whether the catalog chooses the place of a table that it does not have yet."""

    @property
    def said(self) -> str:
        """The name as it is recorded and shown; empty if the text is a path."""
        return "" if self.name is None else str(self.name)

    @property
    def sql(self) -> str:
        """The name as an identifier of SQL, or the path."""
        return self.uri if self.name is None else self.name.sql


def find_target(session: SparkSession, storage: Storage, text: str, location: str = "") -> TableTarget:
    """Find the table that a text leads to; changes nothing.

    Args:
        session: whose catalogs know names.
        storage: how object stores are reached.
        text: a path, a URI, ``delta.`…` ``, or a name.
        location: where a table is made that has a name and is not there; the catalog chooses if it is empty.

    Raises:
        UsageError: the text leads to no Delta table, and none can be made there; or it can be read in two
            ways. Says what to write.
    """
    if not isinstance(text, str):
        raise UsageError(f"a table is given as text (its path, URI or name), not as {text!r}")
    parsed = parse(text)
    if isinstance(parsed, str):
        if location:
            raise UsageError(
                f"table {text!r} is a path, and location={location!r} is only for a table that has a name in "
                "a catalog: leave one of them out"
            )
        return TableTarget(text, table_location(parsed))
    found = _by_name(session, parsed, text, location) if parsed is not None else None
    if found is None:
        raise UsageError(f"table {text!r} is not in a catalog: {readings(text, _suggested(session, text))}")
    table_location(found.uri)
    _refuse_ambiguous(storage, text, found)
    return found


def find_again(session: SparkSession, storage: Storage, declared: TableTarget) -> TableTarget:
    """Find the present target of a declared table.

    Raises:
        UsageError: as `find_target`, or the name leads elsewhere.
    """
    if declared.name is None:
        return declared
    found = find_target(session, storage, declared.text, "" if declared.managed else declared.uri)
    if not same_place(found.uri, declared.uri):
        raise UsageError(
            f"table {declared.name} led to {declared.uri} when it was declared, and now leads to "
            f"{found.uri}: declare the job again"
        )
    return found


def enter(session: SparkSession, target: TableTarget) -> None:
    """Register an existing table in the catalog under its name, if it has one. Repeatable.

    Killed between the first commit of a table and this, the next start finds the table and enters it.

    Raises:
        UsageError: another table was registered under the name meanwhile.
    """
    name = target.name
    if name is None or target.entered:
        return
    session_catalog.register(session, name, target.uri, target.managed)
    entry = session_catalog.entry_of(session, name)
    if entry is None or not same_place(_location(entry.location), target.uri):
        there = entry.location if entry is not None else "nothing"
        raise UsageError(
            f"table {name} should lead to {target.uri}, and leads to {there}: somebody else created it "
            "meanwhile; declare the job again"
        )


def _by_name(session: SparkSession, written: TableName, text: str, location: str) -> TableTarget | None:
    """Return the catalog's entry for a name; None if there is no such table and no schema for it."""
    if session_catalog.is_temporary_view(session, written):
        raise UsageError(f"table {text!r} is a temporary view: name a Delta table, as schema.table")
    name = session_catalog.full_name(session, written)
    entry = session_catalog.entry_of(session, name)
    if entry is not None:
        if entry.provider != "delta" or not entry.location:
            what = f"a table of {entry.provider}" if entry.provider else "a view"
            raise UsageError(f"table {name} is {what}: rows go to Delta tables only")
        uri = _location(entry.location)
        if location and not same_place(location_of(location), uri):
            raise UsageError(f"table {name} is at {uri}, not at {location_of(location)}: leave location= out")
        return TableTarget(text, uri, name, entered=True, managed=not location)
    if len(written.parts) == 1 or not name.namespace or not session_catalog.has_schema(session, name):
        return None
    if not name.in_session_catalog:
        raise UsageError(
            f"table {name} does not exist, and catalog {name.catalog!r} does not say where it would be: "
            "create it with CREATE TABLE first"
        )
    if not _CREATABLE.fullmatch(name.table):
        raise UsageError(
            f"table {name} does not exist and cannot be created: the catalog takes only letters, digits "
            "and _ in names"
        )
    planned = location or session_catalog.planned_location(session, name)
    return TableTarget(text, _location(planned), name, managed=not location)


def _refuse_ambiguous(storage: Storage, text: str, found: TableTarget) -> None:
    """Refuse a text that is the path of a Delta table as well; in backticks it is a name and nothing else."""
    beside = storage.place(location_of(text)) if "`" not in text else None
    if beside is None or same_place(beside.uri, found.uri):
        return
    if Table.find(beside) is None:
        return
    assert found.name is not None
    short = TableName((*found.name.namespace, found.name.table)).sql
    raise UsageError(
        f"table {text!r} is the path of the Delta table {beside.uri}, and {found.name} is a table of the "
        f"catalog, at {found.uri}: {readings(text, short)}"
    )


def _suggested(session: SparkSession, text: str) -> str:
    """Return a name of the catalog that could be meant."""
    parsed = parse(text)
    table = parsed.parts[-1] if isinstance(parsed, TableName) else "name"
    schema = str(session.catalog.currentDatabase())
    return str(TableName((schema, table)))


def _location(text: str) -> str:
    """Return a location that a catalog says, in the form that is stored; local paths may hold anything."""
    return location_of(_OF_FILES.sub("/", text, count=1))


def same_place(one: str, other: str) -> bool:
    """Say whether two locations are one, symbolic links followed."""
    return one == other or (one.startswith("/") and os.path.realpath(one) == os.path.realpath(other))
