"""The trigger decision: may a checkpoint begin now (P2, P3)? After Flink's `CheckpointRequestDecider`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spark_abs.model import CheckpointKind, CheckpointMode


class RunStatus(StrEnum):
    """The status of the job, for decisions on checkpoints."""

    CREATED = "created"
    RUNNING = "running"
    ENDING = "ending"
    """Only barriers keep a loop from ending: none is sent until the loop has ended or has rows again."""
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """When checkpoints begin and how long they may take, in milliseconds."""

    interval_ms: int | None
    """From one trigger to the next; None: only on demand."""
    min_pause_ms: int
    """From an outcome (completion or abort) to the next periodic trigger; wins over the interval."""
    timeout_ms: int
    """A checkpoint that is not complete after this time is aborted."""
    tolerated_failures: int | None = None
    """How many checkpoints may fail in a row before the job fails; None: no limit."""
    max_concurrent: int = 1
    """How many checkpoints may be open at once; savepoints are not limited."""
    mode: CheckpointMode = CheckpointMode.ALIGNED
    """The mode of checkpoints; savepoints are always aligned."""
    aligned_timeout_ms: int | None = None
    """An aligned checkpoint that is not complete after this time becomes unaligned; None: never."""
    skip_unchanged: bool = True
    """Whether a periodic checkpoint that would equal the last completed one is skipped."""


@dataclass(frozen=True, slots=True)
class Request:
    """A requested checkpoint or savepoint; `id` is the caller's, for the answer."""

    id: str
    kind: CheckpointKind
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """The past triggers and outcomes that the decision needs, in the time of the events."""

    running_since_ms: int = 0
    triggered_ms: int | None = None
    """The newest trigger since then."""
    decided_ms: int | None = None
    """The newest outcome since then."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """Begin a checkpoint now: for `request`, or a periodic one."""

    request: Request | None


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Begin no checkpoint now. Decide again at `ms`; None: only after the next event."""

    ms: int | None


def decide(
    now_ms: int,
    status: RunStatus,
    settings: TriggerSettings,
    waiting: Sequence[Request],
    *,
    busy: bool,
    past: Past,
    pending: int = 0,
) -> Trigger | WaitUntil:
    """Decide whether a checkpoint begins now.

    One id is claimed at a time. Savepoints go first and do not wait; then requested checkpoints, which wait
    while too many checkpoints are open; then periodic ones, which also wait for the interval and the pause.
    Checkpoints begin only while the job is running, except the savepoint with which a stopping job ends.

    Args:
        now_ms: the time of the event.
        status: the status of the job.
        settings: the present settings; they may change between decisions.
        waiting: requests not yet begun, oldest first.
        busy: whether an id is being claimed, or a savepoint that ends the job is open or taken.
        past: the newest trigger and outcome.
        pending: how many checkpoints and savepoints are open.
    """
    if busy:
        return WaitUntil(None)
    if status is RunStatus.STOPPING:
        last = next((r for r in waiting if r.kind is CheckpointKind.SYNC_SAVEPOINT), None)
        return Trigger(last) if last else WaitUntil(None)
    if status is not RunStatus.RUNNING:
        return WaitUntil(None)
    if savepoint := next((r for r in waiting if r.kind.owned_by_user), None):
        return Trigger(savepoint)
    if pending >= settings.max_concurrent:
        return WaitUntil(None)
    if waiting:
        return Trigger(waiting[0])
    if settings.interval_ms is None:
        return WaitUntil(None)
    begun = past.running_since_ms if past.triggered_ms is None else past.triggered_ms
    due = begun + settings.interval_ms
    if past.decided_ms is not None:
        due = max(due, past.decided_ms + settings.min_pause_ms)
    return Trigger(None) if now_ms >= due else WaitUntil(due)
