"""The gate rule and the cut rule, one situation a test (P4, P5, P8, P9, P10)."""

from __future__ import annotations

from dataclasses import replace

from spark_abs.alignment.align import Advance, Blocked, Idle, Limits, Settled, decide, exceeds, waiting
from spark_abs.alignment.marker import Cancelled, Cut, Free, Nothing, emission
from spark_abs.model import NO_EPOCH, AttemptId, CheckpointId, RunId, Version
from tests.simulator.alignment import ROOMY, Alignment


def test_one_input_is_cut_at_the_barrier_at_once() -> None:
    """A single input needs no alignment (P8)."""
    stage = Alignment("a")
    stage.write("a", rows=3)  # before the barrier
    stage.write("a", rows=2, marker=1)  # the barrier stands after these rows
    stage.write("a", rows=9)  # after it
    assert stage.batch() == Cut(CheckpointId(1))


def test_a_batch_ends_at_the_barrier() -> None:
    """What is behind the barrier is not part of the cut (P5)."""
    stage = Alignment("a")
    stage.write("a", rows=1, marker=1)  # 1
    stage.write("a", rows=1)  # 2, after it
    stage.batch()
    assert [entry.version for entry in stage.unread(0)] == [2]


def test_an_input_at_the_barrier_waits_for_the_other() -> None:
    """The first input with the barrier is blocked until the second has it (P4)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", rows=5)  # may not be read yet
    stage.write("b", rows=1)  # before b's barrier
    stage.batch()
    assert stage.waiting() == {0: CheckpointId(1)}


def test_only_inputs_that_wait_hold_anything_up() -> None:
    """The last to arrive does not: when it is there, the alignment is over (P6)."""
    stage = Alignment("a", "b")
    settled = Settled(NO_EPOCH, frozenset())
    stage.write("a", marker=1)
    stage.batch()
    before = waiting(stage.positions, settled, stage.run)
    aborted = waiting(stage.positions, Settled(NO_EPOCH, frozenset((CheckpointId(1),))), stage.run)
    stage.write("b", marker=1)
    stage.batch()
    after = waiting(stage.positions, settled, stage.run)
    assert ([position.channel for position in before], aborted, after) == (["a"], (), ())


def test_an_alignment_is_given_up_past_its_limit_and_never_without_one() -> None:
    assert [exceeds(size, 100) for size in (0, 100, 101)] == [False, False, True]
    assert not exceeds(10**15, None)


def test_the_last_barrier_makes_the_cut() -> None:
    """The cut is the batch in which the last input arrives (P4)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.batch()  # a arrives
    stage.write("b", rows=1)
    stage.batch()  # b on its way
    stage.write("b", marker=1)
    stage.batch()  # b arrives
    assert stage.emitted == [Nothing(), Nothing(), Cut(CheckpointId(1))]


def test_data_behind_the_barrier_keeps_its_order() -> None:
    """What was held back is read first, in order, before what came later (P5)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)  # 1
    stage.write("a", rows=1)  # 2, held back
    stage.batch()
    stage.write("b", marker=1)
    stage.batch()  # the cut
    stage.write("a", rows=1)  # 3, newer
    stage.batch(Limits(max_entries=1, max_bytes=100))
    assert stage.positions[0].version == 2


def test_nothing_waits_when_one_input_falls_silent_at_the_barrier() -> None:
    """A and B at barrier n, A silent from then on, B goes on, no barrier follows: nothing waits."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("b", marker=1)
    stage.batch()  # the cut: both stand at it
    for _ in range(3):
        stage.write("b", rows=1)  # b goes on, a says no more
        stage.batch()
    assert (stage.waiting(), list(stage.unread(1))) == ({}, [])


def test_an_input_that_has_moved_past_the_barrier_has_it() -> None:
    """A stands at n, B has it and has read on: A may go on too."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("b", marker=1)
    stage.batch()
    stage.write("b", rows=1)
    stage.batch()  # b is past the barrier, a still stands at it
    stage.write("a", rows=1)
    assert isinstance(stage.decide(0), Advance)


def test_a_newer_id_subsumes() -> None:
    """B has skipped n for n+1: A is let go from n, and both align at n+1 (P8)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", rows=1, marker=2)
    stage.write("b", marker=2)  # never had 1
    assert stage.drain() == [Cancelled(CheckpointId(1)), Cut(CheckpointId(2))]


def test_a_newer_id_subsumes_before_it_has_come_everywhere() -> None:
    """B has skipped n for n+1: A does not wait at n for C, whatever C brings (P8)."""
    stage = Alignment("a", "b", "c")
    stage.write("a", marker=1)
    stage.write("b", marker=2)
    stage.batch()  # c has brought nothing yet
    assert stage.waiting() == {1: CheckpointId(2)}


def test_an_aborted_id_unblocks() -> None:
    """Who waits for a checkpoint that was aborted waits no more (P9)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.batch()  # a waits for b
    stage.aborted.add(CheckpointId(1))
    assert stage.waiting() == {}


def test_an_id_claimed_before_this_run_unblocks() -> None:
    """After a restart the outcome of all older ids is known."""
    stage = Alignment("a", "b", floor=1)
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.batch()
    assert stage.waiting() == {}


def test_what_is_known_of_outcomes_does_not_move_a_barrier() -> None:
    """The batch ends at an aborted barrier too: where cuts stand depends on the logs alone."""
    stage = Alignment("a")
    stage.aborted.add(CheckpointId(1))
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.batch()
    assert stage.positions[0].at_barrier


def test_a_cancel_marker_moves_the_epoch_and_stops_nothing() -> None:
    """The input counts as past the cancelled id, and is read on in the same batch (P9)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.batch()  # a waits
    stage.write("b", cancel=1)  # b's producer gave up on 1
    stage.write("b", rows=1)
    stage.batch()
    assert (stage.waiting(), list(stage.unread(1))) == ({}, [])


def test_a_cancelled_barrier_is_passed_on_as_cancelled() -> None:
    """A stage whose inputs all went past an id without a cut says so to the next (P9)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("b", cancel=1)
    assert stage.drain() == [Cancelled(CheckpointId(1))]


def test_a_barrier_behind_its_own_cancel_marker_is_ignored() -> None:
    """Later barriers of a cancelled id mean nothing (P9)."""
    stage = Alignment("a")
    stage.write("a", cancel=2)
    stage.write("a", marker=1)  # older than the epoch
    stage.write("a", marker=2)  # cancelled
    stage.batch()
    assert not stage.positions[0].at_barrier


def test_a_closed_input_counts() -> None:
    """A finished input lets the alignment complete without it (P10)."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.batch()  # a waits for b
    stage.write("b", rows=1)
    stage.write("b", end=True)  # b ends without the barrier
    assert (stage.batch(), stage.waiting()) == (Cut(CheckpointId(1)), {})


def test_an_input_that_closes_after_a_cut_does_not_repeat_it() -> None:
    """The last open input still stands at n when the other, long past n, ends: no second cut of n."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("b", marker=1)
    stage.batch()  # the cut of 1
    stage.write("b", rows=1)
    stage.batch()  # b is past it
    stage.write("b", end=True)
    assert stage.batch() == Nothing()


def test_a_closed_input_past_the_barrier_forbids_the_cut() -> None:
    """B skipped 1, took 2 and ended: what A has at 1 cannot be a cut of 1."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("b", rows=1, marker=2, end=True)
    assert stage.batch() == Cancelled(CheckpointId(1))


def test_a_closed_input_past_the_barrier_keeps_nobody_waiting() -> None:
    """B skipped 1, took 2 and ended: A need not wait until C has 1, there will be no cut of it (P8)."""
    stage = Alignment("a", "b", "c")
    stage.write("a", marker=1)
    stage.batch()
    before = stage.waiting()
    stage.write("b", marker=2, end=True)
    stage.batch()
    assert (before, stage.waiting()) == ({0: CheckpointId(1)}, {})


def test_a_stage_without_open_inputs_is_free() -> None:
    """It takes barriers like a source from then on (P10)."""
    stage = Alignment("a", "b")
    stage.write("a", end=True)
    stage.write("b", end=True)
    assert stage.batch() == Free()


def test_a_stage_without_channel_inputs_is_free() -> None:
    """A source is told of barriers by the coordinator."""
    assert emission((), (), RunId(1)) == Free()


def test_a_closed_input_is_not_read_on() -> None:
    """After the end marker of the present run there is nothing to read."""
    stage = Alignment("a")
    stage.write("a", end=True)
    stage.batch()
    stage.write("a", rows=1)
    assert stage.decide(0) == Idle(stage.positions[0])


def test_the_end_marker_of_an_older_run_closes_nothing() -> None:
    """An input that ended in an earlier run is open again, and is read on (P10)."""
    stage = Alignment("a", run=2)
    stage.write("a", end=True, run=1)
    stage.write("a", rows=1, run=2)
    stage.batch()
    assert (stage.positions[0].is_closed(RunId(2)), list(stage.unread(0))) == (False, [])


def test_a_frozen_run_that_reads_the_end_of_the_next_one_records_it() -> None:
    """Whose end it was is recorded: the run it belongs to finds its input closed."""
    stage = Alignment("a", run=1)
    stage.write("a", end=True, run=2)
    stage.batch()
    assert stage.positions[0].is_closed(RunId(2))


def test_a_channel_used_twice_gives_two_lines_that_align() -> None:
    """Both lines of a self-join read the same barrier; neither waits for itself (P4)."""
    stage = Alignment("a", "a")
    stage.write("a", rows=1, marker=1)
    stage.write("a", rows=1, marker=2)
    assert stage.drain() == [Cut(CheckpointId(1)), Cut(CheckpointId(2))]


def test_only_one_of_two_equal_lines_is_left_out() -> None:
    """A self-join at a barrier beside a third input that lacks it: both lines wait for that one."""
    stage = Alignment("a", "a", "b")
    stage.write("a", marker=1)
    stage.batch()
    assert stage.waiting() == {0: CheckpointId(1), 1: CheckpointId(1)}


def test_two_lines_of_a_channel_may_stand_apart() -> None:
    """One line of a self-join at the barrier waits for the other, which has not come so far."""
    stage = Alignment("a", "a")
    stage.write("a", rows=1)
    stage.write("a", marker=1)
    ahead = replace(stage.positions[0], version=Version(2), epoch=CheckpointId(1), at_barrier=True)
    stage.positions = (ahead, stage.positions[1])
    assert isinstance(stage.decide(0), Blocked)


def test_an_entry_is_never_split_and_one_always_fits() -> None:
    """An entry above the limit in bytes is taken alone."""
    stage = Alignment("a")
    stage.write("a", rows=50)  # 500 bytes
    stage.write("a", rows=1)
    stage.batch(Limits(max_entries=10, max_bytes=100))
    assert stage.positions[0].version == 1


def test_the_limits_end_a_batch_before_the_entry_that_exceeds_them() -> None:
    """The limit in bytes holds for what is taken together."""
    stage = Alignment("a")
    for _ in range(4):
        stage.write("a", rows=4)  # 40 bytes each
    stage.batch(Limits(max_entries=10, max_bytes=100))
    assert stage.positions[0].version == 2


def test_silent_entries_start_no_batch() -> None:
    """An entry without rows or marker is passed only together with a later one."""
    stage = Alignment("a")
    stage.write("a")
    stage.write("a")
    assert stage.batch() is None


def test_an_input_at_the_barrier_stays_at_it_before_silent_entries() -> None:
    """Silent entries after a barrier do not take the input away from it."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a")  # nothing in it
    stage.batch()
    stage.write("b", marker=1)
    assert stage.batch() == Cut(CheckpointId(1))


def test_a_batch_without_new_input_is_no_cut() -> None:
    """A timer batch leaves the positions where they are."""
    stage = Alignment("a")
    stage.write("a", marker=1)
    stage.batch()
    assert emission(stage.positions, stage.positions, stage.run) == Nothing()


def test_the_log_of_a_blocked_input_is_not_read() -> None:
    """Blocking costs nothing: the entries are not touched."""
    stage = Alignment("a", "b")
    stage.write("a", marker=1)
    stage.write("a", rows=1)
    stage.batch()
    unread, nothing = iter(stage.unread(0)), Settled(NO_EPOCH, frozenset())
    found = decide(
        stage.positions[0],
        stage.positions,
        unread,
        settled=nothing,
        limits=ROOMY,
        run=stage.run,
        attempt=AttemptId(1),
    )
    assert (found, len(list(unread))) == (Blocked(stage.positions[0], CheckpointId(1)), 1)


def test_deciding_again_gives_the_same_answer() -> None:
    """A gate that crashed decides as before: it has no memory."""
    stage = Alignment("a", "b")
    stage.write("a", rows=1, marker=1)
    stage.write("b", rows=1)
    assert stage.decide(0) == stage.decide(0)
