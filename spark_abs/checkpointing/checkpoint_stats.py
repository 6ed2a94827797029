"""The events of a run's checkpoints for `history/`, for operators, failures included (P20)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from spark_abs.channels.in_flight import bytes_in_flight
from spark_abs.checkpointing.late_stages import LateStage, late_stages
from spark_abs.errors import AbortReason, AbsError
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.model import Barrier, StageId
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.run_context import RunContext
from spark_abs.stages.stage import Member
from spark_abs.store.clock import now_ms
from spark_abs.store.history import History, HistoryEvent, HistoryRow, unless_refused

log = logging.getLogger(__name__)

ENTRIES_COUNTED = 256
"""The most entries of an input that are opened to measure the data in flight."""


class CheckpointStats:
    """Writes the events of one run. Used from the coordinator's thread.

    An event that cannot be read or written is logged, and the run continues.
    """

    def __init__(self, ctx: RunContext, completed_ms: int | None) -> None:
        """Take the run, and when the newest checkpoint before it was completed."""
        self._ctx = ctx
        self._history = History(ctx.root)
        self._completed_ms = completed_ms

    def triggered(self, barrier: Barrier) -> None:
        """Record that a checkpoint has begun."""
        self._append(self._row(HistoryEvent.TRIGGERED, barrier, last_completed_age_ms=self._age(now_ms())))

    def late(self, barrier: Barrier, stages: Sequence[Member]) -> tuple[HistoryRow, ...]:
        """Return the progress of the stages that have not made their cut, those that hold it up first."""
        now, taken = now_ms(), [stage.name for stage in stages if stage.has_taken(barrier.id)]
        return tuple(self._waiting(barrier, late, now) for late in late_stages(barrier, stages, taken))

    def overtaken(self, barrier: Barrier, late: Sequence[HistoryRow], stages: int) -> None:
        """Record that a checkpoint became unaligned, and why stages without a cut waited."""
        now = now_ms()
        self._append(
            *late,
            self._row(
                HistoryEvent.OVERTAKEN,
                barrier,
                duration_ms=now - barrier.timestamp_ms,
                acks=stages - len(late),
                stages=stages,
            ),
        )

    def completed(self, barrier: Barrier, manifest: Manifest, state: ControlState) -> None:
        """Record a completed checkpoint: a row for each stage, as of its acknowledgement, and one for all."""
        flown = self._in_flight(manifest, state)
        age, self._completed_ms = self._age(manifest.completed_ms), manifest.completed_ms
        self._append(
            *(self._acked(barrier, snapshot, flown.get(snapshot.stage, 0)) for snapshot in manifest.stages),
            self._row(
                HistoryEvent.COMPLETED,
                barrier,
                duration_ms=manifest.completed_ms - barrier.timestamp_ms,
                size_full=manifest.size_full,
                size_new=manifest.size_new,
                alignment_bytes=sum(s.timings.alignment_bytes for s in manifest.stages),
                dropped_late=sum(s.dropped_late for s in manifest.stages),
                acks=len(manifest.stages),
                stages=len(manifest.stages),
                last_completed_age_ms=age,
                inflight_bytes=sum(flown.values()),
            ),
        )

    def _in_flight(self, manifest: Manifest, state: ControlState) -> Mapping[StageId, int]:
        """Return the bytes in flight to each stage, of at most so many entries of each input."""
        found: dict[StageId, int] = {}
        for flight in manifest.in_flight():
            try:
                path = channel_path(state, flight.channel)
                size = bytes_in_flight(self._ctx.root, path, flight, ENTRIES_COUNTED)
            except (AbsError, OSError) as error:
                log.warning("what is in flight to %s cannot be read: %s", flight.stage, error)
            else:
                found[flight.stage] = found.get(flight.stage, 0) + size
        return found

    def aborted(
        self,
        barrier: Barrier,
        reason: AbortReason,
        detail: str,
        acks: Mapping[StageId, StageSnapshot],
        late: Sequence[LateStage],
    ) -> None:
        """Record an abort: how far each stage had come, and why."""
        now = now_ms()
        self._append(
            *(self._acked(barrier, snapshot) for snapshot in acks.values()),
            *(self._waiting(barrier, stage, now) for stage in late),
            self._row(
                HistoryEvent.ABORTED,
                barrier,
                reason=reason.value,
                detail=detail,
                duration_ms=now - barrier.timestamp_ms,
                acks=len(acks),
                stages=len(acks) + len(late),
                last_completed_age_ms=self._age(now),
            ),
        )

    def settings_changed(self, what: str) -> None:
        """Record changed settings of the running job, with old and new values."""
        event, ctx = HistoryEvent.SETTINGS_CHANGED, self._ctx
        self._append(HistoryRow(now_ms(), event, ctx.attempt, ctx.run, detail=what))

    def _acked(self, barrier: Barrier, snapshot: StageSnapshot, in_flight: int | None = None) -> HistoryRow:
        timings = snapshot.timings
        return self._row(
            HistoryEvent.STAGE_ACKED,
            barrier,
            at_ms=barrier.timestamp_ms + timings.end_to_end_ms,
            stage=snapshot.stage,
            duration_ms=timings.end_to_end_ms,
            size_full=snapshot.size_full,
            size_new=snapshot.size_new,
            start_delay_ms=timings.start_delay_ms,
            alignment_ms=timings.alignment_ms,
            alignment_bytes=timings.alignment_bytes,
            sync_ms=timings.sync_ms,
            async_ms=timings.async_ms,
            backpressured_ms=timings.backpressured_ms,
            dropped_late=snapshot.dropped_late,
            inflight_bytes=in_flight,
        )

    def _waiting(self, barrier: Barrier, late: LateStage, now: int) -> HistoryRow:
        progress = late.progress
        first = progress.aligning_since_ms
        return self._row(
            HistoryEvent.STAGE_WAITING,
            barrier,
            stage=late.stage,
            detail=late.why,
            duration_ms=now - barrier.timestamp_ms,
            start_delay_ms=(first or now) - barrier.timestamp_ms,
            alignment_ms=None if first is None else now - first,
            alignment_bytes=progress.alignment_bytes,
            backpressured_ms=progress.backpressured_ms,
        )

    def _age(self, now: int) -> int | None:
        return None if self._completed_ms is None else now - self._completed_ms

    def _row(
        self, event: HistoryEvent, barrier: Barrier, *, at_ms: int | None = None, **columns: object
    ) -> HistoryRow:
        return HistoryRow(
            now_ms() if at_ms is None else at_ms,
            event,
            attempt=self._ctx.attempt,
            run=self._ctx.run,
            checkpoint=barrier.id,
            kind=barrier.kind.value,
            name=barrier.name,
            mode=barrier.mode.value,
            **columns,  # type: ignore[arg-type]
        )

    def _append(self, *rows: HistoryRow) -> None:
        with unless_refused():
            self._history.append(rows)
