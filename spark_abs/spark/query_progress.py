"""What Spark says of a running query, in two calls instead of a Python object of everything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

_PLANS = ("Getting offsets", "Processing new data", "No new data but")


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """Figures of the newest batch that Spark has reported."""

    batch: int
    rows: int
    rows_per_s: float | None
    state_rows: int | None
    """None if the query keeps no state."""
    state_memory: int | None
    has_watermark: bool = False
    """Whether there is a watermark in the plan of the query."""


def is_planning(query: Any) -> str | None:
    """Return what Spark does to plan the next batch of a query; None if it waits, has ended or cannot say.

    Only between two batches: during a batch it says the same.

    Args:
        query: the query's object in the JVM.
    """
    try:
        status = query.status()
        message = str(status.message())
        return message if status.isTriggerActive() and message.startswith(_PLANS) else None
    except (Py4JError, OSError):  # the JVM is being shut down
        return None


def last_progress(query: Any) -> QueryProgress | None:
    """Return the figures of the newest reported batch; None before the first, or if Spark cannot say."""
    try:
        progress = query.lastProgress()
        return None if progress is None else parse_progress(str(progress.json()))
    except (Py4JError, OSError):
        return None


def parse_progress(text: str) -> QueryProgress | None:
    """Return the figures of a report in Spark's JSON form, None if it has another form."""
    try:
        plain = json.loads(text)
        operators = plain.get("stateOperators") or []
        rate = plain.get("processedRowsPerSecond")
        return QueryProgress(
            batch=int(plain["batchId"]),
            rows=int(plain["numInputRows"]),
            rows_per_s=float(rate) if isinstance(rate, int | float) else None,
            state_rows=sum(int(one["numRowsTotal"]) for one in operators) if operators else None,
            state_memory=sum(int(one["memoryUsedBytes"]) for one in operators) if operators else None,
            has_watermark="watermark" in (plain.get("eventTime") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
