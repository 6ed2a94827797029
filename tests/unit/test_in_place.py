"""Barriers that a stage takes where it stands, one situation a test (P4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spark_abs.alignment.align import MOST_PASSED, Advance, Decision, Idle, Settled, decide
from spark_abs.alignment.in_place import is_at_cut
from spark_abs.alignment.marker import Cancelled, emission
from spark_abs.model import NO_EPOCH, AttemptId, CheckpointId, CheckpointMode, Entry, Position, Version
from tests.simulator.alignment import ROOMY, Alignment, barrier


def at_cut(stage: Alignment, number: int, mode: CheckpointMode = CheckpointMode.ALIGNED) -> bool:
    def unread(own: Position) -> Sequence[Entry]:
        return stage.logs[own.channel][own.version :]

    return is_at_cut(barrier(number, mode), stage.positions, unread, stage.run)


def test_a_stage_with_nothing_before_the_barrier_on_any_input_is_at_its_cut() -> None:
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    assert not at_cut(stage, 1)  # it has not come out of b
    stage.write("b")  # silent
    stage.write("b", marker=1)
    assert at_cut(stage, 1)


def test_rows_behind_the_barrier_do_not_matter() -> None:
    stage = Alignment("a", "b")
    for channel in "ab":
        stage.write(channel, marker=1)
        stage.write(channel, rows=1)
    assert at_cut(stage, 1)


@pytest.mark.parametrize("rows", [{"rows": 1}, {"rows": 1, "marker": 1}, {"cancel": 1}, {"end": True}])
def test_anything_before_the_barrier_is_for_a_batch(rows: dict[str, Any]) -> None:
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("b", **rows)
    stage.write("b", marker=1)
    assert not at_cut(stage, 1)


def test_an_input_that_waits_at_the_barrier_counts() -> None:
    """Its rows before the barrier have been read, the other input has none."""
    stage = Alignment("a", "b")
    stage.write("a", rows=1, marker=1)
    stage.batch()
    stage.write("b", marker=1)
    assert at_cut(stage, 1)


def test_an_input_that_was_read_past_the_barrier_does_not() -> None:
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.positions = (
        replace(stage.positions[0], version=Version(2), epoch=CheckpointId(1)),
        stage.positions[1],
    )
    stage.write("b", marker=1)
    assert not at_cut(stage, 1)


def test_older_barriers_in_between_have_no_rows_and_a_newer_one_is_another() -> None:
    stage = Alignment("a")
    stage.write("a", marker=1)
    stage.write("a", marker=3)
    assert [at_cut(stage, number) for number in (1, 2, 3)] == [True, False, True]


def test_unaligned_barriers_and_loops_go_another_way() -> None:
    stage = Alignment("a", "b")
    for channel in "ab":
        stage.write(channel, marker=1)
    assert not at_cut(stage, 1, CheckpointMode.UNALIGNED)
    assert at_cut(stage, 1, CheckpointMode.AT_LEAST_ONCE)
    stage.positions = (stage.positions[0], replace(stage.positions[1], feedback=True))
    assert not at_cut(stage, 1)


def decided(stage: Alignment, number: int, taken: int) -> Decision:
    own = stage.positions[number]
    return decide(
        own,
        stage.positions,
        stage.logs[own.channel][own.version :],
        settled=Settled(NO_EPOCH, frozenset(), taken=CheckpointId(taken)),
        limits=ROOMY,
        run=stage.run,
        attempt=AttemptId(1),
    )


def test_a_barrier_alone_is_bare_until_it_is_settled() -> None:
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    own = stage.positions[0]
    there = replace(own, version=Version(1), epoch=CheckpointId(1), at_barrier=True)
    assert [decided(stage, 0, taken) for taken in (0, 1)] == [Advance(there, bare=True), Idle(own)]


def test_barriers_that_were_taken_are_read_with_what_follows() -> None:
    """The batch makes no marker of its own: the outputs hold these barriers."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", marker=2)
    stage.write("a", rows=1)
    found = decided(stage, 0, 2)
    assert isinstance(found, Advance)
    assert (found.position.version, found.position.epoch, found.position.at_barrier) == (3, 2, False)
    assert not found.bare
    stage.write("a", marker=3)
    assert decided(stage, 0, 2).position.version == 4


def test_an_input_at_a_barrier_that_was_taken_does_not_wait() -> None:
    stage = Alignment("a", "b")
    stage.write("a", rows=1, marker=1)
    stage.write("a", rows=1)
    stage.batch()
    assert decided(stage, 0, 1) == Advance(replace(stage.positions[0], version=Version(2), at_barrier=False))


def test_a_batch_past_a_barrier_that_was_taken_repeats_no_cut() -> None:
    stage = Alignment("a")
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    before = stage.positions
    after = (decided(stage, 0, 1).position,)
    assert emission(before, after, stage.run) == Cancelled(CheckpointId(1))


def test_a_log_of_barriers_is_read_at_last() -> None:
    """Else it could never be trimmed."""
    stage = Alignment("a")
    for number in range(1, MOST_PASSED + 2):
        stage.write("a", marker=number)
        least = decided(stage, 0, number)
    last = MOST_PASSED + 1
    there = replace(stage.positions[0], version=Version(last), epoch=CheckpointId(last), at_barrier=True)
    assert least == Advance(there)
    assert isinstance(decided(stage, 0, MOST_PASSED), Advance)
