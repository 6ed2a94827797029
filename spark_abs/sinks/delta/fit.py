"""Whether the table of a sink still takes its rows: others may change it while a job runs.

Rows are written for a table as it was. They are committed only if they fit the table as it is: it is the same
table, and has each of their columns with the same type. Then how they are written is chosen again, so new
constraints, partitions and features apply to them. Otherwise the batch is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
from deltalake import Schema

from spark_abs.errors import AbsError, CommitConflict, DamageError, TableChanged
from spark_abs.sinks.delta.native_writable import why_not_plain, why_not_sink
from spark_abs.sinks.delta.table_shape import Column, TableShape, columns_of, shape_of
from spark_abs.store.table import Table

log = logging.getLogger(__name__)


class Fit:
    """The shape of an open table as of the version read, and whether rows fit it. Not thread-safe.

    The table is compared anew only after a commit that may have changed it.
    """

    def __init__(
        self,
        table: Table,
        *,
        rewrites: bool,
        stored: Callable[[Sequence[str]], Sequence[str]] = lambda columns: columns,
    ) -> None:
        """Take the table as it is when the sink comes to it.

        Args:
            table: the handle by which the sink commits.
            rewrites: whether batches take rows out of it: they are merged, or take the place of all.
            stored: which columns of the rows the table gets.
        """
        self._table, self._rewrites, self._stored = table, rewrites, stored
        self._at, self._first = table.defined, shape_of(table.delta)
        self._shape, self._plain = self._first, why_not_plain(self._first) is None
        self._seen = table.version, table.written(table.version)
        """The newest commit at the last look, and its file."""
        self._fits: tuple[TableShape, pa.Schema | None] | None = None
        """What was compared last, and found to fit."""

    @property
    def shape(self) -> TableShape:
        """The shape as of the version read; the same object as long as nothing has changed."""
        self._look()
        return self._shape

    @property
    def plain(self) -> bool:
        """Whether the table takes files as Spark writes them, as of the version read."""
        self._look()
        return self._plain

    def _look(self) -> None:
        """Compare the table anew after a commit that may have changed it."""
        if self._table.defined != self._at:
            self._at, found = self._table.defined, shape_of(self._table.delta)
            if found != self._shape:
                self._shape, self._plain = found, why_not_plain(found) is None

    def require(self, rows: pa.Schema | None) -> None:
        """Require that the table takes rows, as of the version read.

        Args:
            rows: their columns; None for a commit without any.

        Raises:
            TableChanged: it does not; says what it was, what it is, and what to do.
        """
        self._require_there()
        shape = self.shape
        if self._fits is not None and self._fits[0] is shape and self._fits[1] == rows:
            return
        given = rows and pa.schema([rows.field(name) for name in self._stored(rows.names)])
        why = why_unfit(self._first, shape, given, rewrites=self._rewrites)
        if why:
            raise TableChanged(self._told("; ".join(why), shape))
        if shape is not (self._fits[0] if self._fits else self._first):
            log.warning("%s was changed by others, and the job goes on: it is %s", self._table.uri, shape)
        self._fits = shape, rows

    def _require_there(self) -> None:
        """Require that the log is still the one that was read: a commit to a new log would leave a gap in it.

        Costs a look at two files: those of the newest commit now and at the last look. They may be gone in
        good order, after a checkpoint: then the log is read.
        """
        table, (before, file) = self._table, self._seen
        newest = table.written(table.version)
        if newest and file and table.written(before) == file:
            self._seen = table.version, newest
            return
        try:
            there = Table.open(table.place)
        except (FileNotFoundError, DamageError) as error:
            raise TableChanged(self._told(f"it is gone ({error})", None)) from error
        if there.id != self._first.id or there.version < table.version:
            why = f"it was made anew: it is at version {there.version}, and was at {table.version}"
            raise TableChanged(self._told(why, shape_of(there.delta)))
        self._seen = table.version, newest

    def _told(self, why: str, shape: TableShape | None) -> str:
        uri = self._table.uri
        if shape == self._first:
            return f"table {uri} cannot be that of a sink: {why}"
        now = f"\nIt is:  {shape}" if shape is not None else ""
        return (
            f"{uri} was changed by others, and no longer takes the rows of the job: {why}.\n"
            f"It was: {self._first}{now}\nThe next start writes the rows if they fit then: bring the "
            "table back to what it was, or declare the job with rows that fit it or with another table"
        )


@contextmanager
def planned_for(table: Table) -> Iterator[None]:
    """Let a write by Spark be decided again if it failed on a table that has changed since it was read.

    Raises:
        CommitConflict: read again, and decide again.
    """
    before = shape_of(table.delta)
    try:
        yield
    except AbsError:
        raise
    except Exception as error:
        table.refresh()
        if shape_of(table.delta) != before:
            raise CommitConflict(f"{table.uri} was changed while it was written: {error}") from error
        raise


def why_unfit(was: TableShape, now: TableShape, rows: pa.Schema | None, *, rewrites: bool) -> list[str]:
    """Return what keeps rows, and all rows, from a table; nothing if they fit."""
    if now.id != was.id:
        return [f"it is another table: its id is {now.id}, and was {was.id}"]
    if why := why_not_sink(now, rewrites=rewrites):
        return [why]
    if rows is None:
        return []
    given = columns_of(json.loads(Schema.from_arrow(rows).to_json()))
    there = _by_name(now.columns)
    return [
        f"column {name} is {_said(there[name])} in it, and {_said(wanted)} in the rows"
        if name in there
        else f"it has no column {name}"
        for name, wanted in _by_name(given).items()
        if there.get(name) != wanted
    ]


def _by_name(columns: tuple[Column, ...]) -> dict[str, tuple[Column, ...]]:
    """Return each column with its nested fields, without nullability and metadata: a writer sees to them."""
    found: dict[str, tuple[Column, ...]] = {}
    for column in columns:
        bare = replace(column, nullable=True, metadata=())
        found[column.path[0]] = (*found.get(column.path[0], ()), bare)
    return found


def _said(columns: tuple[Column, ...]) -> str:
    first, *fields = columns
    inside = ", ".join(f"{'.'.join(field.path[1:])} {field.type}" for field in fields)
    return f"{first.type}<{inside}>" if inside else first.type
