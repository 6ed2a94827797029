"""The events of `history/` as a table, and as rows."""

from __future__ import annotations

import pyarrow as pa

from spark_abs.codec import from_plain
from spark_abs.errors import DamageError
from spark_abs.store.control import Control
from spark_abs.store.history import PATH, SCHEMA, History, HistoryRow
from spark_abs.store.root import Root
from spark_abs.store.table import Table


def event_table(root: Root, limit: int | None = None) -> pa.Table:
    """Return the newest `limit` events by time, all if None, in the columns of `history/`.

    Raises:
        UsageError: there is no job at this root.
        DamageError: the history cannot be read.
    """
    Control.open(root)
    try:
        Table.open(root.place(PATH))
    except FileNotFoundError:
        return SCHEMA.empty_table()
    events = History(root).read()
    return events if limit is None else events.slice(max(0, events.num_rows - limit))


def event_rows(root: Root, limit: int | None = None) -> tuple[HistoryRow, ...]:
    """Return the newest `limit` events by time, all if None.

    Raises:
        UsageError: there is no job at this root.
        DamageError: the history cannot be read.
    """
    events = event_table(root, limit)
    try:
        return tuple(from_plain(HistoryRow, row) for row in events.to_pylist())
    except DamageError as error:
        raise DamageError(f"{root.uri}/{PATH} holds a row that is no event: {error}") from error
