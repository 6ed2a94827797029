"""Rows that Spark dropped behind a watermark, counted per query."""

from __future__ import annotations

import threading
from collections import Counter

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)


class LateRows(StreamingQueryListener):
    """Adds up what every progress report says; Spark calls it from a thread of its own."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def dropped(self, query_id: str) -> int:
        """Return the rows that a query has dropped since the listener was added."""
        with self._lock:
            return self._counts[query_id]

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Count one batch."""
        dropped = sum(op.numRowsDroppedByWatermark for op in event.progress.stateOperators)
        if dropped:
            with self._lock:
                self._counts[str(event.progress.id)] += dropped

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Pass over."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Pass over."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Pass over."""
