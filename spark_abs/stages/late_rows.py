"""Rows that Spark dropped behind a watermark, counted per query."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, ClassVar

from pyspark import SparkContext
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)


class LateRows(StreamingQueryListener):
    """Adds up what every progress report says; Spark calls it from a thread of its own.

    Spark 4.2 makes a Python object of a report before a listener sees it, by a hundred calls into the JVM
    and more; here the JVM gets a listener that asks the report for one number.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._java: Any | None = None

    def dropped(self, query_id: str) -> int:
        """Return the rows that a query has dropped since the listener was added."""
        with self._lock:
            return self._counts[query_id]

    def add(self, query_id: str, rows: int) -> None:
        """Count the rows that one batch has dropped."""
        with self._lock:
            self._counts[query_id] += rows

    @property
    def _jlistener(self) -> Any:
        """The listener in the JVM, which Spark adds and removes."""
        if self._java is None:
            assert SparkContext._jvm is not None, "a session has a JVM"
            self._java = SparkContext._jvm.PythonStreamingQueryListenerWrapper(_Reports(self))
        return self._java

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Is not called."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Is not called."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Is not called."""


class _Reports:
    """What py4j shows the JVM as a `PythonStreamingQueryListener`; events are objects of the JVM."""

    def __init__(self, late: LateRows) -> None:
        self._late = late

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        progress = event.progress()
        dropped = sum(operator.numRowsDroppedByWatermark() for operator in progress.stateOperators())
        if dropped:
            self._late.add(progress.id().toString(), dropped)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Pass over."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Pass over."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Pass over."""

    class Java:
        implements: ClassVar = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]
