"""The bytes that queue up behind blocked inputs during an alignment, read from the logs (P6, P20)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from spark_abs.channels.follow import Queued
from spark_abs.errors import AbsError
from spark_abs.model import CheckpointId, Position
from spark_abs.store.root import Root

log = logging.getLogger(__name__)

ENTRIES_PER_LOOK = 16
ENTRIES_AT_THE_END = 16
"""The most entries that are opened before an acknowledgement, for a figure only."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """The progress of a stage with a checkpoint that it has not acknowledged."""

    aligning_since_ms: int | None
    """When the first input had the barrier, None if none had."""
    what: str
    alignment_bytes: int = 0
    """Bytes that queued up behind the barrier on waiting inputs."""
    backpressured_ms: int | None = None
    """How long the stage has waited for credit since its last cut."""
    work: str = ""
    """What its batch under way does and for how long; empty without one, and once the cut is made."""
    behind: tuple[str, ...] = ()
    """The channels whose barrier the stage has not read."""


class Backlog:
    """The bytes behind the blocked inputs of one alignment. Thread-safe."""

    def __init__(self) -> None:
        self._inputs: dict[Position, Queued] = {}
        self._lock = threading.Lock()

    def add(self, root: Root, position: Position, poll_ms: int) -> None:
        """Count the backlog of one more input; repeatable."""
        with self._lock:
            if position not in self._inputs:
                self._inputs[position] = Queued(root, position, poll_ms)

    def read(self, most: int, until_ms: int | None = None) -> int:
        """Read new entries, a limited number of each input; return the bytes of all.

        An unreadable log is only logged here: it stops the stage that reads it, not the measurement.
        """
        with self._lock:
            for position, queued in self._inputs.items():
                try:
                    queued.read(most, until_ms)
                except (AbsError, OSError) as error:
                    log.debug("after %s: %s", position, error)
            return sum(queued.size for queued in self._inputs.values())


class AlignmentWatch:
    """The alignments of one stage: its batch thread adds inputs, the coordinator's thread reads sizes."""

    def __init__(self, root: Root, poll_ms: int) -> None:
        self._root, self._poll_ms = root, poll_ms
        self._backlogs: dict[CheckpointId, Backlog] = {}

    def blocked(self, inputs: Sequence[Position]) -> None:
        """Take note of the inputs that wait at a barrier after a batch."""
        for position in inputs:
            self._backlogs.setdefault(position.epoch, Backlog()).add(self._root, position, self._poll_ms)

    def over(self, checkpoint: CheckpointId) -> Backlog | None:
        """End the alignment of a checkpoint, and of all before it; None if no input had to wait."""
        for older in [known for known in list(self._backlogs) if known < checkpoint]:
            self._backlogs.pop(older, None)
        return self._backlogs.pop(checkpoint, None)

    def size(self, checkpoint: CheckpointId) -> int:
        """Return the bytes behind a barrier as far as they have been read; 0 if no input waits at it."""
        held = self._backlogs.get(checkpoint)
        return 0 if held is None else held.read(0)

    def look(self) -> tuple[tuple[CheckpointId, int], ...]:
        """Return the bytes behind each barrier at which inputs wait, as far as they have been read."""
        return tuple((number, held.read(ENTRIES_PER_LOOK)) for number, held in list(self._backlogs.items()))
