"""What `control/` allows: ids that only grow."""

from __future__ import annotations

import pytest

from spark_abs.errors import AbortReason
from spark_abs.model import CheckpointKind, RunId, RunKind
from spark_abs.protocol import control


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
