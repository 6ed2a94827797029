"""From the rows of `history/` to the checkpoints of the page, with bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from spark_abs.manifests.find import DamagedRow
from spark_abs.manifests.manifest_table import Summary
from spark_abs.model import NO_ATTEMPT, AttemptId, CheckpointId, RunId, StageId
from spark_abs.protocol.control import ControlState
from spark_abs.report.model import (
    MOST_CHECKPOINTS,
    MOST_EVENTS,
    MOST_STAGE_ROWS,
    CheckpointLine,
    EventLine,
    Outcome,
    StageLine,
    Timeline,
)
from spark_abs.report.redaction import redacted
from spark_abs.store.history import HistoryEvent
from spark_abs.store.history_follower import Row

OF_CHECKPOINTS = frozenset(
    (HistoryEvent.TRIGGERED, HistoryEvent.OVERTAKEN, HistoryEvent.COMPLETED, HistoryEvent.ABORTED)
)
OF_STAGES = frozenset((HistoryEvent.STAGE_ACKED, HistoryEvent.STAGE_WAITING))
_COUNTS = ("duration_ms", "size_full", "size_new", "alignment_bytes", "inflight_bytes", "dropped_late")
_PARTS = (
    "duration_ms",
    "start_delay_ms",
    "alignment_ms",
    "sync_ms",
    "async_ms",
    "backpressured_ms",
    "size_full",
    "size_new",
    "alignment_bytes",
    "inflight_bytes",
)


class Events:
    """The newest events of a root: add rows in any portions, in the order of time.

    Of checkpoints the newest are kept, of their stages those of the newest checkpoints and, for a quarter of
    the room, of older ones that were aborted.
    """

    def __init__(self, most: int = MOST_CHECKPOINTS, most_rows: int = MOST_STAGE_ROWS) -> None:
        self._most, self._most_rows = most, most_rows
        self._lines: dict[CheckpointId, CheckpointLine] = {}
        self._parts: dict[CheckpointId, dict[StageId, StageLine]] = {}
        self._rows = 0
        self._others: list[EventLine] = []

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows; those of events that only a newer version knows are left out."""
        known = {event.value: event for event in HistoryEvent}
        for row in rows:
            event = known.get(row["event"])
            if event is None:
                continue
            if event in OF_CHECKPOINTS:
                self._take(event, row)
            elif event in OF_STAGES:
                self._take_part(event, row)
            elif event is not HistoryEvent.RETIRED:
                self._others.append(_event(row))
        self._forget()

    def wanted(self) -> tuple[CheckpointId, ...]:
        """Return the checkpoints whose stages the page has room for, if each has as many as it recorded."""
        room, chosen = self._most_rows, []
        for number in sorted(self._lines.keys() | self._parts.keys(), reverse=True):
            line = self._lines.get(number, CheckpointLine(number))
            if room <= self._most_rows // 4 and line.outcome is not Outcome.ABORTED:
                continue
            room -= max(1, line.stages or 0, len(self._parts.get(number, ())))
            if room < 0:
                break
            chosen.append(number)
        return tuple(chosen)

    def timeline(
        self, state: ControlState, stored: Collection[Summary], damaged: Collection[DamagedRow] = ()
    ) -> Timeline:
        """Return what the page shows, with what `control/` and `checkpoints/` know of each checkpoint."""
        lines = dict(self._lines)
        for summary in stored:
            lines[summary.id] = _stored(lines.get(summary.id), summary)
        for row in damaged:
            if row.id is not None:
                known = lines.get(row.id, CheckpointLine(row.id))
                lines[row.id] = replace(known, outcome=Outcome.COMPLETED, damage=redacted(row.error))
        lines |= _claimed(lines, state)
        newest = sorted(lines)[-self._most :]
        settled = _settled((lines[number] for number in newest), state)
        return Timeline(
            tuple(settled),
            tuple(part for number in newest for part in self._parts.get(number, {}).values()),
            tuple(self._others),
            earlier=max(0, newest[0] - 1) if newest else 0,
        )

    def _take(self, event: HistoryEvent, row: Row) -> None:
        number = CheckpointId(row["checkpoint"])
        before = self._lines.get(number, CheckpointLine(number))
        line = replace(
            before,
            attempt=row["attempt"],
            run=row.get("run"),
            kind=row.get("kind") or before.kind,
            name=row.get("name") or before.name,
            mode=row.get("mode") or before.mode,
        )
        if event is HistoryEvent.TRIGGERED:
            line = replace(line, triggered_ms=row["at_ms"])
        elif event is HistoryEvent.OVERTAKEN:
            line = replace(line, overtaken=True, acks=row.get("acks"), stages=row.get("stages"))
        else:
            done = event is HistoryEvent.COMPLETED
            counts: dict[str, Any] = {name: row.get(name) for name in _COUNTS}
            took = row.get("duration_ms")
            began = before.triggered_ms if took is None else row["at_ms"] - took
            line = replace(
                line,
                outcome=Outcome.COMPLETED if done else Outcome.ABORTED,
                triggered_ms=before.triggered_ms or began or row["at_ms"],
                acks=row.get("acks"),
                stages=row.get("stages"),
                reason=row.get("reason") or "",
                detail=redacted(row.get("detail") or ""),
                **counts,
            )
        self._lines[number] = line

    def _take_part(self, event: HistoryEvent, row: Row) -> None:
        number, stage = CheckpointId(row["checkpoint"]), StageId(row["stage"])
        parts = self._parts.setdefault(number, {})
        self._rows += stage not in parts
        parts[stage] = StageLine(
            number,
            stage,
            acked=event is HistoryEvent.STAGE_ACKED,
            detail=redacted(row.get("detail") or ""),
            **{name: row.get(name) for name in _PARTS},
        )

    def _forget(self) -> None:
        for number in sorted(self._lines)[: -self._most]:
            del self._lines[number]
            self._rows -= len(self._parts.pop(number, ()))
        if self._rows > self._most_rows:
            kept = set(self.wanted())
            for number in [number for number in self._parts if number not in kept]:
                self._rows -= len(self._parts.pop(number))
        self._others = self._others[-MOST_EVENTS:]


_TEXTS = ("name", "reason", "detail", "settings")


def _event(row: Row) -> EventLine:
    text = ": ".join(part for part in map(row.get, _TEXTS) if part)
    return EventLine(
        row["at_ms"],
        row["event"],
        AttemptId(row["attempt"]),
        row.get("run"),
        checkpoint=row.get("checkpoint"),
        stage=row.get("stage"),
        text=redacted(text),
    )


def _stored(line: CheckpointLine | None, summary: Summary) -> CheckpointLine:
    edited = summary.attempt == NO_ATTEMPT
    return replace(
        line or CheckpointLine(summary.id),
        outcome=Outcome.COMPLETED,
        attempt=None if edited else summary.attempt,
        run=RunId(summary.run),
        kind=summary.kind.value,
        name=summary.name or "",
        triggered_ms=summary.triggered_ms,
        duration_ms=summary.completed_ms - summary.triggered_ms,
        size_full=summary.size_full,
        size_new=summary.size_new,
        stored=True,
        edited=edited,
    )


def _claimed(
    lines: Mapping[CheckpointId, CheckpointLine], state: ControlState
) -> Mapping[CheckpointId, CheckpointLine]:
    """Return the checkpoints that are open, as far as the history does not know their outcome."""
    found = {}
    for claim in state.claims:
        barrier = claim.barrier
        line = lines.get(barrier.id, CheckpointLine(barrier.id))
        if line.outcome is Outcome.OPEN:
            found[barrier.id] = replace(
                line,
                attempt=claim.attempt,
                run=claim.run,
                kind=barrier.kind.value,
                name=barrier.name or "",
                mode=barrier.mode.value,
                triggered_ms=barrier.timestamp_ms,
            )
    return found


def _settled(lines: Iterable[CheckpointLine], state: ControlState) -> Iterator[CheckpointLine]:
    """Iterate lines with the outcome and the path that `control/` knows: the history may lack an abort."""
    reasons = {aborted.id: aborted for aborted in state.aborted}
    claimed = {claim.barrier.id for claim in state.claims}
    ends = state.path_ends()
    for line in lines:
        if line.outcome is Outcome.OPEN and line.id not in claimed:
            aborted = reasons.get(line.id)
            yield replace(
                line,
                outcome=Outcome.ABORTED,
                reason=str(aborted.reason) if aborted else "run-ended",
                detail=redacted(aborted.detail) if aborted else line.detail,
            )
        elif line.outcome is Outcome.COMPLETED and line.attempt is not None:
            until = ends.get(line.attempt)
            left = line.attempt not in ends or (until is not None and line.id > until)
            yield replace(line, abandoned=left)
        else:
            yield line
