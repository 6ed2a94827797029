"""The background work of a run: capture cuts, copy state, acknowledge, and clean up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from deltalake.exceptions import DeltaError

from spark_abs.errors import AbortReason, AbsError, Fenced
from spark_abs.manifest import Manifest, OutputVersion, StageSnapshot, Timings
from spark_abs.model import (
    NO_BATCH,
    Barrier,
    BatchId,
    CheckpointId,
    LookupVersion,
    Position,
    StageId,
    Version,
)
from spark_abs.protocol.messages import (
    Acked,
    Declined,
)
from spark_abs.run_context import RunContext
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.take import snapshot_stage
from spark_abs.stages.alignment_backlog import ENTRIES_AT_THE_END, Backlog
from spark_abs.stages.housekeeping import Housekeeping
from spark_abs.stages.native import NativeLog
from spark_abs.state.assignment import placed
from spark_abs.store.clock import now_ms, steady_ms

log = logging.getLogger(__name__)

_COMMIT_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Taken:
    """A cut that a stage has made: the barrier stands after `batch` in all its outputs."""

    stage: StageId
    barrier: Barrier
    batch: BatchId
    positions: tuple[Position, ...]
    outputs: tuple[OutputVersion, ...]
    start_delay_ms: int
    alignment_ms: int
    sync_ms: int
    aligned_ms: int = 0
    """When the alignment ended."""
    backlog: Backlog | None = None
    """The backlog at that time; None if no input had to wait."""
    backpressured_ms: int = 0
    lookups: tuple[LookupVersion, ...] = ()
    """The versions at which the batch has read its lookups."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The facts of a stage for its snapshots, beside the files."""

    static_tables: Mapping[str, Version]
    dropped_late: Callable[[], int]
    functions: tuple[str, ...] = ()
    """As `PlanFacts.functions`."""
    feeds: tuple[str, ...] = ()
    """As `StageSnapshot.feeds`."""


class Snapshotter:
    """Copies cuts in its own threads (P11). `submit` and `permits` are called by batch threads and agents.

    With `synchronous`, the batch after a cut waits until its copy has ended; otherwise batches wait only
    when the oldest open capture is so far behind that Spark might purge it.
    """

    def __init__(
        self,
        ctx: RunContext,
        kept: StateStorage,
        tidy: Callable[[], None],
        on_event: Callable[[Acked | Declined], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Take the run and its storage of state.

        Args:
            ctx: the run.
            kept: where copies go.
            tidy: retires and sweeps.
            on_event: called with the result of a copy.
            on_failure: called if the run was fenced.
        """
        self._ctx = ctx
        self._kept = kept
        self._facts: dict[StageId, StageFacts] = {}
        self._wake: dict[StageId, Callable[[], None]] = {}
        self._housekeeping = Housekeeping(tidy, on_failure)
        self._on_event = on_event
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(ctx.settings.copy_threads, thread_name_prefix="spark-abs-copy")
        self._lock = threading.Lock()
        self._open: dict[tuple[StageId, CheckpointId], BatchId] = {}
        self._copying: dict[StageId, threading.Lock] = {}
        self._closing = threading.Event()

    def register(self, stage: StageId, facts: StageFacts, wake: Callable[[], None]) -> None:
        """Take a stage, or its new runner, before its first cut.

        Args:
            stage: its name.
            facts: what its snapshots say.
            wake: lets it ask `permits` again.
        """
        with self._lock:
            self._facts[stage], self._wake[stage] = facts, wake

    def submit(self, taken: Taken) -> None:
        """Capture and copy a cut as soon as Spark has recorded the end of its batch, then acknowledge it.

        Cuts of one stage are copied one after the other.
        """
        with self._lock:
            self._open[taken.stage, taken.barrier.id] = taken.batch
        self._pool.submit(self._work, taken)

    def permits(self, stage: StageId, batch: BatchId) -> bool:
        """Say whether a stage may begin a batch. No batch waits for a copy that waits for its own end."""
        with self._lock:
            mine = [b for (s, _), b in self._open.items() if s == stage and b < batch]
        if not mine:
            return True
        return not self._ctx.settings.synchronous and batch - min(mine) <= self._ctx.batches_retained // 2

    def settle(self, checkpoint: CheckpointId, *, completed: bool) -> None:
        """Release the pins of a checkpoint, once its outcome is durable.

        Copies for an aborted checkpoint, also one under way, are left to the next copy of the same stage.
        This waits neither for a copy under way nor for the store, which may hang.
        """
        with self._lock:
            late = [key for key in self._open if key[1] == checkpoint]
            for key in late:
                del self._open[key]
        for stage, _ in late:
            self._wake[stage]()
        self._pool.submit(partial(self._kept.unpin, checkpoint, completed=completed))

    def missing(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the stages of a manifest that miss files: `3 of the 12 files of counts`."""
        missing = frozenset(self._kept.missing(file for part in manifest.stages for file in part.files))
        return tuple(
            f"{len(gone)} of the {len(part.files)} files of {part.stage}"
            for part in manifest.stages
            if (gone := missing.intersection(part.files))
        )

    def tidy(self) -> None:
        """Retire and sweep in the background."""
        self._housekeeping.ask()

    def close(self) -> None:
        """End copies that are under way, start no other; then clean up if that is due."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._housekeeping.close()

    def _work(self, taken: Taken) -> None:
        try:
            self._on_event(Acked(steady_ms(), taken.barrier.id, self._snapshot(taken)))
        except _Unwanted:
            pass
        except Fenced as error:
            self._on_failure(error)
        except (AbsError, DeltaError, OSError) as error:
            self._decline(taken, error)
        except Exception as error:
            log.exception("snapshot of stage %s for checkpoint %s", taken.stage, taken.barrier.id)
            self._decline(taken, error)
        finally:
            with self._lock:
                late = self._open.pop((taken.stage, taken.barrier.id), None) is None
            if late:
                self._kept.unpin(taken.barrier.id, completed=False)
            self._wake[taken.stage]()

    def _snapshot(self, taken: Taken) -> StageSnapshot:
        ctx, stage = self._ctx, taken.stage
        ctx.failpoint(f"capture.{stage}.await.before")
        self._await_commit(taken)
        ctx.failpoint(f"capture.{stage}.copy.before")
        with self._turn(taken):
            began = now_ms()
            copy = snapshot_stage(self._kept, taken.barrier.id, ctx.native(stage), taken.batch)
        ctx.failpoint(f"capture.{stage}.copy.after")
        facts = self._facts[stage]
        took = now_ms() - began
        snapshot = StageSnapshot(
            stage=stage,
            cut_batch=taken.batch,
            offsets=copy.offsets,
            watermark_ms=copy.watermark_ms,
            positions=taken.positions,
            outputs=taken.outputs,
            operators=placed(copy.operators, facts.functions),
            shuffle_partitions=copy.shuffle_partitions,
            provider=copy.provider,
            files=copy.files,
            size_new=copy.size_new,
            dropped_late=facts.dropped_late(),
            static_tables=facts.static_tables,
            lookups=taken.lookups,
            feeds=facts.feeds,
            timings=Timings(
                taken.start_delay_ms,
                taken.alignment_ms,
                sync_ms=taken.sync_ms + (took if ctx.settings.synchronous else 0),
                async_ms=0 if ctx.settings.synchronous else took,
                alignment_bytes=taken.backlog.read(ENTRIES_AT_THE_END, taken.aligned_ms)
                if taken.backlog
                else 0,
                end_to_end_ms=now_ms() - taken.barrier.timestamp_ms,
                backpressured_ms=taken.backpressured_ms,
            ),
        )
        ctx.failpoint(f"ack.{stage}.before")
        return snapshot

    def _await_commit(self, taken: Taken) -> None:
        """Wait until the cut's commit file is there: Spark writes it right after the batch function returns.

        A late copy may find it purged; a copy that is no longer wanted ends.

        Raises:
            _Unwanted: the checkpoint has its outcome, or the run ends.
        """
        native = NativeLog(self._ctx.native(taken.stage))
        while True:
            self._require_wanted(taken)
            if taken.batch == NO_BATCH or native.has_committed(taken.batch):
                return
            self._closing.wait(_COMMIT_POLL_S)

    @contextmanager
    def _turn(self, taken: Taken) -> Iterator[None]:
        """Wait while an older cut of the stage is copied, so that common files are copied once.

        Raises:
            _Unwanted: the checkpoint has its outcome, or the run ends.
        """
        with self._lock:
            turn = self._copying.setdefault(taken.stage, threading.Lock())
        while not turn.acquire(timeout=_COMMIT_POLL_S):
            self._require_wanted(taken)
        try:
            yield
        finally:
            turn.release()

    def _require_wanted(self, taken: Taken) -> None:
        with self._lock:
            wanted = (taken.stage, taken.barrier.id) in self._open
        if not wanted or self._closing.is_set():
            raise _Unwanted

    def _decline(self, taken: Taken, error: Exception) -> None:
        detail = f"{type(error).__name__}: {error}"
        self._on_event(Declined(steady_ms(), taken.barrier.id, taken.stage, AbortReason.DECLINED, detail))


class _Unwanted(Exception):
    """This snapshot is no longer needed."""
