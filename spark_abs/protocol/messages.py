"""The input and output of the coordinator: frozen events and effects (P2, P13, P15)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spark_abs.errors import AbortReason
from spark_abs.manifest import StageSnapshot
from spark_abs.model import Barrier, CheckpointId, CheckpointKind, CheckpointMode, StageId
from spark_abs.protocol.trigger import Request, RunStatus


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The job's status is now `status`."""

    now_ms: int
    status: RunStatus
    why: str = ""
    """The failure that ends the job or makes a stage restart."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Requested:
    """Somebody asks for a checkpoint or savepoint. The same request id may come again."""

    now_ms: int
    request: Request


@dataclass(frozen=True, slots=True)
class Joined:
    """A stage has come: no checkpoint without an outcome is complete without it from now on."""

    now_ms: int
    stage: StageId


@dataclass(frozen=True, slots=True)
class Left:
    """A stage has gone: no checkpoint needs it from now on, also none that is open."""

    now_ms: int
    stage: StageId


@dataclass(frozen=True, slots=True)
class Claimed:
    """The id of `barrier` is durably claimed: the answer to `Claim`, or told again to a new coordinator."""

    now_ms: int
    barrier: Barrier
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Acked:
    """A stage's part of a checkpoint is durable (P13)."""

    now_ms: int
    id: CheckpointId
    snapshot: StageSnapshot


@dataclass(frozen=True, slots=True)
class Declined:
    """A stage cannot do its part, or went past the barrier without a cut."""

    now_ms: int
    id: CheckpointId
    stage: StageId
    reason: AbortReason
    detail: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The outcome of a checkpoint is durable: the answer to `Complete` and `Abort`, whichever it was."""

    now_ms: int
    id: CheckpointId
    completed: bool
    reason: AbortReason | None = None


Event = StatusChanged | Tick | Requested | Joined | Left | Claimed | Acked | Declined | Decided


class AckResult(StrEnum):
    """The result of an acknowledgement (P13)."""

    SUCCESS = "success"
    """It counts."""
    DUPLICATE = "duplicate"
    """It has been counted."""
    UNKNOWN = "unknown"
    """No such checkpoint is known, or the job has no such stage."""
    DISCARDED = "discarded"
    """The checkpoint is already aborted."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim an id durably, then say `Claimed` and hand the barrier to the stages."""

    kind: CheckpointKind
    name: str | None
    request_id: str | None
    mode: CheckpointMode = CheckpointMode.ALIGNED


@dataclass(frozen=True, slots=True)
class Overtake:
    """Tell every stage that an aligned checkpoint is unaligned from now on, then record it durably (P16).

    In this order: gates learn of it from the record, and let nothing past the barrier that a stage might not
    have been told of. Repeatable; lost between the two, gates go on waiting.
    """

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Complete:
    """Commit the manifest, or if that is impossible the abort, then say `Decided`."""

    id: CheckpointId
    snapshots: tuple[StageSnapshot, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Commit the abort, then say `Decided`."""

    id: CheckpointId
    reason: AbortReason
    detail: str


@dataclass(frozen=True, slots=True)
class AckAnswer:
    """Tell a stage the result of its acknowledgement."""

    id: CheckpointId
    stage: StageId
    result: AckResult


@dataclass(frozen=True, slots=True)
class Discard:
    """Release all resources of a checkpoint's acknowledgements: none of them will ever count."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell every stage of a durable outcome (P15)."""

    id: CheckpointId
    completed: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell who asked what became of the request. `id` is None if none was claimed."""

    request_id: str
    id: CheckpointId | None
    ok: bool
    message: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """End the job: more checkpoints have failed in a row than are tolerated (P3)."""

    message: str


Effect = Claim | Overtake | Complete | Abort | AckAnswer | Discard | Notify | Answer | FailJob
