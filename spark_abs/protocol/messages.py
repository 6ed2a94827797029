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
    """A checkpoint or savepoint was requested. The same request id may come again."""

    now_ms: int
    request: Request


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody wants an open checkpoint aborted. The same request id may come again."""

    now_ms: int
    request_id: str
    which: str
    """The id, or the name of the savepoint."""
    by: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A stage takes part: from now on every checkpoint without an outcome needs it."""

    now_ms: int
    stage: StageId


@dataclass(frozen=True, slots=True)
class Left:
    """A stage has left: from now on no checkpoint needs it, not even an open one."""

    now_ms: int
    stage: StageId


@dataclass(frozen=True, slots=True)
class Claimed:
    """The id of `barrier` is durably claimed: the answer to `Claim`, repeated for a new coordinator."""

    now_ms: int
    barrier: Barrier
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """No id was claimed, since no stage has done anything since its cut: the other answer to `Claim`."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Acked:
    """A stage's part of a checkpoint is durable (P13)."""

    now_ms: int
    id: CheckpointId
    snapshot: StageSnapshot


@dataclass(frozen=True, slots=True)
class Declined:
    """A stage cannot do its part, or passed the barrier without a cut."""

    now_ms: int
    id: CheckpointId
    stage: StageId
    reason: AbortReason
    detail: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The outcome of a checkpoint is durable: the answer to `Complete` or `Abort`."""

    now_ms: int
    id: CheckpointId
    completed: bool
    reason: AbortReason | None = None


Event = (
    StatusChanged
    | Tick
    | Requested
    | CancelRequested
    | Joined
    | Left
    | Claimed
    | Skipped
    | Acked
    | Declined
    | Decided
)


class AckResult(StrEnum):
    """The result of an acknowledgement (P13)."""

    SUCCESS = "success"
    """It counts."""
    DUPLICATE = "duplicate"
    """The acknowledgement was counted."""
    UNKNOWN = "unknown"
    """The checkpoint is unknown, or the job has no such stage."""
    DISCARDED = "discarded"
    """The checkpoint was aborted already."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim an id durably, then send `Claimed` and pass the barrier to the stages.

    But send `Skipped`, and do nothing, if every stage stands at its cut in `unless`.
    """

    kind: CheckpointKind
    name: str | None
    request_id: str | None
    mode: CheckpointMode = CheckpointMode.ALIGNED
    unless: tuple[StageSnapshot, ...] = ()
    """The cuts of all stages in the last completed checkpoint; empty: claim in any case."""


@dataclass(frozen=True, slots=True)
class Overtake:
    """Tell every stage that an aligned checkpoint is unaligned from now on, then record it durably (P16).

    The order matters: gates learn of the change from the record, and so read past the barrier only after the
    stage was told. Repeatable; after a crash between the two, gates still wait.
    """

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Complete:
    """Commit the manifest, or the abort if that is impossible, then send `Decided`."""

    id: CheckpointId
    snapshots: tuple[StageSnapshot, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Commit the abort, then send `Decided`."""

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
    """Release the resources of a checkpoint's acknowledgements: none of them will count."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell every stage of a durable outcome (P15)."""

    id: CheckpointId
    completed: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request. `id` is None if no id was claimed."""

    request_id: str
    id: CheckpointId | None
    ok: bool
    message: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """End the job: more checkpoints have failed in a row than tolerated (P3)."""

    message: str


Effect = Claim | Overtake | Complete | Abort | AckAnswer | Discard | Notify | Answer | FailJob
