"""Checkpoint statistics: what cannot be found out about a stage is said, and nothing fails because of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.checkpointing.checkpoint_stats import CheckpointStats
from spark_abs.checkpointing.late_stages import late_stages
from spark_abs.errors import AbortReason, DamageError
from spark_abs.model import AttemptId, Barrier, CheckpointId, CheckpointKind, RunId
from spark_abs.store.history import History, HistoryEvent
from spark_abs.store.root import Root


class LostStage:
    """A stage whose native checkpoint cannot be read."""

    name = "match"

    def __init__(self, error: Exception) -> None:
        self.error = error

    producers: frozenset[str] = frozenset()

    def has_taken(self, _: CheckpointId) -> bool:
        return False

    def checkpoint_progress(self, _: Barrier) -> None:
        raise self.error


@pytest.mark.parametrize("error", [DamageError("offsets/7 is missing"), OSError("offsets/7 is missing")])
def test_a_stage_that_cannot_be_looked_at_is_in_the_history_all_the_same(
    tmp_path: Path, error: Exception
) -> None:
    ctx: Any = SimpleNamespace(root=Root(str(tmp_path)), attempt=AttemptId(1), run=RunId(2))
    stage: Any = LostStage(error)
    barrier = Barrier(CheckpointId(5), CheckpointKind.CHECKPOINT, 1_000)
    CheckpointStats(ctx, None).aborted(
        barrier, AbortReason.EXPIRED, "after 5 ms", {}, late_stages(barrier, [stage], ())
    )
    rows = {row["event"]: row for row in History(ctx.root).read().to_pylist()}
    assert rows[HistoryEvent.STAGE_WAITING]["stage"] == "match"
    assert rows[HistoryEvent.STAGE_WAITING]["detail"] == "how far it is cannot be read: offsets/7 is missing"
    aborted = rows[HistoryEvent.ABORTED]
    assert (aborted["checkpoint"], aborted["acks"], aborted["stages"]) == (5, 0, 1)
