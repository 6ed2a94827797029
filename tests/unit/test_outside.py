"""Which rows go to a sink outside next, and where it stands after the job has gone back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_abs.model import AttemptId, Branch, CheckpointId, RunId, Version
from spark_abs.protocol.outside import (
    Epoch,
    Mark,
    Owner,
    asked_for,
    is_on,
    line_to,
    mark_after_rollback,
    may_miss,
    meeting,
    needed_from,
    next_batches,
    next_epochs,
    sent_behind,
    undone_from,
)


def mark(attempt: int, checkpoint: int, version: int) -> Mark:
    return Mark(AttemptId(attempt), CheckpointId(checkpoint), Version(version))


def path(*branches: tuple[int, int | None]) -> tuple[Branch, ...]:
    return tuple(Branch(AttemptId(a), None if until is None else Version(until)) for a, until in branches)


FIRST = path((1, None))
BACK = path((1, 20), (2, None))
"""The job was restored to the checkpoint whose cut was entry 20."""
CUTS = (mark(1, 1, 10), mark(1, 2, 20), mark(1, 3, 30), mark(2, 5, 45), mark(2, 6, 50))


def test_epochs_lie_between_the_cuts_of_the_path_in_their_order() -> None:
    found = next_epochs(mark(1, 0, 0), reversed(CUTS[:3]), FIRST)
    assert [(a.version, m.checkpoint) for a, m in found] == [(0, 1), (10, 2), (20, 3)]


def test_what_an_abandoned_attempt_completed_is_not_sent() -> None:
    found = next_epochs(mark(1, 1, 10), CUTS, BACK)
    assert [(a.version, m.version) for a, m in found] == [(10, 20), (20, 45), (45, 50)]


def test_what_was_sent_is_not_sent_again() -> None:
    assert next_epochs(mark(2, 6, 50), CUTS, BACK) == ()


def test_two_checkpoints_with_one_cut_are_one_epoch() -> None:
    """A savepoint that an edit made has the cut of its original."""
    found = next_epochs(mark(1, 1, 10), [mark(1, 2, 20), mark(1, 9, 20)], path((1, 20), (2, None)))
    assert [(a.version, m.version) for a, m in found] == [(10, 20)]


def entries(*found: tuple[int, int]) -> list[tuple[AttemptId, Version]]:
    return [(AttemptId(attempt), Version(version)) for attempt, version in found]


@pytest.mark.parametrize(
    ("sent", "way", "oldest", "missed"),
    [
        (mark(1, 1, 10), FIRST, 1, True),
        (mark(1, 1, 10), BACK, 1, True),  # up to entry 20
        (mark(1, 2, 20), BACK, 1, False),  # what is gone was abandoned
        (mark(1, 2, 20), BACK, 2, True),
        (mark(2, 0, 0), path((1, -1), (2, None)), 1, False),
        (mark(2, 0, 0), path((1, -1), (2, None)), 2, True),
    ],
)
def test_what_is_gone_is_missed_if_it_counts(
    sent: Mark, way: tuple[Branch, ...], oldest: int, missed: bool
) -> None:
    assert may_miss(way, sent, AttemptId(oldest)) == missed


def test_batches_are_sent_one_by_one_and_say_which_checkpoint_they_are_behind() -> None:
    found = next_batches(mark(1, 1, 10), entries((1, 9), (1, 12), (1, 20), (1, 23)), CUTS[:2], FIRST)
    assert [m for _, m in found] == [mark(1, 1, 12), mark(1, 2, 20), mark(1, 2, 23)]
    assert [a for a, _ in found] == [mark(1, 1, 10), mark(1, 1, 12), mark(1, 2, 20)]


def test_a_cut_without_rows_moves_the_mark_of_a_sink_that_takes_batches() -> None:
    assert [m for _, m in next_batches(mark(1, 1, 10), (), CUTS, FIRST)] == [mark(1, 2, 20), mark(1, 3, 30)]


def test_a_checkpoint_that_completes_behind_sent_batches_is_named_by_the_next() -> None:
    """Its cut was an entry like any other when that was sent."""
    assert [m for _, m in next_batches(mark(1, 1, 24), entries((1, 25)), CUTS[:2], FIRST)] == [mark(1, 2, 25)]


def test_batches_of_an_abandoned_attempt_are_not_sent() -> None:
    found = next_batches(mark(1, 1, 10), entries((1, 15), (1, 25), (2, 41), (2, 47)), CUTS[:3], BACK)
    assert [m for _, m in found] == [mark(1, 1, 15), mark(1, 2, 20), mark(2, 2, 41), mark(2, 2, 47)]


def test_batches_sent_behind_the_newest_checkpoint_are_taken_back_to_it() -> None:
    sent = mark(1, 2, 27)
    line = line_to(FIRST, sent)
    assert not is_on(BACK, sent)
    assert mark_after_rollback(sent, line, BACK, CUTS[:2]) == mark(1, 2, 20)
    assert sent_behind(mark(1, 2, 20), sent, line, CUTS[:2]) == ()
    assert sent_behind(mark(1, 1, 10), sent, line, CUTS[:2]) == (2,)


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        (mark(1, 2, 20), mark(1, 2, 20)),  # what was sent still counts
        (mark(1, 3, 30), mark(1, 2, 20)),  # it had gone on before the restore
        (mark(2, 5, 45), mark(2, 5, 45)),  # it went on after it
    ],
)
def test_a_sink_goes_back_to_where_its_past_leaves_the_path(sent: Mark, back: Mark) -> None:
    line = line_to(FIRST if sent.attempt == 1 else BACK, sent)
    assert mark_after_rollback(sent, line, BACK, CUTS) == back


def test_on_the_way_to_an_abandoned_branch_a_sink_goes_back_to_the_fork_and_not_to_the_target() -> None:
    """It has sent nothing of that branch: what lies between the fork and the target is sent from there."""
    sent, to = mark(2, 6, 50), path((1, 30), (3, None))
    back = mark_after_rollback(sent, line_to(BACK, sent), to, CUTS)
    assert back == mark(1, 2, 20)
    assert [m.version for _, m in next_epochs(back, CUTS, to)] == [30]


def test_a_sink_that_is_younger_than_the_checkpoint_begins_with_the_new_attempt() -> None:
    """The channel was not there at the cut: nothing before the new attempt counts in it."""
    sent, to = mark(1, 3, 30), path((1, -1), (2, None))
    assert mark_after_rollback(sent, line_to(FIRST, sent), to, CUTS) == mark(2, 0, 0)
    assert is_on(to, mark(2, 0, 0))


def test_the_epochs_behind_a_mark_are_named() -> None:
    sent = mark(1, 3, 30)
    assert sent_behind(mark(1, 1, 10), sent, line_to(FIRST, sent), CUTS) == (2, 3)
    assert sent_behind(mark(1, 1, 10), sent, line_to(FIRST, sent), CUTS[:1]) == (
        3,
    )  # the others were retired


def test_entries_that_only_an_abandoned_checkpoint_needs_stay_for_it() -> None:
    sent = mark(2, 6, 50)
    line = line_to(BACK, sent)
    assert needed_from(sent, line, [path((1, 20)), path((1, 20), (2, 45))]) == 50
    assert needed_from(sent, line, [path((1, 20), (2, 60))]) == 50
    assert needed_from(sent, line, [path((1, 30))]) == 20


def test_two_lines_with_nothing_in_common_meet_nowhere() -> None:
    assert meeting(path((1, -1), (2, 30)), path((1, -1), (3, None))) == mark(3, 0, 0)


def test_what_lies_behind_the_fork_to_a_kept_branch_may_be_undone_whatever_its_number() -> None:
    """Checkpoint 5 of attempt 2 is kept; one went on from checkpoint 3 of attempt 1, which is retired."""
    line = path((1, 30), (3, 70))
    assert undone_from(line, [path((1, 10), (2, 50)), path((1, 30), (3, 60))]) == 10
    assert undone_from(line, [path((1, 30), (3, 60)), path((1, 30), (3, 70))]) == 60
    assert undone_from(line, [path((1, -1))]) == 0
    assert undone_from(line, []) == 0


def test_a_restore_asks_for_the_cuts_of_kept_checkpoints_and_for_forks() -> None:
    line = path((1, 30), (3, 70))
    kept = [path((1, 30), (3, 60)), path((1, 10), (2, 50)), path((1, 10)), path((1, 30), (3, 80))]
    asked = asked_for(line, kept)
    assert asked == (10, 60, 70)
    epoch = Epoch(Owner("root", "job", "sink", RunId(1)), mark(3, 6, 70), mark(3, 7, 80), asked=asked)
    found = [v for v in range(0, 100, 10) if epoch.may_return_to(Version(v))]
    assert found == [10, 60, 70, 80, 90]
    assert replace(epoch, asked=(), floor=Version(20)).may_return_to(Version(30))
