"""`history/`: a table that was made before a column was there is read, and gets it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from spark_abs.model import AttemptId
from spark_abs.store.history import PATH, SCHEMA, History, HistoryEvent, HistoryRow
from spark_abs.store.root import Root
from spark_abs.store.table import Table

ADDED = (
    "alignment_bytes",
    "acks",
    "stages",
    "last_completed_age_ms",
    "backpressured_ms",
    "mode",
    "inflight_bytes",
)


def test_columns_that_came_later_are_null_in_older_rows(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    older = pa.schema([field for field in SCHEMA if field.name not in ADDED])
    Table.ensure(root.place(PATH), older)
    history = History(root)
    assert history.read().schema.names == SCHEMA.names
    history.append([HistoryRow(1, HistoryEvent.RUN_STARTED, AttemptId(1))])
    history.append([HistoryRow(2, HistoryEvent.COMPLETED, AttemptId(1), acks=3, stages=3)])
    found = History(root).read()
    assert found.schema.names == SCHEMA.names
    assert found.select(["at_ms", "acks"]).to_pylist() == [
        {"at_ms": 1, "acks": None},
        {"at_ms": 2, "acks": 3},
    ]
