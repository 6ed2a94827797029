"""Stages of the live run that were started again and have not finished the batch at which they failed."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.model import NO_BATCH, BatchId, RunId, StageId
from spark_abs.protocol.control import ControlState
from spark_abs.store.history import PATH, History
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class StuckStage:
    """A stage without progress."""

    stage: StageId
    batch: BatchId
    restarts: int
    """In a row, at this batch."""
    cause: str
    """Of its last failure that was followed by a restart."""


def stuck_stages(root: Root, state: ControlState, run: RunId) -> tuple[StuckStage, ...]:
    """Return the stages of a run that have not finished the batch at which they failed last."""
    if not root.place(PATH).exists():
        return ()
    found: dict[StageId, StuckStage] = {}
    for stage, batch, cause in History(root).restarts(run):
        before = found.get(stage)
        in_row = before.restarts + 1 if before is not None and before.batch == batch else 1
        found[stage] = StuckStage(stage, batch, in_row, cause)
    return tuple(each for each in found.values() if not _finished(root, state, each))


def _finished(root: Root, state: ControlState, stuck: StuckStage) -> bool:
    attempt = state.attempt
    place = root.native(attempt.natives, attempt.id, attempt.directory(stuck.stage))
    batch = 0 if stuck.batch == NO_BATCH else int(stuck.batch)
    return place.read(f"commits/{batch}") is not None
