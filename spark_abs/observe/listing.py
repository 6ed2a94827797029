"""The checkpoints of a root and the events of its history, as rows and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pyarrow as pa

from spark_abs.codec import from_plain
from spark_abs.errors import DamageError
from spark_abs.manifests.find import list_manifests
from spark_abs.model import NO_ATTEMPT, AttemptId, CheckpointId, RunId
from spark_abs.protocol.control import WATCHED_JOB
from spark_abs.store import history
from spark_abs.store.control import Control
from spark_abs.store.history import PATH, History, HistoryRow
from spark_abs.store.root import Root
from spark_abs.store.table import Table


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One completed checkpoint or savepoint. Of a damaged one only the id may be known."""

    id: CheckpointId | None
    kind: str | None = None
    name: str | None = None
    attempt: AttemptId | None = None
    run: RunId | None = None
    triggered_ms: int | None = None
    completed_ms: int | None = None
    age_ms: int | None = None
    """Since it was completed."""
    duration_ms: int | None = None
    """From the trigger to its completion."""
    size_new: int | None = None
    """Bytes that it wrote."""
    size_full: int | None = None
    """Bytes needed to restore it."""
    abandoned: bool = False
    """A restore went back to before it; it can still be restored."""
    edited: bool = False
    """An edit made it: no run has been at this point, until a restore goes to it."""
    damage: str | None = None
    moment_ms: int | None = None
    """Of a cut that a watcher keeps: of when it is, for `--before` of a rewind."""


SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("attempt", pa.int64()),
        ("run", pa.int64()),
        ("triggered_ms", pa.int64()),
        ("completed_ms", pa.int64()),
        ("age_ms", pa.int64()),
        ("duration_ms", pa.int64()),
        ("size_new", pa.int64()),
        ("size_full", pa.int64()),
        ("abandoned", pa.bool_()),
        ("edited", pa.bool_()),
        ("damage", pa.string()),
        ("moment_ms", pa.int64()),
    ]
)
"""A `CheckpointRow` as columns."""


def checkpoint_table(root: Root, now_ms: int) -> pa.Table:
    """Return `checkpoint_rows` as a table."""
    return pa.Table.from_pylist([asdict(row) for row in checkpoint_rows(root, now_ms)], schema=SCHEMA)


def checkpoint_rows(root: Root, now_ms: int) -> tuple[CheckpointRow, ...]:
    """List completed checkpoints by id, damaged ones included.

    Reads flat columns only. Of the Delta logs it reads the part after their own last checkpoint, so that the
    number of files does not grow with the number of checkpoints.

    Raises:
        UsageError: there is no job at this root.
        DamageError: a log cannot be read.
    """
    state = Control.open(root).state
    found = list_manifests(root, state.job)
    rows = [
        CheckpointRow(
            id=s.id,
            kind=s.kind.value,
            name=s.name,
            attempt=s.attempt,
            run=s.run,
            triggered_ms=s.triggered_ms,
            completed_ms=s.completed_ms,
            age_ms=max(0, now_ms - s.completed_ms),
            duration_ms=s.completed_ms - s.triggered_ms,
            size_new=s.size_new,
            size_full=s.size_full,
            abandoned=s.attempt != NO_ATTEMPT and not state.on_path(s.attempt, s.id),
            edited=s.attempt == NO_ATTEMPT,
            moment_ms=s.acked_ms if state.job == WATCHED_JOB else None,
        )
        for s in found.completed
    ]
    rows += [CheckpointRow(d.id, damage=f"{d.path}: {d.error}") for d in found.damaged]
    return tuple(sorted(rows, key=lambda row: row.id or 0))


def event_table(root: Root, limit: int | None = None) -> pa.Table:
    """Return the newest `limit` events by time, all if None, in the columns of `history/`.

    Raises:
        UsageError: there is no job at this root.
        DamageError: the history cannot be read.
    """
    Control.open(root)
    if Table.find(root.place(PATH)) is None:
        return history.SCHEMA.empty_table()
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
