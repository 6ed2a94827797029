"""A query that shares a root and does not run is represented by its recorded part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spark_abs.manifest import StageSnapshot, Timings
from spark_abs.model import Barrier, CheckpointId, CheckpointKind, StageId
from spark_abs.protocol.messages import Acked
from spark_abs.stages.alignment_backlog import CheckpointProgress
from spark_abs.stages.barriers import BarrierProgress, Barriers
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.store.activity import DORMANT, StageActivity
from spark_abs.store.clock import now_ms, steady_ms


class DormantStage:
    """Acknowledges every checkpoint with the newest recorded part of a query, unchanged (P13).

    That part is one cut of the query: position, state and versions of its tables are consistent, whatever has
    happened to its native checkpoint and its tables since. A restore undoes later batches of the query, and
    the query reads their input again.

    Used from the coordinator's thread. When the query starts, its runner takes this place and continues from
    the barriers that were answered here.
    """

    def __init__(self, part: StageSnapshot, put: Callable[[Acked], None]) -> None:
        """Take the recorded part, with `carried` set, and the receiver of acknowledgements."""
        self.name = part.stage
        self.part = part
        self.batch_lock = BatchLock()
        self.barriers = Barriers()
        self.progress = BarrierProgress()
        self._put = put

    def offer(self, barrier: Barrier) -> None:
        """Take a claimed barrier."""
        self.barriers.offer(barrier)

    def offer_idle(self) -> None:
        """Answer every open barrier; none of the query's batches begins after an exact savepoint."""
        for barrier in self.barriers.above(self.progress.taken):
            self.progress.handed_over(barrier.id)
            if barrier.kind is CheckpointKind.SYNC_SAVEPOINT:
                self.batch_lock.block(barrier.id)
            timings = Timings(end_to_end_ms=max(0, now_ms() - barrier.timestamp_ms))
            part = replace(self.part, size_new=0, dropped_late=0, timings=timings)
            self._put(Acked(steady_ms(), barrier.id, part))

    def stands_at(self, cut: StageSnapshot) -> bool:
        """Say whether a cut repeats the recorded part."""
        return cut.carried == self.part.carried

    def declined(self, _limit: int | None) -> tuple[()]:
        """Say that nothing queues up here, and that no barrier is missed."""
        return ()

    def has_taken(self, checkpoint: CheckpointId) -> bool:
        """Say whether a checkpoint was answered."""
        return self.progress.taken >= checkpoint

    @property
    def producers(self) -> frozenset[StageId]:
        """No stage: wrapped queries read no channels."""
        return frozenset()

    def activity(self) -> StageActivity:
        """Return that nothing is done."""
        return StageActivity(self.name, what=DORMANT)

    def checkpoint_progress(self, _barrier: Barrier) -> CheckpointProgress:
        """Return the progress of a checkpoint here."""
        return CheckpointProgress(None, DORMANT)

    def notify(self, checkpoint: CheckpointId, completed: bool) -> None:
        """Take the outcome of a checkpoint (P15)."""
        self.barriers.settle(checkpoint, completed)
        if not completed:
            self.batch_lock.unblock(checkpoint)
