"""Barriers as a stage knows them: those that it was told of, and those at which its inputs stand."""

from __future__ import annotations

from collections.abc import Sequence

from spark_abs.channels.entries import entry_of
from spark_abs.errors import DamageError
from spark_abs.model import NO_EPOCH, Barrier, CheckpointId, CheckpointMode, Position
from spark_abs.store.log import read_commit
from spark_abs.store.root import Root


class Barriers:
    """What one stage was told of barriers.

    The coordinator's thread tells, the batch thread reads: what is read at once is replaced, never changed.
    """

    def __init__(self) -> None:
        self._open: dict[CheckpointId, Barrier] = {}
        self.aborted: frozenset[CheckpointId] = frozenset()
        """The ids that were aborted in this run."""

    def offer(self, barrier: Barrier) -> None:
        """Hear of a claimed barrier, or that it is unaligned from now on."""
        self._open = {**self._open, barrier.id: barrier}

    def settle(self, checkpoint: CheckpointId, completed: bool) -> None:
        """Hear of an outcome."""
        self._open = {n: barrier for n, barrier in self._open.items() if n != checkpoint}
        if not completed:
            self.aborted |= {checkpoint}

    def find(self, checkpoint: CheckpointId) -> Barrier | None:
        """Return a barrier without an outcome as it is now, None if the stage was not told of it."""
        return self._open.get(checkpoint)

    def above(self, passed: CheckpointId) -> list[Barrier]:
        """Return the barriers above an id that have no outcome, oldest first."""
        return [b for n, b in sorted(self._open.items()) if n > passed and n not in self.aborted]

    @property
    def unaligned(self) -> frozenset[CheckpointId]:
        """The ids without an outcome for which no input need wait."""
        return frozenset(n for n, b in self._open.items() if b.mode is CheckpointMode.UNALIGNED)


def newest_unaligned(positions: Sequence[Position]) -> CheckpointId:
    """Return the newest unaligned barrier at which an input stands, `NO_EPOCH` if none does."""
    seen = [p.epoch for p in positions if p.at_barrier and p.mode is CheckpointMode.UNALIGNED]
    return max(seen, default=NO_EPOCH)


def read_barrier(root: Root, positions: Sequence[Position], checkpoint: CheckpointId) -> Barrier | None:
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
