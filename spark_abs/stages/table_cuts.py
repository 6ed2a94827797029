"""One stage in a chain of wrapped queries: when it makes its cut, and how long it waits after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_abs.errors import AbortReason, DamageError
from spark_abs.manifest import OutputVersion
from spark_abs.model import Barrier, BatchId, CheckpointId, CheckpointKind, StageId
from spark_abs.protocol.messages import Declined
from spark_abs.run_context import RunContext
from spark_abs.snapshots.layout import OffsetFile
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.stages.chain import Chain, Unread
from spark_abs.stages.dormant import DormantStage
from spark_abs.store.clock import steady_ms

_PATIENCE_MS = 60_000
"""How long a stage may wait after its cut for the readers of its tables."""
_GRACE_MS = 1_000
"""How long it waits for one that does not run: it may be at its cut, and about to be asked."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A cut after which no batch of the stage begins before its readers are there."""

    since_ms: int
    exact: bool
    """Whether no batch begins in any case: it is an exact savepoint."""


class TableCuts:
    """Makes the cuts of one stage fit those of the queries that its tables join it to; none in a job.

    `fitting` and `made` are called by the holder of the stage's batch lock, the others by the coordinator's
    thread.
    """

    def __init__(self, ctx: RunContext, stage: StageId, chain: Chain | None, lock: BatchLock) -> None:
        """Take the stage, its chain and its batch lock."""
        self._ctx, self._stage, self._chain, self._lock = ctx, stage, chain, lock
        self._waits: dict[CheckpointId, _Wait] = {}

    @property
    def joined(self) -> bool:
        """Whether the stage may be in a chain."""
        return self._chain is not None

    @property
    def waiting(self) -> str:
        """What the next batch waits for; empty if for no reader."""
        return "the readers of its tables" if self._waits else ""

    def fitting(self, barrier: Barrier | None, batch: BatchId, offsets: OffsetFile | None) -> Barrier | None:
        """Return a barrier if what the stage has read after a batch allows to take it then."""
        if barrier is None or self._chain is None or offsets is None:
            return barrier
        return barrier if self._chain.may_cut(self._stage, barrier.id, batch, offsets) else None

    def made(self, barrier: Barrier, batch: BatchId, outputs: tuple[OutputVersion, ...]) -> None:
        """Take note of a cut. Let no later batch begin if it is an exact savepoint, or readers are late."""
        exact = barrier.kind is CheckpointKind.SYNC_SAVEPOINT
        late = self._chain is not None and self._chain.cut(self._stage, barrier.id, outputs)
        if exact or late:
            self._lock.block(barrier.id, batch)
        if late:
            self._waits[barrier.id] = _Wait(steady_ms(), exact)

    def release(self, checkpoint: CheckpointId) -> None:
        """Let batches begin again: the checkpoint was aborted."""
        self._waits.pop(checkpoint, None)
        self._lock.unblock(checkpoint)

    def declined(self) -> Iterator[Declined]:
        """Let batches begin again whose readers are there; decline checkpoints for which one will not be."""
        if self._chain is None:
            return
        for number, why in self._chain.missed(self._stage).items():
            yield self._declined(number, why)
        for number, wait in list(self._waits.items()):
            unread = self._unread_at(self._chain, number)
            if unread is None:
                self._waits.pop(number, None)
                if not wait.exact:
                    self._lock.unblock(number)
                continue
            waited_ms = steady_ms() - wait.since_ms
            patience_ms = _GRACE_MS if unread.hopeless else _PATIENCE_MS
            if waited_ms >= min(patience_ms, self._ctx.settings.timeout_ms):
                yield self._declined(number, f"{unread.said}; it has waited for that for {waited_ms} ms")

    def _unread_at(self, chain: Chain, checkpoint: CheckpointId) -> Unread | None:
        try:
            return chain.unread(self._stage, checkpoint)
        except (DamageError, OSError) as error:  # no reason to end the run: it is looked at again
            return Unread(f"the log of a table could not be read: {error}", False)

    def _declined(self, checkpoint: CheckpointId, why: str) -> Declined:
        return Declined(steady_ms(), checkpoint, self._stage, AbortReason.DECLINED, why)

    def unread(self, checkpoint: CheckpointId) -> str:
        """Say what the stage has yet to read before its cut; empty if that is not why it has made none."""
        return "" if self._chain is None else self._chain.waits(self._stage, checkpoint)

    def opened(self, checkpoint: CheckpointId) -> None:
        """Take note of a claimed checkpoint."""
        if self._chain is not None:
            self._chain.opened(checkpoint)

    def settled(self, checkpoint: CheckpointId) -> None:
        """Take note that a checkpoint has its outcome."""
        if self._chain is not None:
            self._chain.settled(checkpoint)

    def succeed(self, before: TableCuts | DormantStage) -> None:
        """Take over the memory of the runner, or the dormant stage, that this one replaces."""
        if isinstance(before, TableCuts):
            self._waits = dict(before._waits)
        elif self._chain is not None:
            self._chain.woke(self._stage, before.part, before.progress.taken)
