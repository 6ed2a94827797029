"""From rows of history to the checkpoints of the page: outcomes, paths, and bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spark_abs.errors import AbortReason
from spark_abs.manifests.find import DamagedRow
from spark_abs.manifests.manifest_table import Summary
from spark_abs.model import (
    NO_ATTEMPT,
    AttemptId,
    Barrier,
    CheckpointId,
    CheckpointKind,
    RunId,
)
from spark_abs.protocol.attempt import Attempt
from spark_abs.protocol.control import Aborted, Claim, ControlState, begin_job
from spark_abs.report.model import Outcome
from spark_abs.report.timeline import Events

STATE = begin_job("shop", 0)


def row(event: str, at_ms: int, checkpoint: int | None = None, **columns: Any) -> dict[str, Any]:
    return {"event": event, "at_ms": at_ms, "checkpoint": checkpoint, "attempt": 1, "run": 1, **columns}


def summary(number: int, attempt: int = 1, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> Summary:
    return Summary(
        CheckpointId(number),
        AttemptId(attempt),
        RunId(1),
        "shop",
        kind=kind,
        name=None,
        triggered_ms=number * 100,
        acked_ms=number * 100 + 20,
        completed_ms=number * 100 + 30,
        size_full=9,
        size_new=3,
    )


def claimed(number: int, state: ControlState = STATE) -> ControlState:
    barrier = Barrier(CheckpointId(number), CheckpointKind.CHECKPOINT, 500)
    return replace(state, claims=(Claim(barrier, AttemptId(1), RunId(1)),))


def test_a_checkpoint_is_what_its_events_and_its_manifest_say() -> None:
    events = Events()
    events.add(
        [
            row("triggered", 100, 1, kind="checkpoint", mode="aligned"),
            row("overtaken", 110, 1, mode="unaligned", acks=1, stages=2),
            row("stage-acked", 120, 1, stage="a", duration_ms=20, start_delay_ms=4, size_full=5),
            row("completed", 130, 1, duration_ms=30, size_full=8, acks=2, stages=2, mode="unaligned"),
        ]
    )
    found = events.timeline(STATE, [summary(1)])
    (line,), (part,) = found.checkpoints, found.stages
    assert (line.outcome, line.triggered_ms, line.duration_ms, line.acks) == (Outcome.COMPLETED, 100, 30, 2)
    assert (line.mode, line.overtaken, line.stored, line.size_full) == ("unaligned", True, True, 9)
    assert (part.stage, part.acked, part.duration_ms, part.start_delay_ms) == ("a", True, 20, 4)


def test_an_abort_tells_how_far_its_stages_were() -> None:
    events = Events()
    events.add(
        [
            row("triggered", 100, 1),
            row("stage-waiting", 160, 1, stage="b", duration_ms=60, detail="batch 3 runs; password=hunter2"),
            row("aborted", 160, 1, reason="expired", detail="after 60 ms", duration_ms=60, acks=1, stages=2),
        ]
    )
    found = events.timeline(STATE, [])
    assert (found.checkpoints[0].outcome, found.checkpoints[0].reason) == (Outcome.ABORTED, "expired")
    assert (found.stages[0].acked, found.stages[0].detail) == (False, "batch 3 runs; password=***")


def test_a_checkpoint_without_an_outcome_is_open_only_while_it_is_claimed() -> None:
    events = Events()
    events.add([row("triggered", 100, 1), row("triggered", 500, 2)])
    ended = replace(claimed(2), aborted=(Aborted(CheckpointId(1), AbortReason.RUN_ENDED, "closed by run 2"),))
    first, second = events.timeline(ended, []).checkpoints
    assert (first.outcome, first.reason, first.detail) == (Outcome.ABORTED, "run-ended", "closed by run 2")
    assert second.outcome is Outcome.OPEN
    assert [line.outcome for line in events.timeline(STATE, []).checkpoints] == [Outcome.ABORTED] * 2


def test_a_claim_that_the_history_does_not_have_is_open() -> None:
    (line,) = Events().timeline(claimed(7), []).checkpoints
    assert (line.id, line.outcome, line.triggered_ms) == (7, Outcome.OPEN, 500)


def test_what_a_restore_went_back_over_is_abandoned_and_an_edit_is_not() -> None:
    back = Attempt(AttemptId(2), AttemptId(1), CheckpointId(2), plan="{}", ready=True, created_ms=1, root="")
    state = replace(STATE, attempts=(*STATE.attempts, back))
    edit = summary(5, attempt=NO_ATTEMPT, kind=CheckpointKind.SAVEPOINT)
    found = Events().timeline(state, [summary(1), summary(2), summary(3), summary(4, 2), edit])
    assert [(line.id, line.abandoned, line.edited) for line in found.checkpoints] == [
        (1, False, False),
        (2, False, False),
        (3, True, False),
        (4, False, False),
        (5, False, True),
    ]
    for line in found.checkpoints[:4]:
        assert line.attempt is not None
        assert line.abandoned is not state.on_path(line.attempt, line.id), "as the protocol has it"


def test_a_damaged_row_is_a_checkpoint_with_its_damage() -> None:
    damaged = DamagedRow(CheckpointId(3), "checkpoints/3.parquet", "cut short")
    (line,) = Events().timeline(STATE, [], [damaged]).checkpoints
    assert (line.id, line.damage, line.stored) == (3, "cut short", False)


def test_events_of_a_newer_version_are_left_out_and_others_keep_their_text() -> None:
    events = Events()
    events.add([row("teleported", 1), row("run-ended", 2, detail="stopped"), row("retired", 3, 1)])
    found = events.timeline(STATE, [])
    assert [(event.event, event.text) for event in found.events] == [("run-ended", "stopped")]
    assert found.checkpoints == ()


def test_the_newest_checkpoints_are_kept_and_the_earlier_are_counted() -> None:
    events = Events(most=3)
    events.add(row("completed", n * 10, n, duration_ms=1) for n in range(1, 11))
    found = events.timeline(STATE, [])
    assert ([line.id for line in found.checkpoints], found.earlier) == ([8, 9, 10], 7)


def test_of_stages_there_are_those_of_the_newest_checkpoints_and_of_aborts() -> None:
    """Whatever portions the rows come in, as a reader that follows the job has them."""
    rows = []
    for number in range(1, 41):
        rows += [row("stage-acked", number * 10, number, stage=stage, duration_ms=1) for stage in "abcd"]
        event = "aborted" if number in (3, 4, 20) else "completed"
        rows.append(row(event, number * 10 + 1, number, duration_ms=1, acks=4, stages=4))
    for portion in (len(rows), 5, 7):
        events = Events(most_rows=40)
        for begin in range(0, len(rows), portion):
            events.add(rows[begin : begin + portion])
        found = events.timeline(STATE, [])
        shown = sorted({part.checkpoint for part in found.stages})
        assert len(found.stages) <= 40
        assert {len([p for p in found.stages if p.checkpoint == number]) for number in shown} == {4}
        assert shown[-7:] == list(range(34, 41))
        assert 20 in shown, "an old abort is there, though newer completions are not"
