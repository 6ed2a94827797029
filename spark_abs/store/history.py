"""`history/`: the events of all checkpoints, kept after the checkpoints are removed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from spark_abs.errors import AbortReason
from spark_abs.model import AttemptId, BatchId, CheckpointId, RunId, StageId
from spark_abs.protocol.control import Command
from spark_abs.protocol.messages import Answer
from spark_abs.store.root import Root
from spark_abs.store.table import Table

log = logging.getLogger(__name__)

PATH = "history"
SCHEMA = pa.schema(
    [
        ("at_ms", pa.int64()),
        ("event", pa.string()),
        ("checkpoint", pa.int64()),
        ("attempt", pa.int64()),
        ("run", pa.int64()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("duration_ms", pa.int64()),
        ("size_full", pa.int64()),
        ("size_new", pa.int64()),
        ("start_delay_ms", pa.int64()),
        ("alignment_ms", pa.int64()),
        ("sync_ms", pa.int64()),
        ("async_ms", pa.int64()),
        ("dropped_late", pa.int64()),
        ("alignment_bytes", pa.int64()),
        ("acks", pa.int64()),
        ("stages", pa.int64()),
        ("last_completed_age_ms", pa.int64()),
        ("batch", pa.int64()),
        ("restarts", pa.int64()),
        ("backpressured_ms", pa.int64()),
        ("mode", pa.string()),
        ("inflight_bytes", pa.int64()),
        ("settings", pa.string()),
        ("by", pa.string()),
    ]
)


NO_FAILURE = frozenset(
    reason.value
    for reason in (
        AbortReason.SUBSUMED,
        AbortReason.JOB_STOPPING,
        AbortReason.RUN_ENDED,
        AbortReason.CANCELLED,
    )
)
"""Reasons of aborts that are part of a job in order."""


class HistoryEvent(StrEnum):
    """What a row of `history/` reports."""

    RUN_STARTED = "run-started"
    RUN_ENDED = "run-ended"
    TRIGGERED = "triggered"
    OVERTAKEN = "overtaken"
    """An aligned checkpoint that took too long became unaligned."""
    STAGE_ACKED = "stage-acked"
    STAGE_WAITING = "stage-waiting"
    """A stage that had not acknowledged a checkpoint when it was aborted or overtaken, and how far it was."""
    COMPLETED = "completed"
    ABORTED = "aborted"
    RESTORED = "restored"
    RETIRED = "retired"
    SETTINGS_CHANGED = "settings-changed"
    """A setting of the running job was changed; `detail` has the old and the new value."""
    STAGE_RESTARTED = "stage-restarted"
    """A failed stage was restarted while the others continued."""
    COMMAND = "command"
    """A request of somebody was answered: `kind` is the command, `reason` is `done` or `refused`."""
    STAGE_REBUILT = "stage-rebuilt"
    """A stage that had lost its native checkpoint was rebuilt up to its own outputs."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One event. Times and durations in milliseconds, sizes in bytes."""

    at_ms: int
    event: HistoryEvent
    attempt: AttemptId
    run: RunId | None = None
    checkpoint: CheckpointId | None = None
    kind: str | None = None
    name: str | None = None
    stage: StageId | None = None
    reason: str | None = None
    detail: str | None = None
    duration_ms: int | None = None
    size_full: int | None = None
    size_new: int | None = None
    start_delay_ms: int | None = None
    alignment_ms: int | None = None
    sync_ms: int | None = None
    async_ms: int | None = None
    dropped_late: int | None = None
    alignment_bytes: int | None = None
    """Bytes that queued up behind the barrier on waiting inputs."""
    acks: int | None = None
    """How many of the `stages` had acknowledged."""
    stages: int | None = None
    last_completed_age_ms: int | None = None
    """The time since the newest checkpoint before this event was completed: a crash would replay as much."""
    batch: BatchId | None = None
    """The batch that failed."""
    restarts: int | None = None
    """The number of restarts of stages in this run, this one included."""
    backpressured_ms: int | None = None
    """How long the stage had waited for credit since its previous cut."""
    mode: str | None = None
    """The mode of the barrier at this moment."""
    inflight_bytes: int | None = None
    """Bytes of rows in flight: part of the checkpoint, before the barrier, and not yet read."""
    settings: str | None = None
    """Of a run that starts: those that differ from their defaults."""
    by: str | None = None
    """The user and the host that asked for it."""


def command_row(
    command: Command, answer: Answer, at_ms: int, attempt: AttemptId, run: RunId | None
) -> HistoryRow:
    """Return the event of an answered command; `duration_ms` is the time from the request to its answer."""
    return HistoryRow(
        at_ms,
        HistoryEvent.COMMAND,
        attempt,
        run,
        answer.id,
        kind=str(command.kind),
        name=command.name,
        stage=StageId(", ".join(command.stages)) or None,
        reason="done" if answer.ok else "refused",
        detail=answer.message,
        duration_ms=max(0, at_ms - command.asked_ms),
        by=command.by or None,
    )


@dataclass(frozen=True, slots=True)
class RunEvents:
    """What has happened in a run, oldest first."""

    restarts: list[tuple[StageId, BatchId, str]] = field(default_factory=list)
    """Stage, batch and cause of each restart."""
    late: list[tuple[CheckpointId, StageId, str]] = field(default_factory=list)
    """The stages without a cut when an open checkpoint was overtaken, and why."""
    failed: list[dict[str, Any]] = field(default_factory=list)
    """`checkpoint`, `at_ms`, `reason` and `detail` of each checkpoint that failed since the newest completed
    one. Those that a newer one subsumed, and those of a run that stops, have not failed."""
    settings: list[str] = field(default_factory=list)
    """With which the run started; empty texts of earlier versions, nothing if none are recorded."""

    KINDS = (
        HistoryEvent.STAGE_RESTARTED,
        HistoryEvent.STAGE_WAITING,
        HistoryEvent.ABORTED,
        HistoryEvent.COMPLETED,
        HistoryEvent.RUN_STARTED,
    )
    COLUMNS = ("event", "checkpoint", "stage", "batch", "reason", "detail", "settings")

    def copy(self) -> RunEvents:
        """Return what is known now, which later events do not change."""
        return RunEvents(self.restarts[:], self.late[:], self.failed[:], self.settings[:])

    def take(self, row: Mapping[str, Any]) -> None:
        """Take the next event of the run; one of another kind changes nothing."""
        why = row.get("detail") or ""
        if row["event"] in (HistoryEvent.COMPLETED, HistoryEvent.ABORTED):
            self.late[:] = [late for late in self.late if late[0] != row["checkpoint"]]
        match row["event"]:
            case HistoryEvent.STAGE_RESTARTED:
                self.restarts.append((StageId(row["stage"]), BatchId(row["batch"]), why))
            case HistoryEvent.STAGE_WAITING:
                self.late.append((CheckpointId(row["checkpoint"]), StageId(row["stage"]), why))
            case HistoryEvent.COMPLETED:
                self.failed.clear()
            case HistoryEvent.RUN_STARTED:
                self.settings.append(row.get("settings") or "")
            case HistoryEvent.ABORTED if row.get("reason") not in NO_FAILURE:
                self.failed.append(
                    {name: row.get(name) for name in ("checkpoint", "at_ms", "reason", "detail")}
                )


@contextmanager
def unless_refused() -> Iterator[None]:
    """Skip an event that the store refuses: the event itself has happened all the same."""
    try:
        yield
    except (DeltaError, OSError) as error:
        log.warning("history/ could not be written: %s", error)


def record_event(root: Root, row: HistoryRow) -> None:
    """Append an event that has happened, unless the store refuses it."""
    with unless_refused():
        History(root).append([row])


class History:
    """A handle on `history/`. Not thread-safe."""

    MOST_FILES = 100
    LOOK_EVERY = 100
    """Appends between two checks for files to compact."""

    def __init__(self, root: Root) -> None:
        self._table = Table.ensure(root.place(PATH), SCHEMA)
        self._appends = count(1)

    def append(self, rows: Sequence[HistoryRow]) -> None:
        """Add events in one commit, and columns that came after the table."""
        if not rows:
            return
        table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
        write_deltalake(self._table.delta, table, mode="append", schema_mode="merge")
        if next(self._appends) % self.LOOK_EVERY == 0:
            self.compact()

    def compact(self) -> None:
        """Merge small files if there are many, those of other runs included."""
        self._table.refresh()
        if len(self._table.delta.file_uris()) > self.MOST_FILES:
            self._table.delta.optimize.compact()

    def of_run(self, run: RunId) -> RunEvents:
        """Return what a status needs to know of a run."""
        found = RunEvents()
        for row in self._of(run, RunEvents.KINDS, RunEvents.COLUMNS):
            found.take(row)
        return found

    def stage_sizes(self, run: RunId) -> list[dict[str, Any]]:
        """Return `checkpoint`, `stage`, `at_ms` and `size_full` of each acknowledgement of a run, by time."""
        return self._of(run, (HistoryEvent.STAGE_ACKED,), ("checkpoint", "stage", "size_full"))

    def last_restore_ms(self) -> int | None:
        """Return how long the newest restore took; None if there was none."""
        self._table.refresh()
        restores = [("event", "=", HistoryEvent.RESTORED.value)]
        rows = self._table.read(("at_ms", "duration_ms"), restores).sort_by("at_ms").to_pylist()
        return rows[-1]["duration_ms"] if rows else None

    def _of(self, run: RunId, kinds: Sequence[HistoryEvent], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the events of some kinds of a run by time."""
        self._table.refresh()
        mine = [("event", "in", [kind.value for kind in kinds]), ("run", "=", int(run))]
        return self._read(("at_ms", *columns), mine).to_pylist()  # type: ignore[no-any-return]

    def read(self) -> pa.Table:
        """Return all events by time, in the columns of `SCHEMA`."""
        self._table.refresh()
        return self._read(SCHEMA.names)

    def _read(
        self, columns: Sequence[str], filters: Sequence[tuple[str, str, object]] | None = None
    ) -> pa.Table:
        """Return events by time; columns that came after the table are null."""
        there = set(self._table.schema.names)
        found = self._table.read([name for name in columns if name in there], filters)
        for name in columns:
            if name not in there:
                found = found.append_column(name, pa.nulls(found.num_rows, SCHEMA.field(name).type))
        return found.select(list(columns)).sort_by("at_ms")
