"""What our commits to a sink say, in their user metadata."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.model import FORMAT, NO_BATCH, AttemptId, Barrier, BatchId, CheckpointId, RunId, Version


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What a batch read: with it a lost stage can repeat the batch."""

    batch: BatchId
    offsets: str
    """The text of the stage's `offsets/<batch>`."""


@dataclass(frozen=True, slots=True)
class SinkNote:
    """The user metadata of our commits to a sink, by which they are told from everybody else's."""

    sink: str
    """`<job>/<stage>/<output>`."""
    attempt: AttemptId
    run: RunId
    batch: BatchId = NO_BATCH
    barrier: Barrier | None = None
    cancel: CheckpointId | None = None
    restored: Version | None = None
    """Set in the commit that brought the table back to that version for the attempt."""
    attached: bool = False
    """Set in the commit with which the attempt came to a table that held nothing of it."""
    plans: tuple[PlannedBatch, ...] = ()
    """Of a stage without channels: what this batch read, and those without rows before it."""
    v: int = FORMAT
