"""The events of a root for the page, followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spark_abs.model import CheckpointId
from spark_abs.report.model import MOST_CHECKPOINTS, MOST_EVENTS
from spark_abs.report.timeline import OF_CHECKPOINTS, OF_STAGES, Events
from spark_abs.store.history import SCHEMA
from spark_abs.store.history_follower import HistoryFollower, Row, rows_of
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_OF_CHECKPOINTS = sorted(event.value for event in OF_CHECKPOINTS)
_OF_STAGES = sorted(event.value for event in OF_STAGES)


class HistoryTail:
    """The events of a root: of each kind only what the page has room for. Not thread-safe."""

    def __init__(self, root: Root) -> None:
        self._follower = HistoryFollower(root)
        self._events = Events()
        self._last_claimed = CheckpointId(0)

    def read(self, last_claimed: CheckpointId) -> Events:
        """Return the events up to now.

        Args:
            last_claimed: the newest checkpoint id.

        Raises:
            DamageError: the table cannot be read.
            OSError: the store cannot be read now.
        """
        self._last_claimed = last_claimed
        self._follower.follow(self._whole, self._add)
        return self._events

    def _add(self, rows: Iterable[Row]) -> None:
        self._events.add(rows)

    def _whole(self, table: Table) -> None:
        events, there = Events(), set(table.schema.names)
        columns = [name for name in SCHEMA.names if name in there]
        oldest = max(0, self._last_claimed - MOST_CHECKPOINTS)
        of_checkpoints = [("event", "in", _OF_CHECKPOINTS), ("checkpoint", ">", oldest)]
        events.add(rows_of(table.read(columns, of_checkpoints).sort_by("at_ms")))
        wanted = [int(number) for number in events.wanted()]
        if wanted:
            of_stages = [("event", "in", _OF_STAGES), ("checkpoint", "in", wanted)]
            events.add(rows_of(table.read(columns, of_stages).sort_by("at_ms")))
        few = [name for name in _EVENT_COLUMNS if name in there]
        others = table.read(few, [("event", "not in", [*_OF_CHECKPOINTS, *_OF_STAGES])]).sort_by("at_ms")
        events.add(rows_of(others.slice(max(0, others.num_rows - MOST_EVENTS))))
        self._events = events


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
