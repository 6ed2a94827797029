"""Loops: which there are, what a feedback edge means to gates and cuts, and when a loop has ended (P17)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spark_abs.alignment.loops import Loop, Member, find_loops, has_ended
from spark_abs.alignment.marker import Cancelled, Cut, Free, Nothing
from spark_abs.errors import GraphError
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Position,
    RunId,
    StageId,
    Version,
    channel_id,
    dumps_position,
    positions_of,
)
from spark_abs.plan.graph import JobGraph, StageDecl, watermark_findings
from spark_abs.protocol.credit import Capacity, Load, holds_back
from spark_abs.spark.plan_facts import PlanFacts, Watermark
from tests.simulator.alignment import Alignment

RUN = RunId(1)
ONE = CheckpointId(1)


class Head(Alignment):
    """A stage that reads `x` and, as its feedback edge, `back`."""

    def __init__(self, *others: str, mode: CheckpointMode = CheckpointMode.ALIGNED) -> None:
        super().__init__("x", "back", *others, mode=mode)
        self.positions = tuple(replace(p, feedback=p.channel == "back") for p in self.positions)


# -- gates and cuts


def test_the_head_cuts_when_all_but_the_way_back_have_the_barrier() -> None:
    """Only the head can send it round: to wait for it there would be to wait for ever."""
    head = Head("y")
    head.write("back", 1)
    head.write("x", 1, marker=1)
    assert head.drain() == []
    assert head.waiting() == {0: 1}
    head.write("y", 1, marker=1)
    assert head.batch() == Cut(ONE)


def test_a_barrier_that_comes_round_stops_nothing_and_is_not_passed_on_again() -> None:
    head = Head()
    head.write("x", 1, marker=1)
    assert head.drain() == [Cut(ONE)]
    head.write("back", 1)
    head.write("back", 1, marker=1)
    head.write("back", 1)
    head.write("x", 1)
    assert head.batch() == Nothing()
    assert [p.version for p in head.positions] == [2, 3]
    assert head.waiting() == {}


def test_the_way_back_waits_for_nobody() -> None:
    """Not even for an input that has not had the barrier at which it stands."""
    head = Head()
    head.write("back", 1, marker=1)
    assert head.batch() == Nothing()
    assert head.waiting() == {}
    head.write("back", 1)
    assert head.batch() == Nothing()
    assert [p.version for p in head.positions] == [0, 2]


def test_an_unaligned_barrier_may_come_round_first_and_is_the_cut_when_it_is_seen() -> None:
    """A stage on the way has taken it without waiting for the head: what is behind it is not read before."""
    head = Head(mode=CheckpointMode.UNALIGNED)
    head.write("back", 1, marker=1)
    head.write("back", 1)
    head.write("x", 1)
    assert head.batch() == Cut(ONE)
    assert [p.version for p in head.positions] == [1, 1]
    assert head.batch() == Nothing()
    assert [p.version for p in head.positions] == [1, 2]


def test_an_unaligned_barrier_is_read_from_a_way_back_also_when_all_else_has_ended() -> None:
    """Rows may follow it, and then it can no longer be taken where the head stands."""
    head = Head(mode=CheckpointMode.UNALIGNED)
    head.write("x", end=True)
    assert head.batch() == Free()
    head.write("back", marker=1)
    head.write("back", 1)
    assert head.batch() == Free()
    assert [(p.version, p.epoch, p.at_barrier) for p in head.positions][1] == (1, 1, True)


def test_a_cancel_marker_that_comes_round_means_nothing() -> None:
    head = Head()
    head.write("x", marker=1)
    head.write("back", cancel=1)
    assert head.drain() == [Cut(ONE)]
    head.write("x", cancel=2)
    assert head.drain() == [Cancelled(CheckpointId(2))]


def test_nobody_waits_for_a_way_back_and_a_head_whose_other_inputs_ended_is_free() -> None:
    """It takes barriers like a source; the feedback edge stays open until the loop ends."""
    head = Head()
    head.write("x", end=True)
    assert head.batch() == Free()
    head.write("back", 1)
    assert head.batch() == Free()


def test_the_head_reads_only_its_way_back_while_that_holds_more_than_its_capacity() -> None:
    loads = [Load(Version(n), 10) for n in (1, 2, 3)]
    assert holds_back(loads, Version(0), Capacity(entries=3))
    assert not holds_back(loads, Version(1), Capacity(entries=3))
    assert not holds_back([], Version(3), Capacity(entries=1, size=1))


def test_a_position_says_that_it_is_a_way_back_and_older_ones_are_none() -> None:
    position = Position(ChannelId("a.main"), AttemptId(1), Version(2), NO_EPOCH)
    back = replace(position, feedback=True)
    assert "feedback" not in dumps_position(position)
    assert dumps_position(back)["feedback"] is True
    assert positions_of([json.dumps(dumps_position(p)) for p in (position, back)]) == (position, back)


# -- which loops there are


def edges(*known: str) -> list[tuple[StageId, ChannelId, StageId]]:
    pairs = [edge.split(">") for edge in known]
    return [(StageId(a), channel_id(a), StageId(b)) for a, b in pairs]


def loop(stages: str, channels: str) -> Loop:
    return Loop(frozenset(map(StageId, stages)), frozenset(channel_id(c) for c in channels))


@pytest.mark.parametrize(
    ("known", "found"),
    [
        (("a>b", "b>c"), []),
        (("a>b", "b>b", "b>c"), [loop("b", "b")]),
        (("a>b", "b>c", "c>b", "c>d"), [loop("bc", "bc")]),
        (("a>b", "b>b", "b>c", "c>c"), [loop("b", "b"), loop("c", "c")]),
        (("a>b", "b>c", "c>d", "c>c", "d>b"), [loop("bcd", "bcd")]),
    ],
    ids=["none", "of one stage", "of two", "one after the other", "one within the other"],
)
def test_a_loop_is_all_that_can_send_rows_to_each_other(known: tuple[str, ...], found: list[Loop]) -> None:
    assert sorted(find_loops(edges(*known)), key=lambda one: sorted(one.stages)) == found


# -- its end


def position(channel: str, closed: bool = False) -> Position:
    at = Position(channel_id(channel), AttemptId(1), Version(1), NO_EPOCH)
    return replace(at, closed=RUN if closed else RunId(0))


HEAD = Member(True, (position("a", closed=True), position("c")), frozenset())
REST = Member(True, (position("b"),), frozenset())


@pytest.mark.parametrize(
    ("head", "rest", "ended"),
    [
        (HEAD, REST, True),
        (replace(HEAD, positions=(position("a"), position("c"))), REST, False),
        (replace(HEAD, idle=False), REST, False),
        (HEAD, replace(REST, idle=False), False),
        (HEAD, replace(REST, unread=frozenset([channel_id("b")])), False),
        (replace(HEAD, unread=frozenset([channel_id("c")])), REST, False),
        (HEAD, replace(REST, positions=(position("b"), position("x"))), False),
    ],
    ids=["ended", "input", "head at work", "stage at work", "on its way", "comes back", "side input"],
)
def test_a_loop_has_ended_when_its_input_has_and_nothing_is_under_way(
    head: Member, rest: Member, ended: bool
) -> None:
    assert has_ended(loop("bc", "bc"), [head, rest], RUN) is ended


# -- what a job may declare


def stage(name: str, *inputs: str, feedback: str = "", native: bool = False) -> StageDecl:
    back = (channel_id(feedback),) if feedback else ()
    return StageDecl(
        StageId(name), (*map(channel_id, inputs), *back), has_native=native or name == "a", feedback=back
    )


def test_producers_come_first_and_the_way_back_is_left_out_of_that() -> None:
    graph = JobGraph((stage("c", "b"), stage("b", "a", feedback="c"), stage("a")), ())
    assert [s.name for s in graph.order()] == ["a", "b", "c"]
    assert graph.loops() == (loop("bc", "bc"),)
    assert graph.consumed(StageId("c")) == ("main",)
    assert [graph.stages_after(s.name) for s in graph.order()] == [2, 1, 0]


def test_rows_that_go_two_ways_go_through_the_stages_of_the_longer_one() -> None:
    graph = JobGraph((stage("a"), stage("b", "a"), stage("c", "b"), stage("d", "a", "c")), ())
    assert [graph.stages_after(StageId(name)) for name in "abcd"] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ((stage("a"), stage("b", "a"), stage("c", "a", feedback="b")), "'c' reads 'b.main' as feedback, but"),
        ((stage("a"), stage("b", "a", "c"), stage("c", "b")), "form a cycle: .*; declare its feedback edge"),
        ((stage("a"), stage("b", feedback="b")), "'b' has nothing but feedback to read"),
        (
            (stage("a"), stage("b", "a", feedback="b", native=True)),
            "'b' is part of a loop and reads a native",
        ),
    ],
    ids=["closes no loop", "no feedback edge", "nothing else", "native stream"],
)
def test_what_cannot_be_a_loop_is_refused(stages: tuple[StageDecl, ...], why: str) -> None:
    with pytest.raises(GraphError, match=why):
        JobGraph(stages, ())


def test_a_watermark_on_a_way_back_is_doubtful() -> None:
    """Rows get later with every round; a delay that is too short elsewhere is found as before."""
    graph = JobGraph((stage("a"), stage("b", "a", feedback="b")), ())
    late = Watermark("ts", 1_000, (channel_id("b"),))
    facts = PlanFacts((), (), (), False, True, {})
    doubts = watermark_findings(
        graph, {StageId("a"): facts, StageId("b"): replace(facts, watermarks=(late,))}
    )
    assert [d.partition(": rows get later")[0] for d in doubts] == [
        "stage 'b': a watermark on 'ts' of the feedback 'b.main'"
    ]
