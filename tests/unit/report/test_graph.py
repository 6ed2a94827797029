"""The graph of the page: blocked channels, barriers, what is not read, and no secret of a sink."""

from __future__ import annotations

from dataclasses import replace

from spark_abs.manifest import SourceShape, StageShape
from spark_abs.model import (
    AttemptId,
    Barrier,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    DataFile,
    Entry,
    Position,
    RunId,
    StageId,
    Version,
)
from spark_abs.protocol.control import AttachedSink, OutsideSink, begin_job
from spark_abs.protocol.outside import Mark
from spark_abs.report.graph import (
    PendingEntries,
    StageReading,
    blocked_inputs,
    channels_of,
    stages_of,
    with_passed,
)

STATE = begin_job("shop", 0)
LEFT, RIGHT = ChannelId("left.main"), ChannelId("right.main")


def at(channel: ChannelId, version: int, epoch: int, **more: object) -> Position:
    position = Position(channel, AttemptId(1), Version(version), CheckpointId(epoch))
    return replace(position, **more)  # type: ignore[arg-type]


def shape(stage: str, *inputs: str, **more: object) -> StageShape:
    made = StageShape(StageId(stage), inputs, {"main": "{}"}, {"main": "t"}, {})
    return replace(made, **more)  # type: ignore[arg-type]


def test_an_input_at_a_barrier_is_blocked_until_the_others_have_it() -> None:
    waits = at(LEFT, 9, 7, at_barrier=True)
    assert blocked_inputs([waits, at(RIGHT, 4, 6)]) == {LEFT}
    assert blocked_inputs([waits, at(RIGHT, 5, 7, at_barrier=True)]) == frozenset()
    assert blocked_inputs([waits]) == frozenset()


def test_a_closed_input_and_the_way_back_of_a_loop_hold_nobody_up() -> None:
    waits = at(LEFT, 9, 7, at_barrier=True)
    assert blocked_inputs([waits, at(RIGHT, 4, 6, closed=RunId(1))]) == frozenset()
    assert blocked_inputs([waits, at(RIGHT, 4, 6, feedback=True)]) == frozenset()


def test_an_unaligned_barrier_blocks_nothing() -> None:
    waits = at(LEFT, 9, 7, at_barrier=True, mode=CheckpointMode.UNALIGNED)
    assert blocked_inputs([waits, at(RIGHT, 4, 6)]) == frozenset()


def test_a_channel_has_what_its_reader_has_not_read() -> None:
    pending = PendingEntries()
    barrier = Barrier(CheckpointId(8), CheckpointKind.CHECKPOINT, 1)
    pending.add(Entry(Version(5), files=(DataFile("f", 10, 3),)))
    pending.add(Entry(Version(6), files=(DataFile("g", 20, 4, inflated=50),), barrier=barrier))
    shapes = [shape("left"), shape("match", "left.main")]
    readings = {StageId("match"): StageReading((at(LEFT, 5, 7),), 3, 4)}
    (edge,) = channels_of(shapes, readings, {LEFT: pending})
    assert (edge.at, edge.epoch, edge.entries, edge.rows, edge.size) == (5, 7, 1, 4, 50)
    assert (edge.barrier, edge.blocked, edge.more) == (8, False, False)
    pending.forget(Version(6))
    assert channels_of(shapes, readings, {LEFT: pending})[0].entries == 0


def test_a_barrier_in_a_channel_has_passed_the_stage_that_wrote_it() -> None:
    shapes = [shape("left"), shape("match", "left.main")]
    readings = {StageId("match"): StageReading((at(LEFT, 5, 7),), 3, 4)}
    pending = PendingEntries()
    pending.add(Entry(Version(6), barrier=Barrier(CheckpointId(8), CheckpointKind.CHECKPOINT, 1)))
    channels = channels_of(shapes, readings, {LEFT: pending})
    left, match = with_passed(stages_of(shapes, STATE, readings), channels)
    assert (left.passed, match.passed) == (8, 7)
    assert (match.finished, match.planned) == (3, 4)


def test_stages_have_their_sinks_with_options_and_without_secrets() -> None:
    first = Mark(AttemptId(1), CheckpointId(0), Version(0))
    state = replace(
        STATE,
        sinks=(AttachedSink(StageId("out"), "totals", "s3://me:pw@lake/totals", "t", key=("item",)),),
        outside=(
            OutsideSink("topic", StageId("out"), "main", "kafka", '{"topic":"t","sasl.password":"x"}', first),
            OutsideSink("odd", StageId("out"), "main", "own", "not JSON", first),
        ),
    )
    sinks = {"totals": "main", "topic": "main", "odd": "main", "mail": "main"}
    sources = (SourceShape("json", "https://user:pw@host/in"), SourceShape("channel", "left.main"))
    (stage,) = stages_of([shape("out", "left.main", sinks=sinks, sources=sources)], state, {})
    assert stage.sources == ("json source https://***@host/in",)
    assert [(s.name, s.kind, s.place, s.options) for s in stage.sinks] == [
        ("totals", "delta", "s3://***@lake/totals", ("merged by item",)),
        ("topic", "kafka", "", ("topic=t", "sasl.password=***")),
        ("odd", "own", "", ()),
        ("mail", "function", "", ()),
    ]
