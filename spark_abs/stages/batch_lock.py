"""The lock of a stage: a batch takes it, or the agent of an idle stage; nobody while the stage is blocked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_abs.errors import StageStopped
from spark_abs.model import NO_BATCH, BatchId, CheckpointId

_POLL_S = 0.05


class BatchLock:
    """Lets one of batch and agent work at a time, and stops or holds batches at their entry.

    A batch that was planned and did not begin is repeated by the next run: nothing of it was done.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._busy = False
        self._stopping = False
        self.ended = False
        """Whether the stage has ended gracefully."""
        self._blocks: dict[CheckpointId, BatchId] = {}
        """The exact savepoints that no batch may begin before the end of, and the last batch that may."""
        self.refused = False
        """Whether a batch that was planned came too late to begin."""
        self.parked = False
        """Whether such a batch waits for its query to be stopped."""
        self.await_stop: Callable[[], None] = lambda: None
        """Returns when the query of the stage is stopped, or raises what Spark takes for that."""

    @contextmanager
    def batch(self, number: BatchId, may_begin: Callable[[], bool]) -> Iterator[int]:
        """Enter a batch; yields the milliseconds it had to wait.

        Waits while the stage is blocked, the agent is at work, or `may_begin` says no. That one may look at
        the store: it is asked again and again, and nobody else waits for its answer.

        Raises:
            StageStopped: the stage is being stopped.
        """
        began = time.monotonic()
        while not self._begun(number, may_begin()):
            pass
        try:
            yield int((time.monotonic() - began) * 1000)
        finally:
            self._leave()

    def _begun(self, number: BatchId, permitted: bool) -> bool:
        """Begin a batch if it may; otherwise wait a moment."""
        with self._change:
            if self._stopping:
                self.refused = True
                raise StageStopped("the stage is being stopped; the batch will be repeated by the next run")
            blocked = any(number > after for after in self._blocks.values())
            if permitted and not self._busy and not blocked:
                self._busy = True
                return True
            self._change.wait(_POLL_S)
            return False

    @contextmanager
    def agent(self) -> Iterator[bool]:
        """Enter as the agent; yields False if it is not its turn, or the stage is stopped. Never waits.

        A stage that has ended gracefully still takes barriers, though no batch begins any more.
        """
        with self._change:
            mine = not self._busy and (self.ended or not self._stopping)
            self._busy = self._busy or mine
        try:
            yield mine
        finally:
            if mine:
                self._leave()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Enter when neither batch nor agent is at work; the stage has ended gracefully from then on."""
        with self._change:
            self.await_quiet()
            self._busy = self.ended = True
        try:
            yield
        finally:
            self._leave()

    def block(self, checkpoint: CheckpointId, after: BatchId = NO_BATCH) -> None:
        """Let no batch begin until `unblock`: the stage has passed the barrier of an exact savepoint.

        Batch `after`, its cut, may be repeated: the savepoint waits for its end.
        """
        with self._change:
            self._blocks[checkpoint] = after

    def unblock(self, checkpoint: CheckpointId) -> None:
        """Let batches begin again as far as it was this savepoint that blocked them."""
        with self._change:
            self._blocks.pop(checkpoint, None)
            self._change.notify_all()

    def succeed(self, before: BatchLock) -> None:
        """Stand where a stage stood that this one replaces: it may be blocked."""
        with before._change:
            blocks = dict(before._blocks)
        for checkpoint, after in blocks.items():
            self.block(checkpoint, after)

    def wake(self) -> None:
        """Ask `may_begin` again."""
        with self._change:
            self._change.notify_all()

    def await_quiet(self) -> None:
        """Wait until the batch under way, if there is one, has ended; another may begin."""
        with self._change:
            while self._busy:
                self._change.wait(_POLL_S)

    def park(self) -> None:
        """Wait with a batch that was refused: its query is about to be stopped, and does not fail then."""
        self.parked = True
        try:
            self.await_stop()
        finally:
            self.parked = False

    def refuse(self) -> None:
        """Let no batch begin any more; the one under way goes on."""
        with self._change:
            self._stopping = True
            self._change.notify_all()

    def stop(self) -> None:
        """Let no batch begin any more, and wait until the one under way has ended."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
            self.await_quiet()

    def _leave(self) -> None:
        with self._change:
            self._busy = False
            self._change.notify_all()
