"""What a stage does now, and how that is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from spark_abs.model import NO_BATCH, BatchId
from spark_abs.store.activity import Longest, Phase, phase_said
from spark_abs.store.clock import now_ms

_BATCHES = 20
"""Of so many finished batches the slowest is told."""


@dataclass(frozen=True, slots=True)
class Doing:
    """A batch under way. Times in milliseconds since the epoch."""

    batch: BatchId
    began_ms: int
    phase: Phase
    what: str
    since_ms: int
    waited_ms: int = 0
    """In phases before this one."""


@dataclass(frozen=True, slots=True)
class Done:
    """The batches that have ended."""

    batch: BatchId = NO_BATCH
    began_ms: int | None = None
    ended_ms: int | None = None
    last_ms: int | None = None
    slowest_ms: int | None = None
    longest: Longest | None = None
    """The longest phase of one of the last twenty: at most a quarter of them had a longer one."""
    waited_ms: int = 0
    """For how long of it the newest batch waited."""


class Activity:
    """The batch thread writes; any thread reads. Values are replaced, never changed in place."""

    def __init__(self, clock: Callable[[], int] = now_ms) -> None:
        self._clock = clock
        self._took: deque[int] = deque(maxlen=_BATCHES)
        self._longest: deque[Longest] = deque(maxlen=_BATCHES)
        self._phase: Longest | None = None
        self.now: Doing | None = None
        """The batch under way; None between two batches."""
        self.done = Done()

    def begin(self, batch: BatchId) -> None:
        """Take note that a batch has been planned and waits to begin."""
        now = self._clock()
        self._phase = None
        self.now = Doing(batch, now, Phase.WAITING, "", now)

    def enter(self, phase: Phase, what: str = "") -> None:
        """Take note of the phase of the batch under way. Nothing if there is none."""
        doing = self.now
        if doing is not None and (doing.phase, doing.what) != (phase, what):
            now = self._clock()
            self._leave(doing, now)
            waited = doing.waited_ms + _waited_ms(doing, now)
            self.now = replace(doing, phase=phase, what=what, since_ms=now, waited_ms=waited)

    def _leave(self, doing: Doing, now: int) -> None:
        took = now - doing.since_ms
        if self._phase is None or took > self._phase.ms:
            self._phase = Longest(doing.phase, doing.what, took)

    def end(self, finished: bool) -> None:
        """Take note that the batch has ended, in order or with an error."""
        doing, self.now = self.now, None
        if doing is None or not finished:
            return
        now = self._clock()
        took = now - doing.began_ms
        self._leave(doing, now)
        self._took.append(took)
        if self._phase is not None:
            self._longest.append(self._phase)
        phases = sorted(self._longest, key=lambda one: one.ms)
        self.done = Done(
            doing.batch,
            doing.began_ms,
            now,
            last_ms=took,
            slowest_ms=max(self._took),
            longest=phases[-1 - len(phases) // 4] if phases else None,
            waited_ms=doing.waited_ms + _waited_ms(doing, now),
        )


def _waited_ms(doing: Doing, now: int) -> int:
    """Return for how long a batch has waited in its present phase."""
    return now - doing.since_ms if doing.phase is Phase.WAITING else 0


def said(doing: Doing, now: int) -> str:
    """Return what a stage with a batch under way does: `batch 7 has been under way for …`."""
    took, has = max(0, now - doing.began_ms), max(0, now - doing.since_ms)
    inside = "" if took - has < 1000 else f", for {has / 1000:.1f} s"
    does = phase_said(doing.phase, doing.what)
    return f"batch {doing.batch} has been under way for {took / 1000:.1f} s: {does}{inside}"
