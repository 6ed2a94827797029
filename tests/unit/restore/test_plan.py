"""The plan of a restore, and the path that it leaves behind, decided from plain facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from spark_abs.errors import CheckpointNotFound, DamageError, Refused, RunAlive, UsageError
from spark_abs.manifest import Manifest, OutputVersion, StageSnapshot
from spark_abs.manifests.find import resolve
from spark_abs.manifests.manifest_table import Summary
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    Branch,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    RunId,
    StageId,
    Version,
    counts,
)
from spark_abs.observe.status import LiveRun
from spark_abs.protocol.attempt_changes import attempt_for, begin_attempt, finish_attempt
from spark_abs.protocol.control import (
    ControlState,
    begin_job,
    begin_run,
    claim,
    place_natives,
)
from spark_abs.protocol.path import channel_path
from spark_abs.restore.inputs import InputsSince
from spark_abs.restore.outside import OutsideFacts
from spark_abs.restore.plan import Facts, SinkFacts, plan_restore
from spark_abs.restore.refusals import Force
from spark_abs.restore.restoring import RestorePlan
from spark_abs.restore.steps import (
    AbortOpen,
    BeginAttempt,
    FenceChannel,
    FenceRoot,
    FenceSink,
    Finish,
    KeepSink,
    Materialise,
    RestoreSink,
    StartAfresh,
)
from spark_abs.sinks.delta.changes import Changes

STORED = '{"channels": {}, "queries": {}}'
CLICKS = ChannelId("clicks.main")
TOTALS = SinkFacts(((StageId("sum"), "totals"),), "/lake/totals", Version(9), "t-1", "t-1", Version(4))


def started() -> ControlState:
    return begin_run(begin_job("shop", 0), "here", 1, 0)


def manifest(checkpoint: int, attempt: int = 1, channel: int = 10, sink: int = 4) -> Manifest:
    clicks = OutputVersion("main", "channel", "channels/clicks.main", "c-1", Version(channel))
    totals = OutputVersion("totals", "delta", "/lake/totals", "t-1", Version(sink))
    mail = OutputVersion("mail", "function", "mail", "", None)
    stages = (
        StageSnapshot(StageId("clicks"), BatchId(3), outputs=(clicks,)),
        StageSnapshot(StageId("sum"), NO_BATCH, outputs=(totals, mail)),
    )
    kind, name = CheckpointKind.CHECKPOINT, None
    return Manifest(
        CheckpointId(checkpoint), AttemptId(attempt), RunId(1), "shop", kind, name, 0, 1, 2, (), stages
    )


def summary(checkpoint: int, attempt: int = 1, name: str | None = None) -> Summary:
    kind = CheckpointKind.SAVEPOINT if name else CheckpointKind.CHECKPOINT
    return Summary(CheckpointId(checkpoint), AttemptId(attempt), RunId(1), "shop", kind, name, 0, 1, 2, 0, 0)


def facts(*completed: Summary, sink: SinkFacts = TOTALS) -> Facts:
    return Facts(completed, (CLICKS,), True, (sink,))


def planned(state: ControlState, to: Manifest, found: Facts, *force: Force) -> RestorePlan:
    numbers = count(1)
    return planned_at(state, to, found, state.attempt.natives, lambda: f"q-{next(numbers)}", force)


def planned_at(
    state: ControlState,
    to: Manifest,
    found: Facts,
    natives: str,
    fresh_id: Callable[[], str],
    force: Collection[Force] = (),
) -> RestorePlan:
    attempt = attempt_for(state, to.cut.attempt, to.id, natives)
    return plan_restore(state, to, found, attempt=attempt, natives=natives, fresh_id=fresh_id, force=force)


def restored(state: ControlState, plan: RestorePlan) -> ControlState:
    """Return the state after a whole restore, and a run that follows it."""
    begun = begin_attempt(
        state, plan.parent, checkpoint=plan.checkpoint, plan=plan.stored(), host="here", pid=1, now_ms=0
    )
    return begin_run(finish_attempt(begun, plan.attempt), "here", 2, 0)


def test_a_plan_fences_everything_before_it_changes_anything() -> None:
    state, _ = claim(started(), RunId(1), kind=CheckpointKind.CHECKPOINT, name=None, now_ms=0)
    plan = planned(state, manifest(5), facts())
    assert plan.steps == (
        BeginAttempt(AttemptId(2), AttemptId(1), CheckpointId(5), RunId(1)),
        FenceRoot("checkpoints"),
        FenceRoot("state"),
        FenceChannel(CLICKS, AttemptId(1)),
        FenceSink("/lake/totals", ("sum/totals",), AttemptId(1), ("shop/sum/totals@1",), False),
        AbortOpen((CheckpointId(1),)),
        Materialise(StageId("clicks"), "native/2/clicks", BatchId(3), 0, 0),
        StartAfresh(StageId("sum")),
        RestoreSink("/lake/totals", ("sum/totals",), Version(4), Version(9), Changes(), False, False),
        KeepSink(
            ("sum/mail",), "a function has no versions: its effects outside the tables of this plan stay"
        ),
        Finish(AttemptId(2)),
    )


def test_a_sink_of_whole_checkpoints_that_only_spark_can_write_needs_spark() -> None:
    found = replace(facts(), outside=(OutsideFacts("each", " (Delta)", None),))
    assert planned(started(), manifest(5), found).needs_spark is False
    found = replace(facts(), outside=(OutsideFacts("each", " (Delta)", None, spark_table="s3a://b/each"),))
    plan = planned(started(), manifest(5), found)
    assert (plan.needs_spark, plan.spark_tables) == (True, ("s3a://b/each",))
    assert any("only Spark can write" in note for note in plan.notes)
    assert "refuse older runs at sink each through Spark, which has sent nothing" in [
        step.sentence() for step in plan.steps
    ]


def test_every_step_has_a_sentence_and_the_stored_plan_is_json() -> None:
    plan = planned(started(), manifest(5), facts())
    assert all(step.sentence() for step in plan.steps)
    stored = json.loads(plan.stored())
    assert stored["channels"] == {"clicks.main": 10}
    assert stored["steps"][0]["step"] == "BeginAttempt"


def test_the_path_of_a_channel_survives_the_loss_of_the_manifests() -> None:
    """1 goes on to checkpoint 5, 2 from there to 8, 3 from there: what counts is in the stored plans."""
    state = started()
    assert channel_path(state, CLICKS) == (Branch(AttemptId(1), None),)
    state = restored(state, planned(state, manifest(5, 1, channel=10), facts()))
    state = restored(state, planned(state, manifest(8, 2, channel=20), facts()))
    path = channel_path(state, CLICKS)
    assert path == (
        Branch(AttemptId(1), Version(10)),
        Branch(AttemptId(2), Version(20)),
        Branch(AttemptId(3), None),
    )


def test_an_abandoned_checkpoint_brings_its_attempt_back_and_leaves_the_other() -> None:
    state = started()
    state = restored(state, planned(state, manifest(5, 1, channel=10), facts()))
    plan = planned(state, manifest(9, 1, channel=30), facts(summary(5), summary(9), summary(12, 2)))
    assert plan.abandons == (12,)
    path = channel_path(restored(state, plan), CLICKS)
    assert path == (Branch(AttemptId(1), Version(30)), Branch(AttemptId(3), None))


def test_of_a_channel_that_did_not_exist_at_the_cut_nothing_counts() -> None:
    state = started()
    state = restored(state, planned(state, manifest(5), facts()))
    path = channel_path(state, ChannelId("orders.main"))
    assert not counts(path, AttemptId(1), Version(0))
    assert counts(path, AttemptId(2), Version(0))


def test_a_channel_path_refuses_a_plan_that_was_altered() -> None:
    altered = '{"channels": {"clicks.main": "x"}}'
    state = begin_attempt(
        started(), AttemptId(1), checkpoint=CheckpointId(5), plan=altered, host="here", pid=1, now_ms=0
    )
    with pytest.raises(DamageError, match="attempt 2"):
        channel_path(state, CLICKS)


def test_what_leaves_the_path_is_said() -> None:
    state = restored(started(), planned(started(), manifest(5), facts()))
    completed = (summary(4), summary(5), summary(6), summary(7, 2), summary(8, 2))
    assert planned(state, manifest(7, 2), facts(*completed)).abandons == (8,)
    assert planned(state, manifest(4, 1), facts(*completed)).abandons == (5, 7, 8)


def test_a_live_run_refuses_unless_forced() -> None:
    alive = replace(facts(), alive=LiveRun(RunId(1), "here", 77, 2000))
    with pytest.raises(RunAlive, match=r"process 77 on here"):
        planned(started(), manifest(5), alive)
    assert "fenced" in planned(started(), manifest(5), alive, Force.RUN).notes[0]


def test_two_restores_at_a_time_are_refused_even_when_forced() -> None:
    begun = begin_attempt(
        started(), AttemptId(1), checkpoint=CheckpointId(5), plan=STORED, host="here", pid=1, now_ms=0
    )
    alive = replace(facts(), alive=LiveRun(RunId(2), "here", 77, 2000))
    with pytest.raises(RunAlive, match=r"being restored by process 77"):
        planned(begun, manifest(5), alive, *Force)
    replaced = replace(facts(), alive=LiveRun(RunId(1), "here", 66, 2000))
    assert planned(begun, manifest(5), replaced, *Force).continues


def test_changes_of_others_refuse_unless_forced() -> None:
    changed = facts(
        sink=replace(TOTALS, changes=Changes((Version(8),), 3, (Version(6),), (Version(7),), 1200))
    )
    with pytest.raises(Refused, match="version 7"):
        planned(started(), manifest(5), changed)
    plan = planned(started(), manifest(5), changed, Force.ROWS)
    (step,) = [s for s in plan.steps if isinstance(s, RestoreSink)]
    assert step.sentence().endswith(
        "3 rows of this job go; changes of others in version 7 are undone (1,200 rows added); "
        "rows of jobs on other roots in version 6 stay"
    )


def test_a_sink_that_spark_brings_back_and_one_row_are_said_so() -> None:
    changes = Changes((Version(8),), 1, (), (Version(7),), 1)
    found = facts(sink=replace(TOTALS, changes=changes, needs_spark=True))
    (step,) = [
        s for s in planned(started(), manifest(5), found, Force.ROWS).steps if isinstance(s, RestoreSink)
    ]
    assert step.sentence() == (
        "bring sink sum/totals (/lake/totals) through Spark from version 9 back to the rows of version 4; "
        "1 row of this job goes; changes of others in version 7 are undone (1 row added)"
    )


def test_rows_of_a_function_are_not_said_to_be_those_of_others() -> None:
    changes = Changes((Version(6),), 0, (), (Version(5), Version(8)), 2)
    found = facts(sink=replace(TOTALS, changes=changes, by_function=True))
    plan = planned(started(), manifest(5), found)
    assert "a stream that has read them fails at the commit of this restore" in plan.notes[-1]
    own = facts(sink=replace(TOTALS, changes=replace(changes, own=changes.of_others, of_others=())))
    assert planned(started(), manifest(5), own).notes == ()
    (step,) = [s for s in plan.steps if isinstance(s, RestoreSink)]
    assert step.sentence().endswith(
        "back to the rows of version 4; changes of the function and others in versions 5, 8 are undone "
        "(2 rows added)"
    )


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (replace(TOTALS, current=None), "has lost its table"),
        (replace(TOTALS, table_id="t-2"), "not the table that the job wrote"),
        (replace(TOTALS, table_id="t-2", by_function=True), "not the table that the job wrote"),
        (replace(TOTALS, current=Version(3)), "is at version 3"),
    ],
)
def test_a_table_that_was_replaced_refuses_unless_forced_and_stays_then(found: SinkFacts, says: str) -> None:
    with pytest.raises(Refused, match=rf"{says}.*force"):
        planned(started(), manifest(5), facts(sink=found))
    plan = planned(started(), manifest(5), facts(sink=found), Force.ROWS)
    assert not any(isinstance(step, RestoreSink) for step in plan.steps)
    (kept,) = [s for s in plan.steps if isinstance(s, KeepSink) and s.sinks == ("sum/totals",)]
    assert says in kept.why


def test_rows_that_cannot_be_told_from_those_of_another_root_refuse_even_when_forced() -> None:
    with pytest.raises(Refused, match="rows of both are in one file"):
        planned(
            started(),
            manifest(5),
            facts(sink=replace(TOTALS, entangled="rows of both are in one file")),
            *Force,
        )


def test_a_version_of_a_sink_that_is_gone_is_damage() -> None:
    with pytest.raises(DamageError, match=r"2 files of version 4"):
        planned(started(), manifest(5), facts(sink=replace(TOTALS, gone="2 files of version 4 are gone")))


def test_a_sink_added_later_goes_back_to_where_it_was_added() -> None:
    later = replace(
        TOTALS, sinks=((StageId("sum"), "later"),), table="/lake/later", target=Version(2), later=True
    )
    plan = planned(started(), manifest(5), replace(facts(), sinks=(TOTALS, later)))
    assert any(isinstance(s, FenceSink) and s.sinks == ("sum/later",) for s in plan.steps)
    (step,) = [s for s in plan.steps if isinstance(s, RestoreSink) and s.sinks == ("sum/later",)]
    assert step.version == 2


@pytest.mark.parametrize("unknown", [{"target": None}, {"table_id": "other"}, {"current": None}])
def test_a_sink_added_later_of_which_nothing_is_known_stays(unknown: dict[str, Any]) -> None:
    later = replace(TOTALS, sinks=((StageId("sum"), "later"),), table="/lake/later", later=True, **unknown)
    plan = planned(started(), manifest(5), replace(facts(), sinks=(TOTALS, later)))
    assert any(isinstance(s, KeepSink) and s.sinks == ("sum/later",) for s in plan.steps)


def test_an_unfinished_restore_is_continued_or_given_up_for_another_target() -> None:
    plan = planned(started(), manifest(5), facts())
    begun = begin_attempt(
        started(), plan.parent, checkpoint=plan.checkpoint, plan=plan.stored(), host="here", pid=1, now_ms=0
    )
    again = planned_at(begun, manifest(5), facts(), "native", lambda: "another")
    assert (again.attempt, again.continues) == (2, True)
    assert again.steps[1:] == plan.steps[1:]
    assert again.queries == plan.queries == {"clicks": "q-1", "sum": "q-2"}
    other = planned(begun, manifest(6), facts())
    assert (other.attempt, other.continues, other.parent) == (3, False, 1)
    assert "the unfinished restore to checkpoint 5 is abandoned" in other.notes
    assert {s.attempt for s in other.steps if isinstance(s, FenceChannel)} == {1, 2}


def test_native_checkpoints_stay_where_they_were_unless_another_place_is_said() -> None:
    state = begin_run(place_natives(begin_job("shop", 0), "/disk/shop-1"), "here", 1, 0)
    stays = planned(state, manifest(5), facts())
    (written,) = [step for step in stays.steps if isinstance(step, Materialise)]
    assert (stays.natives, written.directory) == ("/disk/shop-1", "/disk/shop-1/2/clicks")
    moved = planned_at(state, manifest(5), facts(), "native", lambda: "q")
    (written,) = [step for step in moved.steps if isinstance(step, Materialise)]
    assert (moved.natives, written.directory) == ("native", "native/2/clicks")


def test_an_unfinished_restore_that_wrote_elsewhere_is_given_up() -> None:
    plan = planned(started(), manifest(5), facts())
    begun = begin_attempt(
        started(), plan.parent, checkpoint=plan.checkpoint, plan=plan.stored(), host="here", pid=1, now_ms=0
    )
    assert (
        begin_attempt(
            begun, plan.parent, checkpoint=plan.checkpoint, plan=STORED, host="here", pid=1, now_ms=0
        ).attempt.id
        == 2
    )
    other = begin_attempt(
        begun,
        plan.parent,
        checkpoint=plan.checkpoint,
        plan=STORED,
        host="here",
        pid=1,
        now_ms=0,
        natives="/disk/shop-1",
    )
    assert (other.attempt.id, other.attempt.natives) == (3, "/disk/shop-1")


def test_once_a_run_has_begun_only_a_restore_moves_native_checkpoints() -> None:
    assert place_natives(started(), "native") == started()
    with pytest.raises(
        UsageError, match="attempt 1 are in native, but native_root is now /disk: give native_root"
    ):
        place_natives(started(), "/disk")


def test_targets() -> None:
    state = restored(started(), planned(started(), manifest(5), facts()))
    completed = (summary(3, name="before"), summary(5), summary(7, name="gone"), summary(8, 2, name="before"))
    found = {to: resolve(to, completed, state).id for to in ("latest", "3", "7", "before", "gone")}
    assert found == {"latest": 8, "3": 3, "7": 7, "before": 8, "gone": 7}
    for to in ("4", "never"):
        with pytest.raises(CheckpointNotFound):
            resolve(to, completed, state)
    with pytest.raises(CheckpointNotFound, match="current path"):
        resolve("latest", (), state)


def test_input_that_would_be_read_again_and_is_gone_is_named_and_only_force_does_without_it() -> None:
    lost = tuple(f"file:///in/{n}.json" for n in range(5))
    found = replace(facts(), inputs=InputsSince(lost=lost))
    with pytest.raises(
        Refused, match=r"since checkpoint 5 .*/in/0\.json.* and 2 more.*put the files back"
    ) as no:
        planned(started(), manifest(5), found)
    assert "put them back, restore, remove them again, then start the job" in str(no.value)
    plan = planned(started(), manifest(5), found, Force.INPUTS)
    assert plan.notes[-1].endswith("their rows will be missing")
    assert plan.steps == planned(started(), manifest(5), facts(), Force.INPUTS).steps


def test_a_plan_says_how_many_input_files_are_read_again() -> None:
    since = InputsSince({StageId("a"): 1, StageId("b"): 3})
    said = planned(started(), manifest(5), replace(facts(), inputs=since)).notes
    assert "stage 'a' reads again one input file that it has read since" in said
    assert "stage 'b' reads again 3 input files that it has read since" in said
