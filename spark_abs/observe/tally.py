"""What status and metrics need of `history/`, for those who look again and again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from spark_abs.model import RunId
from spark_abs.store.history import HistoryEvent, RunEvents
from spark_abs.store.history_follower import HistoryFollower, Row, rows_of
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_COUNTED = frozenset(
    event.value for event in (HistoryEvent.COMPLETED, HistoryEvent.ABORTED, HistoryEvent.RESTORED)
)
_OF_RUNS = sorted(event.value for event in RunEvents.KINDS)
_COLUMNS = ("at_ms", "run", *RunEvents.COLUMNS)


class Tally:
    """The numbers of events of a root, and the events of its newest run. Thread-safe: one reads at a time.

    The first look reads all of `history/`, a later one only what was added. Memory is that of one run.
    """

    def __init__(self, root: Root) -> None:
        self._root, self._follower = root, HistoryFollower(root)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._runs: dict[RunId, RunEvents] = {}
        self._oldest = RunId(0)
        """Of this run and of later ones the events are known."""

    def of_run(self, run: RunId) -> RunEvents:
        """Return the events of a run up to now; after that, those of runs before it are forgotten.

        Raises:
            DamageError: the table cannot be read.
            OSError: the store cannot be read now.
        """
        with self._lock:
            if run < self._oldest:
                self._follower = HistoryFollower(self._root)
            self._oldest = run
            self._follower.follow(self._whole, self._add)
            self._runs = {known: events for known, events in self._runs.items() if known >= run}
            return self._runs.get(run, RunEvents()).copy()

    def counts(self) -> Mapping[str, int]:
        """Return the number of checkpoints and restores of all runs, by the event that ended them, up to now.

        Errors as for `of_run`.
        """
        with self._lock:
            self._follower.follow(self._whole, self._add)
            return self._counts.copy()

    def _whole(self, table: Table) -> None:
        ended = table.read(("event",), [("event", "in", sorted(_COUNTED))])
        self._counts = Counter(ended["event"].to_pylist())
        there = set(table.schema.names)
        mine = [("event", "in", _OF_RUNS), ("run", ">=", int(self._oldest))]
        self._runs = {}
        self._take(rows_of(table.read([c for c in _COLUMNS if c in there], mine).sort_by("at_ms")))

    def _add(self, rows: Iterable[Row]) -> None:
        known = list(rows)
        self._counts.update(row["event"] for row in known if row["event"] in _COUNTED)
        self._take(row for row in known if row["run"] is not None and row["run"] >= self._oldest)

    def _take(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._runs.setdefault(RunId(row["run"]), RunEvents()).take(row)
