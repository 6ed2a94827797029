"""From the declared stages, and how far each has read, to the graph of the page. Pure."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_abs.advice import named
from spark_abs.manifest import CHANNEL, Manifest, StageShape
from spark_abs.model import (
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Entry,
    Position,
    StageId,
    Version,
    producer,
)
from spark_abs.protocol.change_data import LAST_WINS
from spark_abs.protocol.control import AttachedSink, ControlState, OutsideSink, forgotten
from spark_abs.report.model import Channel, Sink, Stage
from spark_abs.report.redaction import redacted

MOST_ENTRIES = 256
"""Entries of a channel, after the slowest stage that reads it, that are counted."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An entry that some stage has not read."""

    version: Version
    rows: int
    size: int
    barrier: CheckpointId | None


@dataclass(frozen=True, slots=True)
class StageReading:
    """How far a stage is by its native checkpoint; empty if that cannot be seen from here."""

    positions: tuple[Position, ...] = ()
    finished: int | None = None
    planned: int | None = None


@dataclass(slots=True)
class PendingEntries:
    """The entries of a channel after the slowest of its readers, at most `MOST_ENTRIES`."""

    entries: deque[Pending] = field(default_factory=deque)
    more: bool = False
    """The channel may have more."""

    def add(self, entry: Entry) -> None:
        """Take the next entry."""
        barrier = entry.barrier.id if entry.barrier is not None else None
        self.entries.append(Pending(entry.version, entry.rows, entry.size, barrier))

    def forget(self, until: Version) -> None:
        """Drop what every stage has read."""
        while self.entries and self.entries[0].version <= until:
            self.entries.popleft()


def stages_of(
    shapes: Sequence[StageShape], state: ControlState, readings: Mapping[StageId, StageReading]
) -> tuple[Stage, ...]:
    """Return the stages with their sinks, in the order of their declaration."""
    return tuple(_stage(shape, state, readings.get(shape.stage, StageReading())) for shape in shapes)


def _stage(shape: StageShape, state: ControlState, reading: StageReading) -> Stage:
    epochs = [p.epoch for p in reading.positions if not p.feedback]
    return Stage(
        shape.stage,
        sources=tuple(redacted(str(source)) for source in shape.sources if source.kind != CHANNEL),
        operators=tuple(
            redacted(text) for text in (*map(str, shape.operators), *(f.uid for f in shape.functions))
        ),
        lookups=tuple(redacted(f"{name}: {place}") for name, place in shape.lookups.items()),
        output_mode=shape.output_mode,
        sinks=tuple(_sinks(shape, state)),
        finished=reading.finished,
        planned=reading.planned,
        passed=min(epochs) if epochs and min(epochs) > 0 else None,
    )


def _sinks(shape: StageShape, state: ControlState) -> Iterator[Sink]:
    outside = {s.sink: s for s in state.outside if s.stage == shape.stage}
    attached = {s.sink: s for s in state.sinks if s.stage == shape.stage}
    for name in shape.sinks:
        if name in outside:
            yield _outside(outside[name])
        elif name in attached:
            yield _attached(attached[name])
        else:
            place = shape.tables.get(name, "")
            yield Sink(name, "delta" if place else "function", redacted(place))


def _attached(sink: AttachedSink) -> Sink:
    options = []
    if sink.key:
        options.append(f"merged by {', '.join(sink.key)}")
    if sink.overwrites:
        options.append("each batch takes the place of all rows")
    if sink.changes != LAST_WINS:
        options.append("changes of a key in the order of a sequence")
    kind = "delta" if sink.version is None else "table"
    return Sink(sink.sink, kind, redacted(named(sink.name, sink.table)), tuple(options))


def _outside(sink: OutsideSink) -> Sink:
    try:
        plain = json.loads(sink.settings or "{}")
    except ValueError:
        plain = {}
    given = plain.items() if isinstance(plain, dict) else ()
    options = tuple(redacted(f"{name}={value}") for name, value in given if value not in (None, "", [], {}))
    return Sink(sink.sink, sink.kind, options=options)


def channels_of(
    shapes: Iterable[StageShape],
    readings: Mapping[StageId, StageReading],
    pending: Mapping[ChannelId, PendingEntries],
) -> tuple[Channel, ...]:
    """Return each channel once for each stage that reads it."""
    found = []
    for shape in shapes:
        feedback = {source.name for source in shape.sources if source.kind == CHANNEL and source.feedback}
        reading = readings.get(shape.stage, StageReading())
        blocked = blocked_inputs(reading.positions)
        for name in dict.fromkeys(shape.inputs):
            channel = ChannelId(name)
            edge = Channel(channel, shape.stage, feedback=name in feedback)
            mine = [p for p in reading.positions if p.channel == channel]
            if mine:
                slowest = min(mine, key=lambda position: position.version)
                edge = replace(
                    edge, at=slowest.version, epoch=slowest.epoch or None, blocked=channel in blocked
                )
                edge = _behind(edge, slowest.version, pending.get(channel))
            found.append(edge)
    return tuple(found)


def blocked_inputs(positions: Sequence[Position]) -> frozenset[ChannelId]:
    """Return the inputs that wait at a barrier which another open input has not reached (P4)."""
    counted = [p for p in positions if not p.feedback and not p.closed]
    if not counted:
        return frozenset()
    least = min(position.epoch for position in counted)
    return frozenset(
        p.channel for p in counted if p.at_barrier and p.epoch > least and p.mode is CheckpointMode.ALIGNED
    )


def _behind(edge: Channel, at: Version, pending: PendingEntries | None) -> Channel:
    if pending is None:
        return edge
    ahead = [entry for entry in pending.entries if entry.version > at]
    barriers = [entry.barrier for entry in ahead if entry.barrier is not None]
    return replace(
        edge,
        barrier=max(barriers, default=None),
        entries=len(ahead),
        rows=sum(entry.rows for entry in ahead),
        size=sum(entry.size for entry in ahead),
        more=pending.more,
    )


def with_passed(stages: Iterable[Stage], channels: Iterable[Channel]) -> tuple[Stage, ...]:
    """Add the newest barrier that is known to have left each stage: it is in a channel of the stage."""
    left: dict[StageId, int] = {}
    for edge in channels:
        stage = producer(edge.channel)
        left[stage] = max(left.get(stage, 0), edge.barrier or 0, edge.epoch or 0)
    return tuple(
        replace(stage, passed=CheckpointId(left[stage.name])) if left.get(stage.name) else stage
        for stage in stages
    )


def shapes_of(state: ControlState, newest: Manifest | None) -> tuple[StageShape, ...]:
    """Return the stages that the newest run has declared; those of the newest checkpoint if none is recorded.

    None is recorded of wrapped queries, after a restore until the next start, and by earlier versions.
    """
    if state.attempt.shapes or newest is None:
        return state.attempt.shapes
    gone = forgotten(state)
    return tuple(shape for shape in newest.graph if shape.stage not in gone)
