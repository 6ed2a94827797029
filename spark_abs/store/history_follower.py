"""Reads `history/` once, and from then on only what was added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from spark_abs.errors import DamageError
from spark_abs.model import Version, checked_relative
from spark_abs.store.history import PATH
from spark_abs.store.root import Root
from spark_abs.store.table import Table

Row = Mapping[str, Any]
"""A row of `history/`; a column that the table lacks is missing or None."""

MOST_COMMITS = 200
"""After so many commits there are fewer files to read than commits: small ones were merged meanwhile."""
_BATCH = 10_000
"""Rows that are Python objects at one time."""


class HistoryFollower:
    """A place in the log of `history/`. Not thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._table: Table | None = None
        self._version: Version | None = None
        """Up to which the rows were handed over; None: nothing was, or not all of it."""

    def follow(self, whole: Callable[[Table], None], add: Callable[[Iterable[Row]], None]) -> None:
        """Hand over what came since the last call; nothing if there is no table.

        Args:
            whole: takes the table at the first call, and again where what came since the last call is not
                there any more, is much, or was not taken since an error was raised. What it was handed before
                counts no more.
            add: takes the new rows, by time in each file.

        Raises:
            DamageError: the table cannot be read.
            OSError: the store cannot be read now.
        """
        table, after = self._refreshed(), self._version
        if table is None:
            return
        added = None if after is None else self._added(table, after)
        self._version = None
        if added is None:
            whole(table)
        else:
            for part in added:
                add(rows_of(part))
        self._version = table.version

    def _refreshed(self) -> Table | None:
        if self._table is not None:
            try:
                self._table.refresh()
            except DeltaError:  # the table may be another one
                self._table = self._version = None
        if self._table is None:
            self._table = Table.find(self._root.place(PATH))
        return self._table

    def _added(self, table: Table, after: Version) -> list[pa.Table] | None:
        """Return the files that were added after a version, by time; None to read all of them instead."""
        if table.version - after > MOST_COMMITS:
            return None
        added: list[pa.Table] = []
        for version in range(after + 1, table.version + 1):
            commit = table.read_commit(version)
            if commit is None:
                return None
            if not commit.data_change:  # small files were merged
                continue
            for file in commit.adds:
                data = self._root.read_whole(f"{PATH}/{checked_relative(file.path)}")
                if data is None:
                    return None
                added.append(_parsed(data, file.path).sort_by("at_ms"))
        return added


def rows_of(table: pa.Table) -> Iterator[Row]:
    """Iterate the rows of a table, few of them in memory at one time."""
    for batch in table.to_batches(max_chunksize=_BATCH):
        yield from batch.to_pylist()


def _parsed(data: bytes, path: str) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise DamageError(f"{PATH}/{path} cannot be read: {error}") from error
