"""What `control/` allows: ids that only grow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_abs.errors import AbortReason, UsageError
from spark_abs.model import AttemptId, CheckpointId, CheckpointKind, RunId, RunKind, StageId
from spark_abs.protocol import control
from spark_abs.protocol.attempt_changes import begin_attempt


def test_an_id_is_above_every_id_that_was_ever_claimed() -> None:
    """Whatever became of those, and whichever run claims (P1)."""
    state, ids = control.begin_run(control.begin_job("job", 0), "here", 1, 0), []
    for number in range(6):
        state = control.begin_run(state, "here", 1, 0) if number == 3 else state
        assert state.run is not None
        state, barrier = control.claim(
            state, RunId(state.run.id), kind=CheckpointKind.CHECKPOINT, name=None, now_ms=0
        )
        ids.append(int(barrier.id))
        match number % 3:
            case 0:
                state = control.settle(state, completed=(barrier.id,))
            case 1:
                state = control.settle(state, aborted=(control.Aborted(barrier.id, AbortReason.EXPIRED),))
    assert ids == [1, 2, 3, 4, 5, 6]


def test_a_run_answers_what_an_earlier_run_was_asked() -> None:
    """It is not meant itself: a stop that nobody answered must not stop a run that began days later."""
    state = control.begin_run(control.begin_job("job", 0), "here", 1, 0)
    state = control.ask(state, control.Command("one", control.CommandKind.STOP, None, 0))
    edit = control.begin_run(state, "here", 1, 0, RunKind.EDIT)
    assert edit.commands == state.commands
    (command,) = control.begin_run(edit, "here", 1, 0).commands
    assert (command.answered, command.ok) == (True, False)
    assert (
        command.message == "the run that was asked ended before it answered, and run 3 has begun: "
        "repeat the request if it is still needed"
    )


@pytest.mark.parametrize(
    ("ends", "since"),
    [
        ([], 1),
        (["stopped"], 1),
        (["finished", "stopped, while a stage waits", "restored"], 1),
        ([None], 2),
        (["stopped", None, "finished"], 3),
        (["failed: Fenced: replaced", "finished", "finished"], 2),
        (["finished", "finished", "failed: a stage"], 4),
    ],
)
def test_from_which_run_on_all_have_ended_in_order(ends: list[str | None], since: int) -> None:
    """One that was killed, replaced or failed may still be at work somewhere."""
    state = control.begin_job("job", 0)
    for number, how in enumerate(ends, 1):
        state = control.begin_run(state, "here", 1, 0)
        state = state if how is None else control.end_run(state, RunId(number), how)
    state = control.begin_run(state, "here", 1, 0)
    assert control.in_order_since(state, state.runs[-1].id) == since


CLICKS, ORDERS = StageId("clicks"), StageId("orders")


def test_a_skipped_file_stays_skipped_over_runs_and_restores() -> None:
    state = control.begin_run(control.begin_job("job", 0), "here", 1, 0)
    one = control.SkippedFile(CLICKS, "file:///in/1", "ann@desk", 5, RunId(2))
    state = control.skip(state, [one, replace(one, file="file:///in/2")])
    state = control.begin_run(state, "here", 1, 10)
    state = begin_attempt(
        state, AttemptId(1), checkpoint=CheckpointId(1), plan="", host="here", pid=1, now_ms=20
    )
    state = control.skip(state, [replace(one, by="bob@desk"), replace(one, stage=ORDERS)])
    assert [(each.stage, each.file, each.by) for each in state.skipped] == [
        ("clicks", "file:///in/1", "ann@desk"),
        ("clicks", "file:///in/2", "ann@desk"),
        ("orders", "file:///in/1", "ann@desk"),
    ]


def test_a_pause_holds_over_runs_and_restores_until_it_is_resumed() -> None:
    state = control.begin_run(control.begin_job("job", 0), "here", 1, 0)
    state = control.pause(state, [CLICKS, ORDERS], "ann@desk", 5)
    state = control.pause(state, [CLICKS], "bob@desk", 9)
    state = control.begin_run(state, "here", 1, 10)
    state = begin_attempt(
        state, AttemptId(1), checkpoint=CheckpointId(1), plan="", host="here", pid=1, now_ms=20
    )
    assert [(one.stage, one.by, one.at_ms) for one in state.paused] == [
        ("clicks", "ann@desk", 5),
        ("orders", "ann@desk", 5),
    ]
    assert control.paused_of(state, [ORDERS]) == (ORDERS,)
    assert control.paused_of(state, []) == (CLICKS, ORDERS)
    state = control.resume(state, [CLICKS])
    with pytest.raises(UsageError, match="source 'clicks' is not paused; paused are: orders"):
        control.paused_of(state, [CLICKS])
    assert control.resume(state, [ORDERS]).paused == ()
