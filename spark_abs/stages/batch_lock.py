"""The lock of a stage, taken by a batch or by the agent of an idle stage, unless the stage is blocked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_abs.errors import StageStopped
from spark_abs.model import NO_BATCH, BatchId, CheckpointId

_POLL_S = 0.05
_STOPPED = "the stage is being stopped; the batch will be repeated by the next run"


class BatchLock:
    """Lets either a batch or the agent work, and stops or delays batches before they begin.

    A planned batch that did not begin has had no effect; the next run repeats it.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._busy = False
        self._stopping = False
        self.ended = False
        """Whether the stage has ended gracefully."""
        self._blocks: dict[CheckpointId, BatchId] = {}
        """Open exact savepoints, each with the last batch that may run before the savepoint ends."""
        self.refused = False
        """Whether a planned batch came too late to begin."""
        self.parked = False
        """Whether such a batch waits for its query to be stopped."""
        self.await_stop: Callable[[], None] = lambda: None
        """Returns when the query of the stage is stopped, or raises the error by which Spark recognises a
        stop."""
        self.is_stopped: Callable[[], bool] = lambda: False
        """Says whether somebody else has stopped the query; asked while a batch waits."""

    @contextmanager
    def batch(self, number: BatchId, may_begin: Callable[[], bool]) -> Iterator[int]:
        """Enter a batch; yields the milliseconds it had to wait.

        Waits while the stage is blocked, the agent works, or `may_begin` returns false. `may_begin` may read
        the store: it is polled, and no other thread waits for it.

        Raises:
            StageStopped: the stage, or its query, is being stopped.
        """
        began = time.monotonic()
        while not self._begun(number, may_begin()):
            if self.is_stopped():
                raise StageStopped(_STOPPED)
        try:
            yield int((time.monotonic() - began) * 1000)
        finally:
            self._leave()

    def _begun(self, number: BatchId, permitted: bool) -> bool:
        """Begin a batch if it may; otherwise wait a moment."""
        with self._change:
            if self._stopping:
                self.refused = True
                raise StageStopped(_STOPPED)
            blocked = any(number > after for after in self._blocks.values())
            if permitted and not self._busy and not blocked:
                self._busy = True
                return True
            self._change.wait(_POLL_S)
            return False

    @contextmanager
    def agent(self) -> Iterator[bool]:
        """Enter as the agent. Yields False if a batch has the lock or the stage is stopped. Never waits.

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
        """Lift the block of this savepoint."""
        with self._change:
            self._blocks.pop(checkpoint, None)
            self._change.notify_all()

    def succeed(self, before: BatchLock) -> None:
        """Take over the blocks of the runner that this one replaces."""
        with before._change:
            blocks = dict(before._blocks)
        for checkpoint, after in blocks.items():
            self.block(checkpoint, after)

    def wake(self) -> None:
        """Ask `may_begin` again."""
        with self._change:
            self._change.notify_all()

    def await_quiet(self) -> None:
        """Wait until a batch under way has ended. The next one may begin meanwhile."""
        with self._change:
            while self._busy:
                self._change.wait(_POLL_S)

    def park(self) -> None:
        """Hold a refused batch until its query is stopped, so that the query does not fail."""
        self.parked = True
        try:
            self.await_stop()
        finally:
            self.parked = False

    def refuse(self) -> None:
        """Let no further batch begin. A batch under way continues."""
        with self._change:
            self._stopping = True
            self._change.notify_all()

    def stop(self) -> None:
        """Let no further batch begin, and wait until a batch under way has ended."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
            self.await_quiet()

    def _leave(self) -> None:
        with self._change:
            self._busy = False
            self._change.notify_all()
