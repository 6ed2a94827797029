"""The coordinator: events in, effects out (P2, P3, P13, P15)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from spark_abs.errors import AbortReason
from spark_abs.manifest import StageSnapshot
from spark_abs.model import Barrier, BatchId, CheckpointId, CheckpointKind, CheckpointMode, StageId
from spark_abs.protocol.coordinator import (
    Coordinator,
)
from spark_abs.protocol.messages import (
    Abort,
    AckAnswer,
    Acked,
    AckResult,
    Answer,
    CancelRequested,
    Claim,
    Claimed,
    Complete,
    Decided,
    Declined,
    Discard,
    Effect,
    FailJob,
    Joined,
    Left,
    Notify,
    Overtake,
    Requested,
    Skipped,
    StatusChanged,
    Tick,
)
from spark_abs.protocol.trigger import (
    Request,
    RunStatus,
    TriggerSettings,
)

ONE, TWO = CheckpointId(1), CheckpointId(2)
PLAIN = CheckpointKind.CHECKPOINT
STOP = CheckpointKind.SYNC_SAVEPOINT
SAVEPOINT = Request("r1", CheckpointKind.SAVEPOINT, "mine")
ASKED = Request("r0", PLAIN)
SETTINGS = TriggerSettings(interval_ms=100, min_pause_ms=0, timeout_ms=1_000)


def running(*stages: str) -> Coordinator:
    """A coordinator of a running job, at time 0."""
    coordinator = Coordinator((StageId(s) for s in stages or ("a", "b")), lambda: SETTINGS)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    return coordinator


def with_settings(settings: TriggerSettings, *stages: str) -> Coordinator:
    """The same with other settings."""
    coordinator = Coordinator((StageId(s) for s in stages or ("a",)), lambda: settings)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    return coordinator


def claimed(number: int, now_ms: int = 100, kind: CheckpointKind = PLAIN, ask: str | None = None) -> Claimed:
    return Claimed(now_ms, Barrier(CheckpointId(number), kind, now_ms), ask)


def snapshot(stage: str) -> StageSnapshot:
    return StageSnapshot(StageId(stage), BatchId(0))


def acked(number: int, stage: str, now_ms: int = 110) -> Acked:
    return Acked(now_ms, CheckpointId(number), snapshot(stage))


def only(kind: type[Effect], effects: Iterable[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_it_claims_an_id_when_the_interval_is_over() -> None:
    assert running().handle(Tick(100)) == (Claim(PLAIN, None, None),)


def taken(coordinator: Coordinator, number: int, now_ms: int, *stages: str) -> None:
    """Take a checkpoint to its end."""
    coordinator.handle(claimed(number, now_ms))
    for stage in stages or ("a", "b"):
        coordinator.handle(acked(number, stage, now_ms))
    coordinator.handle(Decided(now_ms, CheckpointId(number), True))


BOTH = (snapshot("a"), snapshot("b"))


def test_a_periodic_checkpoint_is_not_taken_if_every_stage_stands_at_its_cut() -> None:
    """The next interval begins with the one that is skipped; whoever asks for one gets it."""
    coordinator = running()
    assert coordinator.handle(Tick(100)) == (Claim(PLAIN, None, None),), "the first of a run is taken"
    taken(coordinator, 1, 100)
    for due in (200, 300):
        assert coordinator.handle(Tick(due)) == (Claim(PLAIN, None, None, unless=BOTH),)
        assert coordinator.handle(Skipped(due)) == ()
        assert coordinator.handle(Tick(due + 99)) == ()
    assert coordinator.pending == ()
    assert coordinator.handle(Requested(399, ASKED)) == (Claim(PLAIN, None, "r0"),)


def test_a_savepoint_is_taken_of_a_job_that_has_done_nothing_and_counts_for_no_checkpoint() -> None:
    """Its user may delete it: what comes after it is compared with the checkpoint before it."""
    coordinator = running()
    taken(coordinator, 1, 100)
    claim = Claim(CheckpointKind.SAVEPOINT, "mine", "r1")
    assert coordinator.handle(Requested(150, SAVEPOINT)) == (claim,)
    coordinator.handle(claimed(2, 150, CheckpointKind.SAVEPOINT, "r1"))
    for stage in ("a", "b"):
        coordinator.handle(Acked(160, TWO, StageSnapshot(StageId(stage), BatchId(9))))
    coordinator.handle(Decided(170, TWO, True))
    assert coordinator.handle(Tick(260)) == (Claim(PLAIN, None, None, unless=BOTH),)


def test_a_checkpoint_after_a_failure_is_taken_in_any_case() -> None:
    """Bytes of the one before may be what is missing."""
    coordinator = running()
    taken(coordinator, 1, 100)
    coordinator.handle(claimed(2, 200))
    coordinator.handle(Declined(210, TWO, StageId("a"), AbortReason.DECLINED, "no room"))
    effects = coordinator.handle(Decided(220, TWO, False, AbortReason.DECLINED))
    assert only(Claim, effects) == [Claim(PLAIN, None, None)]


@pytest.mark.parametrize(
    ("event", "stages"),
    [(Joined(150, StageId("c")), ("a", "b", "c")), (Left(150, StageId("b")), ("a",)), (Tick(150), ())],
)
def test_a_checkpoint_of_other_stages_or_of_another_mode_is_taken(
    event: Joined | Left | Tick, stages: tuple[str, ...]
) -> None:
    now = SETTINGS
    coordinator = Coordinator((StageId("a"), StageId("b")), lambda: now)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    taken(coordinator, 1, 100)
    coordinator.handle(event)
    if not stages:
        now = replace(SETTINGS, mode=CheckpointMode.UNALIGNED)
    (claim,) = coordinator.handle(Tick(200))
    assert isinstance(claim, Claim)
    assert (claim.unless, claim.mode) == ((), now.mode)
    coordinator.handle(Claimed(200, Barrier(TWO, PLAIN, 200, mode=now.mode), None))
    for stage in stages or ("a", "b"):
        coordinator.handle(acked(2, stage, 200))
    coordinator.handle(Decided(200, TWO, True))
    (claim,) = coordinator.handle(Tick(300))
    assert isinstance(claim, Claim)
    assert [cut.stage for cut in claim.unless] == list(stages or ("a", "b"))


def test_no_checkpoint_is_skipped_while_one_is_open_or_if_the_settings_say_so() -> None:
    coordinator = with_settings(replace(SETTINGS, max_concurrent=2), "a")
    taken(coordinator, 1, 100, "a")
    assert coordinator.handle(claimed(2, 200)) == (Claim(PLAIN, None, None),), "the third, beside the second"
    beating = with_settings(replace(SETTINGS, skip_unchanged=False), "a")
    taken(beating, 1, 100, "a")
    assert beating.handle(Tick(200)) == (Claim(PLAIN, None, None),)


def test_a_claim_in_flight_counts_as_open() -> None:
    coordinator = running()
    coordinator.handle(Tick(100))  # claims
    assert coordinator.handle(Tick(900)) == ()


def test_it_completes_with_the_last_acknowledgement() -> None:
    """Only when all stages have acknowledged, and with all their snapshots (P13)."""
    coordinator = running()
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "b"))
    effects = coordinator.handle(acked(1, "a"))
    assert effects == (
        AckAnswer(ONE, StageId("a"), AckResult.SUCCESS),
        Complete(ONE, (snapshot("a"), snapshot("b"))),
    )


def test_a_checkpoint_has_the_mode_of_the_settings_and_a_savepoint_is_aligned() -> None:
    settings = replace(SETTINGS, mode=CheckpointMode.UNALIGNED)
    coordinator = Coordinator([StageId("a")], lambda: settings)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    assert coordinator.handle(Requested(5, SAVEPOINT)) == (Claim(SAVEPOINT.kind, "mine", "r1"),)
    coordinator.handle(claimed(1, 10, SAVEPOINT.kind, "r1"))
    coordinator.handle(acked(1, "a"))
    effects = coordinator.handle(Decided(120, ONE, True))
    assert only(Claim, effects) == [Claim(PLAIN, None, None, CheckpointMode.UNALIGNED)]


def test_an_aligned_checkpoint_that_takes_too_long_becomes_unaligned_once() -> None:
    """A savepoint stays aligned, and so does what has its verdict (P16)."""
    settings = replace(SETTINGS, aligned_timeout_ms=50)
    coordinator = Coordinator([StageId("a")], lambda: settings)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    coordinator.handle(claimed(1, 100))
    assert coordinator.handle(Tick(149)) == ()
    assert coordinator.handle(Tick(150)) == (Overtake(ONE),)
    assert coordinator.pending[0].barrier.mode is CheckpointMode.UNALIGNED
    assert coordinator.handle(Tick(151)) == ()


def test_a_savepoint_stays_aligned_however_long_it_takes() -> None:
    settings = replace(SETTINGS, aligned_timeout_ms=50)
    coordinator = Coordinator([StageId("a")], lambda: settings)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    coordinator.handle(claimed(1, 100, SAVEPOINT.kind, "r1"))
    assert coordinator.handle(Tick(500)) == ()


def test_a_second_acknowledgement_is_a_duplicate() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    assert coordinator.handle(acked(1, "a")) == (AckAnswer(ONE, StageId("a"), AckResult.DUPLICATE),)


def test_an_acknowledgement_after_completion_is_a_duplicate() -> None:
    """A stage that did not hear the answer asks again, and its handle is not released."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    coordinator.handle(Decided(120, ONE, True))
    assert coordinator.handle(acked(1, "a", 130)) == (AckAnswer(ONE, StageId("a"), AckResult.DUPLICATE),)


def test_an_acknowledgement_after_the_abort_is_discarded() -> None:
    """Its handle is released (P13)."""
    coordinator = running()
    coordinator.handle(claimed(1))
    coordinator.handle(Declined(105, ONE, StageId("b"), AbortReason.DECLINED, "disk full"))
    coordinator.handle(Decided(106, ONE, False, AbortReason.DECLINED))
    assert coordinator.handle(acked(1, "a")) == (
        AckAnswer(ONE, StageId("a"), AckResult.DISCARDED),
        Discard(ONE),
    )


def test_an_acknowledgement_of_nothing_is_unknown() -> None:
    assert running().handle(acked(7, "a", 1))[0] == AckAnswer(
        CheckpointId(7), StageId("a"), AckResult.UNKNOWN
    )


def test_a_stage_that_the_job_has_not_is_unknown() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    assert coordinator.handle(acked(1, "z")) == (AckAnswer(ONE, StageId("z"), AckResult.UNKNOWN),)


def test_a_late_acknowledgement_of_a_stage_that_has_left_takes_nothing_from_the_others() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    coordinator.handle(Joined(105, StageId("z")))
    coordinator.handle(Left(106, StageId("z")))
    late = coordinator.handle(acked(1, "z"))
    assert late == (AckAnswer(ONE, StageId("z"), AckResult.UNKNOWN),)
    assert coordinator.handle(acked(1, "b"))[-1] == Complete(ONE, (snapshot("a"), snapshot("b")))


def test_a_decline_aborts_once() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    no = Declined(105, ONE, StageId("b"), AbortReason.DECLINED, "disk full")
    assert (coordinator.handle(no), coordinator.handle(no)) == (
        (Abort(ONE, AbortReason.DECLINED, "stage b: disk full"),),
        (),
    )


def test_a_late_checkpoint_is_aborted() -> None:
    """It says who was missing (P3)."""
    coordinator = running()
    coordinator.handle(claimed(1, 100))
    coordinator.handle(acked(1, "a"))
    assert coordinator.handle(Tick(1_100)) == (Abort(ONE, AbortReason.EXPIRED, "after 1000 ms without b"),)


def test_a_complete_checkpoint_does_not_expire_while_its_manifest_is_committed() -> None:
    coordinator = running("a")
    coordinator.handle(claimed(1, 100))
    coordinator.handle(acked(1, "a"))  # the manifest is on its way
    assert coordinator.handle(Tick(5_000)) == ()


def test_stages_hear_of_the_outcome_once() -> None:
    """Twice told, once passed on (P15)."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    told = Decided(120, ONE, True)
    assert (coordinator.handle(told), coordinator.handle(told)) == ((Notify(ONE, True),), ())


def test_a_manifest_that_cannot_be_committed_is_an_abort() -> None:
    """What is durable counts, not what was asked for."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    found = coordinator.handle(Decided(120, ONE, False, AbortReason.STATE_MISSING))
    assert found == (Notify(ONE, False),)


def test_verdicts_leave_in_id_order() -> None:
    """The younger is complete first: the older is subsumed, and its abort becomes durable first."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    coordinator.handle(claimed(2))
    first = coordinator.handle(acked(2, "a"))
    then = coordinator.handle(Decided(120, ONE, False, AbortReason.SUBSUMED))
    assert (only(Abort, first), only(Complete, first), only(Complete, then)) == (
        [Abort(ONE, AbortReason.SUBSUMED, "checkpoint 2 is complete")],
        [],
        [Complete(TWO, (snapshot("a"),))],
    )


def test_a_request_is_claimed_at_once_and_answered_when_durable() -> None:
    coordinator = running("a")
    begun = coordinator.handle(Requested(5, SAVEPOINT))
    coordinator.handle(claimed(1, 6, SAVEPOINT.kind, "r1"))
    coordinator.handle(acked(1, "a"))
    done = coordinator.handle(Decided(120, ONE, True))
    assert (begun, only(Answer, done)) == (
        (Claim(SAVEPOINT.kind, "mine", "r1"),),
        [Answer("r1", ONE, True, "completed")],
    )


def test_a_requested_checkpoint_waits_for_the_open_one() -> None:
    coordinator = running("a")
    coordinator.handle(claimed(1))
    waits = coordinator.handle(Requested(105, ASKED))
    coordinator.handle(acked(1, "a"))
    then = coordinator.handle(Decided(120, ONE, True))
    assert (waits, only(Claim, then)) == ((), [Claim(PLAIN, None, "r0")])


def test_a_savepoint_does_not_wait_for_the_open_checkpoint() -> None:
    """As with Flink's forced requests; one claim at a time all the same."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    begun = coordinator.handle(Requested(105, SAVEPOINT))
    waits = coordinator.handle(Requested(106, Request("r3", CheckpointKind.SAVEPOINT, "other")))
    then = coordinator.handle(claimed(2, 107, SAVEPOINT.kind, "r1"))
    assert (begun, waits, only(Claim, then)) == (
        (Claim(SAVEPOINT.kind, "mine", "r1"),),
        (),
        [Claim(SAVEPOINT.kind, "other", "r3")],
    )


def test_as_many_are_open_as_the_settings_allow() -> None:
    """Each an interval after the one before; the third waits until the first is decided."""
    coordinator = with_settings(replace(SETTINGS, max_concurrent=2))
    begun = []
    for now_ms in (100, 200, 300):
        begun.append(bool(only(Claim, coordinator.handle(Tick(now_ms)))))
        if begun[-1]:
            coordinator.handle(claimed(len(begun), now_ms))
    coordinator.handle(acked(1, "a", 310))
    then = coordinator.handle(Decided(320, ONE, True))
    assert (begun, only(Claim, then)) == ([True, True, False], [Claim(PLAIN, None, None)])


def test_several_that_are_open_complete_in_id_order() -> None:
    """The manifest of the second leaves when the first is durable."""
    coordinator = with_settings(replace(SETTINGS, max_concurrent=2), "a", "b")
    for number in (1, 2):
        coordinator.handle(claimed(number))
    found = [effect for stage in "ab" for n in (1, 2) for effect in coordinator.handle(acked(n, stage))]
    then = coordinator.handle(Decided(120, ONE, True))
    both = (snapshot("a"), snapshot("b"))
    assert (only(Complete, found), only(Complete, then)) == ([Complete(ONE, both)], [Complete(TWO, both)])
    assert only(Abort, found) == []


def test_a_savepoint_is_never_subsumed() -> None:
    """The younger checkpoint is complete and waits for its outcome; the older checkpoint is given up (P8)."""
    coordinator = with_settings(replace(SETTINGS, max_concurrent=3))
    three = CheckpointId(3)
    coordinator.handle(claimed(1))
    coordinator.handle(claimed(2, 101, SAVEPOINT.kind, "r1"))
    coordinator.handle(claimed(3, 102))
    first = coordinator.handle(acked(3, "a"))
    assert first[1:] == (Abort(ONE, AbortReason.SUBSUMED, "checkpoint 3 is complete"),)
    assert only(Complete, coordinator.handle(Decided(120, ONE, False, AbortReason.SUBSUMED))) == []
    assert only(Complete, coordinator.handle(acked(2, "a"))) == [Complete(TWO, (snapshot("a"),))]
    then = coordinator.handle(Decided(130, TWO, True))
    assert only(Complete, then) == [Complete(three, (snapshot("a"),))]


def test_a_savepoint_subsumes_nothing_unless_the_job_ends_with_it() -> None:
    """As in Flink: only what a job goes back to makes older checkpoints needless."""
    given_up = []
    for kind in (CheckpointKind.SAVEPOINT, STOP):
        coordinator = running("a")
        coordinator.handle(claimed(1))
        coordinator.handle(claimed(2, 101, kind, "r1"))
        given_up.append(bool(only(Abort, coordinator.handle(acked(2, "a")))))
    assert given_up == [False, True]


def test_nothing_begins_behind_an_open_savepoint_with_which_the_job_ends() -> None:
    """Not even another savepoint, however many may be open (P21)."""
    coordinator = with_settings(replace(SETTINGS, max_concurrent=9))
    coordinator.handle(claimed(1, 6, STOP, "r2"))
    assert (coordinator.handle(Tick(900)), coordinator.handle(Requested(901, SAVEPOINT))) == ((), ())


def test_a_request_that_comes_twice_takes_one_savepoint() -> None:
    coordinator = running("a")
    coordinator.handle(Requested(5, SAVEPOINT))  # claims
    coordinator.handle(claimed(1, 6, SAVEPOINT.kind, "r1"))
    while_open = coordinator.handle(Requested(7, SAVEPOINT))
    coordinator.handle(acked(1, "a", 8))
    coordinator.handle(Decided(9, ONE, True))
    afterwards = coordinator.handle(Requested(10, SAVEPOINT))
    assert (while_open, afterwards) == ((), (Answer("r1", ONE, True, "completed"),))


def test_a_failed_request_is_told_why() -> None:
    coordinator = running("a")
    coordinator.handle(claimed(1, 6, SAVEPOINT.kind, "r1"))
    coordinator.handle(Declined(7, ONE, StageId("a"), AbortReason.DECLINED, "disk full"))
    done = coordinator.handle(Decided(8, ONE, False, AbortReason.DECLINED))
    assert only(Answer, done) == [Answer("r1", ONE, False, "aborted: declined, stage a: disk full")]


def test_stopping_aborts_what_is_open() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    found = coordinator.handle(StatusChanged(120, RunStatus.STOPPING))
    assert found == (Abort(ONE, AbortReason.JOB_STOPPING, "the job is stopping"),)


def test_stopping_spares_its_own_savepoint() -> None:
    coordinator = running()
    coordinator.handle(claimed(1, 100, STOP, "r2"))
    assert coordinator.handle(StatusChanged(120, RunStatus.STOPPING)) == ()


def test_while_a_loop_ends_what_is_open_completes_and_what_is_asked_for_waits() -> None:
    coordinator = running("a")
    coordinator.handle(claimed(1))
    assert coordinator.handle(StatusChanged(120, RunStatus.ENDING)) == ()
    assert coordinator.handle(Requested(120, SAVEPOINT)) == ()
    assert only(Complete, coordinator.handle(acked(1, "a", 130)))
    assert coordinator.handle(Decided(140, ONE, True)) == (Notify(ONE, True),)
    assert coordinator.handle(StatusChanged(900, RunStatus.RUNNING)) == (Claim(SAVEPOINT.kind, "mine", "r1"),)


def test_a_claim_that_comes_back_after_the_stop_is_aborted() -> None:
    coordinator = running()
    coordinator.handle(Tick(100))  # the claim leaves
    coordinator.handle(StatusChanged(110, RunStatus.STOPPING))
    assert only(Abort, coordinator.handle(claimed(1, 120))) == [
        Abort(ONE, AbortReason.JOB_STOPPING, "the job is stopping")
    ]


def test_a_failed_stage_aborts_what_is_open() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    found = coordinator.handle(StatusChanged(120, RunStatus.FAILED))
    assert found == (Abort(ONE, AbortReason.STAGE_FAILED, "the job is failed"),)


def test_whoever_asks_something_of_a_failing_job_hears_why() -> None:
    why = "stage 'a' failed in batch 3: OSError: no route"
    coordinator = running()
    coordinator.handle(StatusChanged(3, RunStatus.RUNNING, f"{why}, and is started again after 9 ms"))
    coordinator.handle(Requested(5, SAVEPOINT))
    coordinator.handle(claimed(1, 6, SAVEPOINT.kind, "r1"))
    coordinator.handle(Declined(7, ONE, StageId("b"), AbortReason.DECLINED, "disk full"))
    done = coordinator.handle(Decided(8, ONE, False, AbortReason.DECLINED))
    heard = f"aborted: declined, stage b: disk full; {why}, and is started again after 9 ms"
    assert only(Answer, done) == [Answer("r1", ONE, False, heard)]

    coordinator.handle(claimed(2, 9))
    found = coordinator.handle(StatusChanged(10, RunStatus.FAILED, why))
    assert found == (Abort(CheckpointId(2), AbortReason.STAGE_FAILED, f"the job is failed: {why}"),)
    again = coordinator.handle(Requested(11, Request("r3", CheckpointKind.SAVEPOINT, "again")))
    assert only(Answer, again) == [Answer("r3", None, False, f"the job is failed: {why}")]


def test_requests_to_a_job_that_ended_are_refused() -> None:
    coordinator = running()
    coordinator.handle(StatusChanged(10, RunStatus.FINISHED))
    assert coordinator.handle(Requested(11, SAVEPOINT)) == (Answer("r1", None, False, "the job is finished"),)


def test_nothing_begins_after_the_savepoint_that_ends_the_job() -> None:
    """Whether or not the job has been told to stop by then (P21)."""
    coordinator = running("a")
    coordinator.handle(claimed(1, 6, STOP, "r2"))
    coordinator.handle(acked(1, "a"))
    coordinator.handle(Decided(120, ONE, True))
    assert coordinator.handle(Tick(100_000)) == ()


def test_a_new_coordinator_completes_what_the_old_one_had_begun() -> None:
    """Told of the claim again, it counts the acknowledgements that come again."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    heir = running("a")
    heir.handle(claimed(1))
    assert only(Complete, heir.handle(acked(1, "a"))) == [Complete(ONE, (snapshot("a"),))]


def test_settings_are_read_at_every_decision() -> None:
    settings = [TriggerSettings(interval_ms=1_000, min_pause_ms=0, timeout_ms=1_000)]
    coordinator = Coordinator([StageId("a")], lambda: settings[-1])
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    before = coordinator.handle(Tick(100))
    settings.append(SETTINGS)  # the interval is 100 ms now
    assert (before, coordinator.handle(Tick(101))) == ((), (Claim(PLAIN, None, None),))


def test_of_two_savepoints_of_one_name_the_second_is_refused() -> None:
    """While the first waits, is claimed, is open and is complete; an aborted one leaves its name free."""
    refused = "a savepoint 'mine' exists already or is being taken: choose a different name"

    def again(coordinator: Coordinator, number: int) -> bool:
        request = Request(f"again {number}", CheckpointKind.SAVEPOINT, "mine")
        effects = coordinator.handle(Requested(100, request))
        return Answer(request.id, None, False, refused) in effects

    for completed in (True, False):
        coordinator = running("a")
        coordinator.handle(claimed(1))
        coordinator.handle(Requested(50, SAVEPOINT))  # waits for checkpoint 1
        told = [again(coordinator, 1)]
        coordinator.handle(Decided(51, ONE, False, AbortReason.DECLINED))  # claims
        told.append(again(coordinator, 2))
        coordinator.handle(Claimed(52, Barrier(TWO, CheckpointKind.SAVEPOINT, 52, "mine"), "r1"))
        told.append(again(coordinator, 3))
        coordinator.handle(Decided(53, TWO, completed, None))
        assert [*told, again(coordinator, 4)] == [True, True, True, completed]


def failed(
    coordinator: Coordinator, number: int, now_ms: int, request: Request | None = None
) -> list[Effect]:
    """Let a checkpoint begin and be declined; return the effects of its outcome."""
    coordinator.handle(Tick(now_ms) if request is None else Requested(now_ms, request))
    kind, ask = (PLAIN, None) if request is None else (request.kind, request.id)
    coordinator.handle(claimed(number, now_ms, kind, ask))
    declined = AbortReason.DECLINED
    coordinator.handle(Declined(now_ms, CheckpointId(number), StageId("a"), declined, "no room"))
    return list(coordinator.handle(Decided(now_ms, CheckpointId(number), False, declined)))


def completed(coordinator: Coordinator, number: int, now_ms: int) -> list[Effect]:
    coordinator.handle(Tick(now_ms))
    coordinator.handle(claimed(number, now_ms))
    for stage in ("a", "b"):
        coordinator.handle(acked(number, stage, now_ms))
    return list(coordinator.handle(Decided(now_ms, CheckpointId(number), True)))


def tolerating(failures: int | None) -> Coordinator:
    settings = TriggerSettings(interval_ms=100, min_pause_ms=0, timeout_ms=1_000, tolerated_failures=failures)
    coordinator = Coordinator((StageId("a"), StageId("b")), lambda: settings)
    coordinator.handle(StatusChanged(0, RunStatus.RUNNING))
    return coordinator


def verdicts(effects: Iterable[Effect]) -> list[FailJob]:
    return [effect for effect in effects if isinstance(effect, FailJob)]


def test_one_failure_in_a_row_more_than_tolerated_fails_the_job_with_every_reason() -> None:
    coordinator = tolerating(1)
    assert verdicts(failed(coordinator, 1, 100)) == []
    (verdict,) = verdicts(failed(coordinator, 2, 200))
    assert verdict.message == (
        "2 checkpoints have failed in a row, 1 are tolerated\n"
        "checkpoint 1: declined, stage a: no room\ncheckpoint 2: declined, stage a: no room"
    )


def test_a_completed_checkpoint_makes_failures_forgotten() -> None:
    coordinator = tolerating(1)
    assert verdicts(failed(coordinator, 1, 100)) == []
    assert verdicts(completed(coordinator, 2, 200)) == []
    assert verdicts(failed(coordinator, 3, 300)) == []
    assert len(verdicts(failed(coordinator, 4, 400))) == 1


def test_failed_savepoints_and_checkpoints_that_nobody_wants_do_not_count() -> None:
    coordinator = tolerating(0)
    assert verdicts(failed(coordinator, 1, 10, SAVEPOINT)) == []
    coordinator.handle(Tick(110))
    coordinator.handle(claimed(2, 110))
    coordinator.handle(StatusChanged(120, RunStatus.STOPPING))
    assert verdicts(coordinator.handle(Decided(120, TWO, False, AbortReason.JOB_STOPPING))) == []


def test_any_number_of_failures_is_tolerated_by_default() -> None:
    coordinator = tolerating(None)
    assert [verdicts(failed(coordinator, n, 100 * n)) for n in range(1, 9)] == [[]] * 8


def test_an_expired_checkpoint_counts_as_a_failure() -> None:
    coordinator = tolerating(0)
    coordinator.handle(Tick(100))
    coordinator.handle(claimed(1, 100))
    assert coordinator.handle(Tick(1_100)) == (Abort(ONE, AbortReason.EXPIRED, "after 1000 ms without a, b"),)
    (verdict,) = verdicts(coordinator.handle(Decided(1_100, ONE, False, AbortReason.EXPIRED)))
    assert "checkpoint 1: expired, after 1000 ms without a, b" in verdict.message


def test_a_stage_that_has_left_is_waited_for_no_more() -> None:
    """Also by what is open; what it has acknowledged before stays."""
    coordinator = running()
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    assert coordinator.handle(Left(120, StageId("b"))) == (Complete(ONE, (snapshot("a"),)),)
    coordinator.handle(Decided(130, ONE, True))
    coordinator.handle(claimed(2, 200))
    assert only(Complete, coordinator.handle(acked(2, "a", 210))) == [Complete(TWO, (snapshot("a"),))]


def cancel(which: str, request: str = "c1") -> CancelRequested:
    return CancelRequested(105, request, which, "ann@desk")


def test_a_cancelled_checkpoint_is_aborted_and_the_abort_answers() -> None:
    """Two who ask are both answered, and a request that comes twice is answered once."""
    coordinator = running()
    coordinator.handle(claimed(1))
    assert coordinator.handle(cancel("1")) == (Abort(ONE, AbortReason.CANCELLED, "by ann@desk"),)
    assert coordinator.handle(cancel("1")) == coordinator.handle(cancel("1", "c2")) == ()
    effects = coordinator.handle(Decided(120, ONE, False, AbortReason.CANCELLED))
    said = "checkpoint 1 is cancelled"
    assert only(Answer, effects) == [Answer("c1", ONE, True, said), Answer("c2", ONE, True, said)]
    assert coordinator.handle(cancel("1")) == (Answer("c1", ONE, True, said),)


def test_a_savepoint_is_cancelled_by_its_name_and_who_took_it_is_told() -> None:
    coordinator = running()
    coordinator.handle(Requested(100, SAVEPOINT))
    coordinator.handle(Claimed(100, Barrier(ONE, CheckpointKind.SAVEPOINT, 100, "mine"), "r1"))
    (verdict,) = coordinator.handle(cancel("mine"))
    assert verdict == Abort(ONE, AbortReason.CANCELLED, "by ann@desk")
    answers = only(Answer, coordinator.handle(Decided(120, ONE, False, AbortReason.CANCELLED)))
    assert answers[0] == Answer("r1", ONE, False, "aborted: cancelled, by ann@desk")


def test_a_checkpoint_that_completes_at_the_same_moment_stays_complete() -> None:
    """The verdict is there, or its commit comes first: one commit decides."""
    coordinator = running("a")
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    assert coordinator.handle(cancel("1")) == ()
    effects = coordinator.handle(Decided(120, ONE, True))
    said = "checkpoint 1 was completed before it could be cancelled"
    assert only(Answer, effects) == [Answer("c1", ONE, False, said)]


def test_a_checkpoint_that_is_aborted_anyway_says_why() -> None:
    coordinator = running()
    coordinator.handle(claimed(1))
    coordinator.handle(Declined(101, ONE, StageId("a"), AbortReason.DECLINED, "no room"))
    coordinator.handle(cancel("1"))
    effects = coordinator.handle(Decided(120, ONE, False, AbortReason.DECLINED))
    assert only(Answer, effects) == [Answer("c1", ONE, True, "checkpoint 1 was aborted: declined")]


def test_what_is_not_open_is_not_cancelled() -> None:
    coordinator = running("a")
    coordinator.handle(claimed(1))
    coordinator.handle(acked(1, "a"))
    coordinator.handle(Decided(120, ONE, True))
    coordinator.handle(claimed(2))
    for request, which, said in (
        ("c1", "1", "checkpoint 1 is complete already; open are: 2"),
        ("c2", "7", "no checkpoint 7 is open; open are: 2"),
        ("c3", "latest", "no checkpoint latest is open; open are: 2"),
    ):
        assert coordinator.handle(cancel(which, request)) == (Answer(request, None, False, said),)


def test_the_savepoint_of_a_drain_is_not_cancelled() -> None:
    """Event time has ended: the job could not go on."""
    coordinator = running("a")
    coordinator.handle(claimed(1, kind=STOP))
    coordinator.handle(StatusChanged(110, RunStatus.STOPPING))
    (answer,) = coordinator.handle(cancel("1"))
    said = "the job ends with checkpoint 1, which can no longer be cancelled"
    assert answer == Answer("c1", ONE, False, said)


def test_a_cancelled_checkpoint_does_not_count_as_failed() -> None:
    coordinator = with_settings(replace(SETTINGS, tolerated_failures=0))
    coordinator.handle(claimed(1))
    coordinator.handle(cancel("1"))
    assert only(FailJob, coordinator.handle(Decided(120, ONE, False, AbortReason.CANCELLED))) == []
