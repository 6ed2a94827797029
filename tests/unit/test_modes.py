"""Checkpoints that do not wait for each other's inputs: at least once (P7) and unaligned (P16)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_abs.alignment.marker import Cancelled, Cut, Nothing, emission, may_take, overtaking
from spark_abs.errors import Fenced
from spark_abs.model import (
    AttemptId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    Position,
    RunId,
    Version,
)
from spark_abs.protocol import control
from spark_abs.protocol.control import overtake, overtaken
from tests.simulator.alignment import Alignment, barrier

ALIGNED, UNALIGNED, COUNTED = CheckpointMode.ALIGNED, CheckpointMode.UNALIGNED, CheckpointMode.AT_LEAST_ONCE
ONE, TWO = CheckpointId(1), CheckpointId(2)


def at(channel: str, version: int, epoch: int, *, there: bool, mode: CheckpointMode = UNALIGNED) -> Position:
    """A position: `there` if it stands at the barrier itself."""
    return Position(
        ChannelId(channel), AttemptId(1), Version(version), CheckpointId(epoch), at_barrier=there, mode=mode
    )


# -- at least once


def test_at_least_once_no_input_waits() -> None:
    """The faster input reads on beyond its barrier; each batch still ends at one (P7)."""
    stage = Alignment("a", "b", mode=COUNTED)
    stage.write("a", rows=1, marker=1)  # 1
    stage.write("a", rows=1)  # 2, after it
    stage.write("b", rows=1)
    stage.batch()
    assert stage.positions[0].version == 1
    stage.batch()
    assert (stage.positions[0].version, stage.waiting()) == (2, {})


def test_at_least_once_the_cut_is_where_the_last_input_has_the_barrier() -> None:
    """Whatever the others have read by then (P7)."""
    stage = Alignment("a", "b", mode=COUNTED)
    stage.write("a", rows=1, marker=1)
    stage.write("a", rows=1)
    stage.drain()  # a is beyond
    stage.write("b", rows=1, marker=1)
    assert stage.batch() == Cut(ONE)


def test_at_least_once_several_ids_are_open_and_completed_in_order() -> None:
    """The faster input has passed two barriers before the slower one has the first (P7)."""
    stage = Alignment("a", "b", mode=COUNTED)
    stage.write("a", marker=1)
    stage.write("a", marker=2)
    assert stage.drain() == []
    stage.write("b", rows=1, marker=1)
    stage.write("b", rows=1, marker=2)
    assert stage.drain() == [Cut(ONE), Cut(TWO)]


def test_at_least_once_an_input_that_ends_completes_what_the_others_have_passed() -> None:
    """The newest of them: the older one is subsumed by it (P8, P10)."""
    stage = Alignment("a", "b", mode=COUNTED)
    stage.write("a", marker=1)
    stage.write("a", marker=2)
    stage.write("a", rows=1)  # beyond both
    stage.drain()
    stage.write("b", end=True)
    assert stage.batch() == Cut(TWO)


def test_an_aligned_barrier_behind_one_at_least_once_holds_until_both_are_cut() -> None:
    """A savepoint while checkpoints are at least once: the mode is the barrier's, not the job's."""
    stage = Alignment("a", "b", mode=COUNTED)
    stage.write("a", marker=1)
    stage.mode = ALIGNED
    stage.write("a", marker=2)
    stage.write("a", rows=1)
    stage.drain()
    assert stage.waiting() == {0: TWO}
    stage.mode = COUNTED
    stage.write("b", marker=1)
    stage.mode = ALIGNED
    stage.write("b", marker=2)
    assert stage.drain() == [Cut(ONE), Cut(TWO)]


# -- unaligned


def test_unaligned_the_first_barrier_that_is_seen_is_the_cut() -> None:
    """Nothing of what is behind it has been read yet; what is unread before it on the others is in flight."""
    stage = Alignment("a", "b", mode=UNALIGNED)
    stage.write("a", rows=1, marker=1)
    stage.write("a", rows=1)  # after it
    stage.write("b", rows=1)
    assert stage.batch() == Cut(ONE)
    assert stage.positions[0].version == 1


def test_unaligned_no_input_waits_and_the_cut_is_not_repeated() -> None:
    stage = Alignment("a", "b", mode=UNALIGNED)
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.batch()
    assert (stage.batch(), stage.positions[0].version, stage.waiting()) == (Nothing(), 2, {})
    stage.write("b", rows=1, marker=1)  # it comes on the last input at last
    assert stage.batch() == Nothing()


def test_unaligned_a_barrier_is_taken_ahead_of_what_is_unread() -> None:
    """Before any input has it, and as long as no input has gone beyond it (P16)."""
    offered = barrier(1, UNALIGNED)
    behind = (at("a", 3, 0, there=False, mode=ALIGNED), at("b", 5, 0, there=False, mode=ALIGNED))
    assert overtaking([offered], behind) == offered
    assert overtaking([offered], (at("a", 4, 1, there=True), behind[1])) == offered
    assert overtaking([offered], (at("a", 5, 1, there=False), behind[1])) is None


def test_ids_are_taken_in_order_so_an_aligned_one_holds_an_unaligned_one_back() -> None:
    savepoint, newer = barrier(1), barrier(2, UNALIGNED)
    here = (at("a", 3, 0, there=False, mode=ALIGNED),)
    assert overtaking([newer, savepoint], here) is None
    assert overtaking([newer], here) == newer


def test_an_id_that_was_missed_holds_nothing_back() -> None:
    """An input is beyond 1: it can never be cut here."""
    here = (at("a", 5, 1, there=False, mode=ALIGNED), at("b", 2, 0, there=False, mode=ALIGNED))
    assert overtaking([barrier(1), barrier(2, UNALIGNED)], here) == barrier(2, UNALIGNED)


def test_two_unaligned_barriers_are_taken_one_after_the_other() -> None:
    first, second = barrier(1, UNALIGNED), barrier(2, UNALIGNED)
    here = (at("a", 3, 0, there=False, mode=ALIGNED),)
    assert overtaking([second, first], here) == first
    assert overtaking([second], here) == second


def test_what_may_be_taken_where() -> None:
    """At the barrier or before it on every input, ended ones too."""
    ended = replace(at("b", 9, 1, there=False, mode=ALIGNED), closed=RunId(1))
    assert may_take(ONE, (at("a", 4, 1, there=True),))
    assert may_take(TWO, (at("a", 4, 1, there=True), ended))
    assert not may_take(ONE, (at("a", 4, 1, there=True), ended))


# -- aligned at first


def test_an_overtaken_barrier_no_longer_blocks() -> None:
    """The gate hears of it from `control/`; before, it waits."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.drain()
    assert stage.waiting() == {0: ONE}
    stage.overtaken.add(ONE)
    stage.drain()
    assert stage.positions[0].version == 2


def test_an_overtaken_barrier_that_another_stage_has_sent_ahead_is_cut_when_it_is_seen() -> None:
    """One input waits at it; on the other it comes as unaligned, ahead of a third that still lacks it."""
    stage = Alignment("a", "b", "c")
    stage.write("a", marker=1)
    stage.drain()
    stage.mode = UNALIGNED
    stage.write("b", marker=1)
    assert stage.batch() == Cut(ONE)


def test_an_aligned_barrier_that_some_input_is_beyond_is_cancelled_in_any_case() -> None:
    """It was settled when that input went on."""
    before = (at("a", 5, 1, there=False, mode=ALIGNED), at("b", 5, 0, there=False, mode=ALIGNED))
    after = (before[0], at("b", 6, 1, there=True, mode=ALIGNED))
    assert emission(before, after, RunId(1)) == Cancelled(ONE)


def test_control_records_that_a_claim_became_unaligned_once() -> None:
    """The claim says it to who takes over, the difference of two states to gates."""
    state = control.begin_run(control.begin_job("job", 0), "host", 1, 0)
    claimed, _ = control.claim(state, RunId(1), kind=CheckpointKind.CHECKPOINT, name=None, now_ms=5)
    after = overtake(claimed, RunId(1), ONE)
    assert overtaken(claimed, after) == (ONE,)
    assert after.claims[0].barrier.mode is UNALIGNED
    assert overtake(after, RunId(1), ONE) == after
    assert overtake(after, RunId(1), TWO) == after


def test_a_run_that_was_replaced_overtakes_nothing() -> None:
    state = control.begin_run(control.begin_job("job", 0), "host", 1, 0)
    claimed, _ = control.claim(state, RunId(1), kind=CheckpointKind.CHECKPOINT, name=None, now_ms=5)
    replaced = control.begin_run(claimed, "host", 2, 0)
    with pytest.raises(Fenced):
        overtake(replaced, RunId(1), ONE)
