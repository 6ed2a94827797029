"""The stages that have not acknowledged an open checkpoint, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spark_abs.errors import AbsError
from spark_abs.model import Barrier, StageId
from spark_abs.protocol.late import late_by_themselves
from spark_abs.stages.alignment_backlog import CheckpointProgress
from spark_abs.stages.stage import Member


@dataclass(frozen=True, slots=True)
class LateStage:
    """A stage without an acknowledgement."""

    stage: StageId
    progress: CheckpointProgress
    first: bool
    """Whether it is late by itself, and not because a stage before it is."""

    @property
    def why(self) -> str:
        """Why it is late, for a person."""
        if not self.first or not self.progress.work:
            return self.progress.what
        if not self.progress.behind:
            return self.progress.work
        return f"{self.progress.work}; the barrier in {', '.join(self.progress.behind)} comes after it"


def late_stages(
    barrier: Barrier, stages: Sequence[Member], acked: Collection[StageId]
) -> tuple[LateStage, ...]:
    """Return the stages that have not acknowledged, those first that hold the checkpoint up. Any thread."""
    waiting = [stage for stage in stages if stage.name not in acked]
    copying = {stage.name for stage in waiting if stage.has_taken(barrier.id)}
    without_cut = {stage.name: stage.producers for stage in waiting if stage.name not in copying}
    first = late_by_themselves(without_cut, copying)
    found = [LateStage(stage.name, _progress(stage, barrier), stage.name in first) for stage in waiting]
    return tuple(sorted(found, key=lambda late: not late.first))


def _progress(stage: Member, barrier: Barrier) -> CheckpointProgress:
    try:
        return stage.checkpoint_progress(barrier)
    except (AbsError, OSError) as error:
        return CheckpointProgress(None, f"how far it is cannot be read: {error}")
