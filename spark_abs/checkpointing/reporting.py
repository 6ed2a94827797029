"""The thread that tells commands in other processes what a run does."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median_low

from spark_abs.checkpointing.late_stages import late_stages
from spark_abs.model import Barrier, StageId
from spark_abs.packages import installed
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.stages.stage import Member
from spark_abs.store.activity import (
    PATH,
    WRITE_EVERY_MS,
    Disk,
    Earlier,
    Late,
    RunActivity,
    Skips,
    StageActivity,
    write_activity,
)
from spark_abs.store.clock import now_ms, steady_ms
from spark_abs.store.storage import Place

log = logging.getLogger(__name__)

ALWAYS_AFTER_MS = 10_000
"""The file is written after this time even if nothing has changed."""
LATE_AFTER_MS = 1000
"""A checkpoint that is open for less is not examined."""
SAMPLE_EVERY_MS = 60_000
_LAGS, _SPACES = 30, 60
"""So many samples of lags and of disks are kept."""
_WRITES = 20
_PACKAGES = ("spark-abs", "pyspark", "deltalake", "pyarrow")
_SETTINGS = (
    "interval_ms",
    "min_pause_ms",
    "timeout_ms",
    "mode",
    "aligned_timeout_ms",
    "skip_unchanged",
    "max_concurrent",
    "tolerable_failures",
    "keep",
    "capacity_entries",
    "capacity_bytes",
)


@dataclass(frozen=True, slots=True)
class OpenBarrier:
    """A checkpoint without an outcome, and the stages that have acknowledged it."""

    barrier: Barrier
    acked: frozenset[StageId]


class Reporter:
    """Writes `control/_activity.json` from a thread of its own.

    Nothing waits for it, and it waits for nobody: a slow store only makes the file old. Whatever fails in it
    is logged, and the run continues.
    """

    def __init__(
        self,
        ctx: RunContext,
        stages: Callable[[], Sequence[Member]],
        open_: Callable[[], Sequence[OpenBarrier]],
        *,
        settings: Callable[[], Settings],
        skips: Callable[[], Skips],
    ) -> None:
        self._ctx = ctx
        self._stages, self._open, self._settings, self._skips = stages, open_, settings, skips
        self._done = threading.Event()
        self._written: RunActivity | None = None
        self._took: deque[int] = deque(maxlen=_WRITES)
        self._sampled_ms: int | None = None
        self._lags: dict[StageId, deque[Earlier]] = {}
        self._spaces: dict[str, deque[tuple[int, int]]] = {}
        self._disks: tuple[Disk, ...] = ()
        self._compared_ms: int | None = None
        self._ahead_ms: int | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"spark-abs-report-{ctx.run}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Let the thread end; it is not waited for, since a store may hold it for long."""
        self._done.set()

    def _run(self) -> None:
        while not self._done.wait(WRITE_EVERY_MS / 1000):
            try:
                self.report()
            except Exception as error:  # noqa: BLE001 - it must never end the run
                log.log(logging.DEBUG if self._failed else logging.WARNING, "no activity: %s", error)
                self._failed = True
            else:
                self._failed = False

    def report(self) -> None:
        """Write the file if something has changed, or if it is old."""
        now = now_ms()
        found = self._look(now)
        before = self._written
        if before is not None and abs(now - before.at_ms) < ALWAYS_AFTER_MS and _same(before, found):
            return
        began = time.monotonic()
        write_activity(self._ctx.root, found)
        self._took.append(int((time.monotonic() - began) * 1000))
        self._written = found
        if _is_due(self._compared_ms):
            self._compared_ms = steady_ms()
            self._ahead_ms = self._ahead_of_store(now, now_ms())

    def _look(self, now: int) -> RunActivity:
        stages = self._stages()
        found = tuple(stage.activity() for stage in stages)
        if _is_due(self._sampled_ms):
            self._sampled_ms = steady_ms()
            self._disks = self._look_at_disks(now)
            self._sample_lags(found, now)
        earlier = (furthest_behind(self._lags[one.stage]) for one in found if one.stage in self._lags)
        return RunActivity(
            self._ctx.run,
            now,
            found,
            late=tuple(self._late(stages, now)),
            write_ms=max(self._took, default=None),
            usual_write_ms=median_low(self._took) if self._took else None,
            ahead_of_store_ms=self._ahead_ms,
            disks=self._disks,
            earlier=tuple(earlier),
            settings=_settings(self._settings()),
            versions=_versions(),
            skips=self._skips(),
        )

    def _ahead_of_store(self, began_ms: int, ended_ms: int) -> int | None:
        """Compare the clocks: the store has received the file at a moment between two of the driver's."""
        nanoseconds = self._ctx.root.fs.get_file_info(self._ctx.root.path(PATH)).mtime_ns
        if nanoseconds is None:
            return None
        return ahead_ms(int(nanoseconds) // 1_000_000, began_ms, ended_ms)

    def _late(self, stages: Sequence[Member], now: int) -> list[Late]:
        found = [
            Late(one.barrier.id, late.stage, late.why, late.first)
            for one in self._open()
            if now - one.barrier.timestamp_ms >= LATE_AFTER_MS
            for late in late_stages(one.barrier, stages, one.acked)
        ]
        return sorted(found, key=lambda late: (not late.first, late.checkpoint))

    def _sample_lags(self, stages: Sequence[StageActivity], now: int) -> None:
        for stage in stages:
            samples = self._lags.setdefault(stage.stage, deque(maxlen=_LAGS))
            samples.append(Earlier(stage.stage, now, sum(i.rows for i in stage.inputs), stage.lag_ms(now)))

    def _look_at_disks(self, now: int) -> tuple[Disk, ...]:
        ctx = self._ctx
        places: dict[int, Place] = {}
        for place in (ctx.root.top, ctx.root.anywhere(ctx.natives)):
            if place.local and os.path.isdir(place.path):
                places.setdefault(os.stat(place.path).st_dev, place)
        return tuple(self._space(place.path, now) for place in places.values())

    def _space(self, path: str, now: int) -> Disk:
        usage = shutil.disk_usage(path)
        samples = self._spaces.setdefault(path, deque(maxlen=_SPACES))
        samples.append((now, usage.free))
        before_ms, before = samples[0]
        return Disk(path, usage.free, usage.total, before, before_ms)


def _is_due(last_ms: int | None) -> bool:
    """Say whether it is time for the next sample, also if the wall clock was set back."""
    return last_ms is None or steady_ms() - last_ms >= SAMPLE_EVERY_MS


def ahead_ms(stored_ms: int, began_ms: int, ended_ms: int) -> int:
    """Return how far a clock is ahead of the store's, at least; negative if it is behind.

    Args:
        stored_ms: when the store received a file, by its clock.
        began_ms: when its write began, by the other clock.
        ended_ms: when the write ended, likewise.
    """
    return began_ms - stored_ms if stored_ms < began_ms else min(0, ended_ms - stored_ms)


def furthest_behind(samples: Sequence[Earlier]) -> Earlier:
    """Return the sample with the greatest lag among the older half; of one at least.

    A stage with long batches is behind now and then: it is slower than the stages before it if it is further
    behind than it ever was then.
    """
    older = list(samples)[: max(1, len(samples) // 2)]
    return max(older, key=lambda sample: (sample.lag_ms, sample.at_ms))


def _same(before: RunActivity, now: RunActivity) -> bool:
    """Say whether nothing has changed but what is known of the writes themselves."""
    written = replace(
        before,
        at_ms=now.at_ms,
        write_ms=now.write_ms,
        usual_write_ms=now.usual_write_ms,
        ahead_of_store_ms=now.ahead_of_store_ms,
    )
    return written == now


def _settings(settings: Settings) -> Mapping[str, str]:
    values = {name: getattr(settings, name) for name in _SETTINGS}
    return {name: str(value) for name, value in values.items() if value is not None}


@cache
def _versions() -> Mapping[str, str]:
    return installed(_PACKAGES)
