"""The barriers of a stage: those offered to it, its progress, and the one that it takes next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import assert_never

from spark_abs.alignment.loops import forward
from spark_abs.alignment.marker import Cancelled, Cut, Free, Nothing, may_take, overtaking
from spark_abs.channels.entries import entry_of
from spark_abs.errors import DamageError
from spark_abs.model import NO_BATCH, NO_EPOCH, Barrier, BatchId, CheckpointId, CheckpointMode, Position
from spark_abs.run_context import RunContext
from spark_abs.stages.batch import Marker, Planned
from spark_abs.store.log import read_commit
from spark_abs.store.root import Root


class Barriers:
    """The barriers offered to one stage.

    The coordinator's thread writes, the batch thread reads: values are replaced, never changed in place.
    """

    def __init__(self) -> None:
        self._open: dict[CheckpointId, Barrier] = {}
        self.aborted: frozenset[CheckpointId] = frozenset()
        """The ids that were aborted in this run."""

    def offer(self, barrier: Barrier) -> None:
        """Take a claimed barrier, or the news that it has become unaligned."""
        self._open = {**self._open, barrier.id: barrier}

    def settle(self, checkpoint: CheckpointId, completed: bool) -> None:
        """Take the outcome of a checkpoint."""
        self._open = {n: barrier for n, barrier in self._open.items() if n != checkpoint}
        if not completed:
            self.aborted |= {checkpoint}

    def find(self, checkpoint: CheckpointId) -> Barrier | None:
        """Return a barrier without an outcome as it is now, None if the stage was not told of it."""
        return self._open.get(checkpoint)

    def above(self, passed: CheckpointId) -> list[Barrier]:
        """Return the barriers above an id that have no outcome and were not aborted, oldest first."""
        return [b for n, b in sorted(self._open.items()) if n > passed and n not in self.aborted]

    @property
    def unaligned(self) -> frozenset[CheckpointId]:
        """The ids without an outcome for which no input need wait."""
        return frozenset(n for n, b in self._open.items() if b.mode is CheckpointMode.UNALIGNED)


class BarrierProgress:
    """How far the barriers of one stage have got. Nothing here goes back. Thread-safe.

    The barrier of a batch, or of an idle stage, is committed to the first channel, then to the others; then
    the cut is handed over to be captured.
    """

    def __init__(
        self, first: CheckpointId = NO_EPOCH, every: CheckpointId = NO_EPOCH, alone: CheckpointId = NO_EPOCH
    ) -> None:
        self._lock = threading.Lock()
        self.first = first
        """The newest id in the first channel."""
        self.every = every
        """The newest id that every channel has."""
        self.alone = alone
        """`first` when the runner began, if no batch carries it: no repeated batch repeats its cut."""
        self.taken = NO_EPOCH
        """The newest barrier whose cut was handed over in this run."""
        self.missed = NO_EPOCH
        """The newest id without a cut in this stage, whether its barrier was passed on or not."""
        self.checkpointed = NO_BATCH
        """The batch of the newest completed checkpoint of this run."""

    @property
    def newest(self) -> CheckpointId:
        """The newest id that the stage has taken or passed."""
        return max(self.taken, self.first, self.missed)

    def in_first(self, checkpoint: CheckpointId) -> None:
        """Take note of an id in the first channel."""
        with self._lock:
            self.first = max(self.first, checkpoint)

    def in_every(self, checkpoint: CheckpointId) -> None:
        """Take note of an id in every channel."""
        with self._lock:
            self.every = max(self.every, checkpoint)

    def handed_over(self, checkpoint: CheckpointId) -> None:
        """Take note of a cut that was handed over."""
        with self._lock:
            self.taken = max(self.taken, checkpoint)

    def went_past(self, checkpoint: CheckpointId) -> None:
        """Take note of an id without a cut; lower ids that were not handed over get none, either."""
        with self._lock:
            self.missed = max(self.missed, checkpoint)

    def completed(self, batch: BatchId) -> None:
        """Take note of a completed checkpoint whose cut is after a batch."""
        with self._lock:
            self.checkpointed = max(self.checkpointed, batch)


class BarrierChoice:
    """Which barrier a stage takes next, and where; changes nothing. For the holder of the batch lock."""

    def __init__(self, ctx: RunContext, barriers: Barriers, progress: BarrierProgress) -> None:
        self._ctx, self._barriers, self._progress = ctx, barriers, progress

    def of_inputs(self, planned: Planned) -> Marker | None:
        """Return the marker that a batch carries because of its inputs, None if they do not determine one.

        The batch may then carry what `now` gives when it is committed.
        """
        passed = max(self._progress.first, self._progress.taken)
        match planned.emission:
            case Free() | Nothing():
                return None
            case Cut(id=reached):
                if reached <= passed:
                    return None
                if reached <= self._ctx.floor or reached in self._barriers.aborted:
                    return Marker(cancel=reached)
                barrier = self._barriers.find(reached)
                barrier = barrier or _read_barrier(self._ctx.root, planned.after, reached)
                return Marker(barrier) if barrier is not None else Marker(cancel=reached)
            case Cancelled(id=reached):
                return Marker(cancel=reached) if reached > passed else None
            case other:
                assert_never(other)

    def now(self, positions: Sequence[Position]) -> Barrier | None:
        """Return the open barrier that can be taken where the inputs stand, before any input reaches it.

        That is the oldest one if the stage takes barriers like a source, else an unaligned one (P16).
        """
        offered = self.waiting()
        if all(position.is_closed(self._ctx.run) for position in forward(positions)):
            back = [position for position in positions if position.feedback]
            return next((barrier for barrier in offered if may_take(barrier.id, back)), None)
        return overtaking(offered, positions)

    def ahead(self, before: Sequence[Position]) -> Barrier | None:
        """Return the unaligned barrier to be taken ahead of a batch that no output holds yet (P16).

        The rows of the batch may come after it: gates let a batch past a barrier that is, or has become,
        unaligned, whether or not the stage has taken it. The positions show a barrier that was unaligned from
        its start.
        """
        offered, seen = self.waiting(), self._seen_unaligned(before)
        return overtaking([*offered, seen] if seen is not None else offered, before)

    def offered(self, planned: Planned) -> CheckpointId:
        """Return the open barrier that the stage may take with a batch, or ahead of it; else `NO_EPOCH`."""
        barrier = self.now(planned.after) or overtaking(self.waiting(), planned.before)
        return NO_EPOCH if barrier is None else barrier.id

    def waiting(self) -> list[Barrier]:
        """Return the open barriers that the stage has neither taken nor passed on, oldest first."""
        return self._barriers.above(self._progress.newest)

    def _seen_unaligned(self, positions: Sequence[Position]) -> Barrier | None:
        """Return the newest unaligned barrier at which an input stands, if the stage lacks it."""
        seen = [p.epoch for p in positions if p.at_barrier and p.mode is CheckpointMode.UNALIGNED]
        newest = max(seen, default=NO_EPOCH)
        passed = max(self._progress.newest, self._ctx.floor)
        lacks = newest > passed and newest not in self._barriers.aborted
        return _read_barrier(self._ctx.root, positions, newest) if lacks else None


def _read_barrier(root: Root, positions: Sequence[Position], checkpoint: CheckpointId) -> Barrier | None:
    """Read a barrier from the log of an input that stands at it; None if none does.

    Raises:
        DamageError: the log has something else there.
    """
    standing = (p for p in positions if p.at_barrier and p.epoch == checkpoint)
    position = max(standing, key=lambda p: p.mode is not CheckpointMode.ALIGNED, default=None)
    if position is None:
        return None
    commit = read_commit(root.fs, root.path(root.channel(position.channel)), position.version)
    barrier = entry_of(commit).barrier if commit is not None else None
    if barrier is None or barrier.id != checkpoint:
        raise DamageError(
            f"entry {position.version} of {position.channel} should be barrier {checkpoint} and is not"
        )
    return barrier
