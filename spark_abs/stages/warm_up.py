"""The first batch of each stage: while it lasts, the stages before it begin no batch of their own (P19).

The first batch of a query is dear: plans are made, classes are loaded and compiled, Python processes come up.
Were all stages before it at full speed meanwhile, each stage would share the cores with them all, and the
first rows, and the first barrier, would take so many times longer to get through the job. So the channels of
those stages count as full; a batch with a barrier begins all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from spark_abs.model import ChannelId, StageId
from spark_abs.plan.graph import JobGraph

AT_MOST_S = 10.0
"""How long a stage holds others back, from the first rows that it can read on: its trigger may be slow."""


class WarmUp:
    """Which stages of a run have rows to read and have ended no batch yet. Any thread."""

    def __init__(self, graph: JobGraph | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the stages of a job; without them nobody waits for anybody."""
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[StageId, float] = {}
        self._warm: set[StageId] = set()
        stages = () if graph is None else graph.stages
        self._readers = {c: [s.name for s in stages if c in s.forward] for s in stages for c in s.forward}
        self._behind = {} if graph is None else graph.downstream()

    def wrote(self, channels: Iterable[ChannelId]) -> None:
        """Hear that there are rows in channels: their readers can begin their first batch."""
        for channel in channels:
            for stage in self._readers.get(channel, ()):
                self.begins(stage)

    def begins(self, stage: StageId) -> None:
        """Hear that a stage begins a batch, or can; all but the first time that changes nothing."""
        with self._lock:
            if stage not in self._warm:
                self._since.setdefault(stage, self._clock())

    def ended(self, stage: StageId) -> None:
        """Hear that a stage has ended a batch."""
        with self._lock:
            self._warm.add(stage)
            self._since.pop(stage, None)

    def holds(self, stage: StageId) -> bool:
        """Say whether a stage waits, because one that its rows reach is at its first batch."""
        with self._lock:
            behind = self._behind.get(stage, frozenset()) & self._since.keys()
            return any(self._clock() - self._since[first] < AT_MOST_S for first in behind)
