"""Reads `history/` once, and from then on only what was added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from spark_abs.errors import DamageError
from spark_abs.model import CheckpointId, Version, checked_relative
from spark_abs.report.model import MOST_CHECKPOINTS, MOST_EVENTS
from spark_abs.report.timeline import OF_CHECKPOINTS, OF_STAGES, Events, Row
from spark_abs.store.history import PATH, SCHEMA
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_OF_CHECKPOINTS = sorted(event.value for event in OF_CHECKPOINTS)
_OF_STAGES = sorted(event.value for event in OF_STAGES)
_BATCH = 10_000
"""Rows that are Python objects at one time."""


class HistoryTail:
    """The events of a root. Not thread-safe.

    The first read takes of each kind of event only what the page has room for. A later read opens the files
    that were added since. After a commit that is gone, or a file, everything is read again.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._table: Table | None = None
        self._version: Version | None = None
        self._events = Events()

    def read(self, last_claimed: CheckpointId) -> Events:
        """Return the events up to now.

        Args:
            last_claimed: the newest checkpoint id.

        Raises:
            DamageError: the table cannot be read.
            OSError: the store cannot be read now.
        """
        if self._table is None:
            self._table = Table.find(self._root.place(PATH))
            if self._table is None:
                return self._events
        else:
            self._table.refresh()
        if self._version is None or not self._follow(self._table, self._version):
            self._events = self._whole(self._table, last_claimed)
        self._version = self._table.version
        return self._events

    def _follow(self, table: Table, after: Version) -> bool:
        """Take the events after a version; False if a part of them is gone."""
        added: list[pa.Table] = []
        for version in range(after + 1, table.version + 1):
            commit = table.read_commit(version)
            if commit is None:
                return False
            if not commit.data_change:  # small files were merged
                continue
            for file in commit.adds:
                data = self._root.read_whole(f"{PATH}/{checked_relative(file.path)}")
                if data is None:
                    return False
                added.append(_parsed(data, file.path))
        for part in added:
            self._events.add(_rows(part.sort_by("at_ms")))
        return True

    def _whole(self, table: Table, last_claimed: CheckpointId) -> Events:
        events, there = Events(), set(table.schema.names)
        columns = [name for name in SCHEMA.names if name in there]
        oldest = max(0, last_claimed - MOST_CHECKPOINTS)
        of_checkpoints = [("event", "in", _OF_CHECKPOINTS), ("checkpoint", ">", oldest)]
        events.add(_rows(table.read(columns, of_checkpoints).sort_by("at_ms")))
        wanted = [int(number) for number in events.wanted()]
        if wanted:
            of_stages = [("event", "in", _OF_STAGES), ("checkpoint", "in", wanted)]
            events.add(_rows(table.read(columns, of_stages).sort_by("at_ms")))
        few = [name for name in _EVENT_COLUMNS if name in there]
        others = table.read(few, [("event", "not in", [*_OF_CHECKPOINTS, *_OF_STAGES])]).sort_by("at_ms")
        events.add(_rows(others.slice(max(0, others.num_rows - MOST_EVENTS))))
        return events


_EVENT_COLUMNS: Sequence[str] = (
    "at_ms",
    "event",
    "checkpoint",
    "attempt",
    "run",
    "name",
    "stage",
    "reason",
    "detail",
    "settings",
)


def _parsed(data: bytes, path: str) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise DamageError(f"{PATH}/{path} cannot be read: {error}") from error


def _rows(table: pa.Table) -> Iterator[Row]:
    for batch in table.to_batches(max_chunksize=_BATCH):
        yield from batch.to_pylist()
