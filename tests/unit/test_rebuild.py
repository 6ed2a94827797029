"""What a stage without its native checkpoint repeats (P18)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_abs.errors import DamageError, Fenced, Refused
from spark_abs.model import NO_BATCH, AttemptId, BatchId, CheckpointId, RunId, StageId
from spark_abs.protocol.attempt import Rebuilt
from spark_abs.protocol.attempt_changes import begin_attempt
from spark_abs.protocol.control import ControlState, begin_job, begin_run, rebuild
from spark_abs.protocol.rebuild import LostStage, Repeat, repeats
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.stages.native import clear_leftovers, plan_batch
from spark_abs.store.storage import Place

PLANS = {BatchId(n): f"plan {n}" for n in range(10)}


def lost(cut: int, written: int, **more: bool) -> LostStage:
    return LostStage(BatchId(cut), BatchId(written), **more)


def test_it_repeats_what_lies_between_its_checkpoint_and_its_last_output() -> None:
    assert repeats(lost(3, 5), PLANS) == (Repeat(BatchId(4), "plan 4"), Repeat(BatchId(5), "plan 5"))


@pytest.mark.parametrize("written", [2, 3, NO_BATCH])
def test_no_output_behind_the_checkpoint_leaves_nothing_to_repeat(written: int) -> None:
    assert repeats(lost(3, written, has_native_inputs=True), {}) == ()


def test_without_a_checkpoint_it_begins_with_its_first_batch() -> None:
    assert [r.batch for r in repeats(lost(NO_BATCH, 1), PLANS)] == [0, 1]


def test_sources_of_its_own_cannot_begin_anew() -> None:
    with pytest.raises(Refused, match="no checkpoint records where its native sources started"):
        repeats(lost(NO_BATCH, 1, has_native_inputs=True), PLANS)


def test_a_batch_of_which_no_output_tells_is_not_guessed() -> None:
    plans = {b: p for b, p in PLANS.items() if b != 5}
    with pytest.raises(Refused, match="the input of batch 5"):
        repeats(lost(3, 6), plans)


def test_a_function_may_have_seen_what_no_output_holds() -> None:
    with pytest.raises(Refused, match="function"):
        repeats(lost(3, 3, calls_functions=True), PLANS)


def begun() -> ControlState:
    return begin_run(begin_job("job", 0), "host", 1, 0)


def test_a_rebuilt_stage_is_in_a_directory_of_its_own_from_the_record_on() -> None:
    stage = StageId("pair")
    state = begun()
    assert state.attempt.directory(stage) == "pair"
    for number in (2, 3):
        state = rebuild(state, RunId(1), Rebuilt(stage, number, "id", CheckpointId(7)))
    assert state.attempt.directory(stage) == "pair.3"
    assert state.attempt.directory(StageId("tail")) == "tail"
    assert [r.number for r in state.attempt.rebuilt] == [3]


def test_a_run_that_was_replaced_rebuilds_nothing() -> None:
    state = begin_run(begun(), "host", 2, 0)
    with pytest.raises(Fenced):
        rebuild(state, RunId(1), Rebuilt(StageId("pair"), 2, "id", None))


def test_a_restore_begins_with_directories_of_its_own() -> None:
    state = rebuild(begun(), RunId(1), Rebuilt(StageId("pair"), 2, "id", None))
    state = begin_attempt(
        state, AttemptId(1), checkpoint=CheckpointId(7), plan="", host="host", pid=1, now_ms=0
    )
    assert state.attempt.directory(StageId("pair")) == "pair"


def planned(native: Place, *batches: int) -> None:
    for batch in batches:
        native.write(f"offsets/{batch}", b"by Spark")
        native.write(f"offsets/.{batch}.crc", b"of it")


def test_the_batch_that_comes_next_takes_the_place_of_what_spark_has_planned(tmp_path: Path) -> None:
    """Its checksum goes, too: the new text would not match it."""
    native = Place(str(tmp_path))
    planned(native, 3, 4, 5)
    native.write("commits/3", b"")
    for _ in range(2):
        plan_batch(native, BatchId(4), "by hand")
        left = {p.name: p.read_text() for p in (tmp_path / "offsets").iterdir()}
        assert left == {"3": "by Spark", ".3.crc": "of it", "4": "by hand"}
    with pytest.raises(DamageError, match="batch 6 cannot come next, 3 is the last finished"):
        plan_batch(native, BatchId(6), "by hand")


def test_what_a_killed_or_frozen_driver_has_left_is_gone_before_a_query_starts(tmp_path: Path) -> None:
    """But not the checksums that Spark keeps itself, nor what somebody may be uploading."""
    stays = ("offsets/3", "commits/3", "state/0/0/4.changelog.crc", "state/0/0/.4.zip.f9.tmp")
    goes = (
        "offsets/.4.f9.tmp",
        "commits/.3.f9.tmp",
        "offsets/.3.crc",
        "state/0/0/.4.changelog.crc",
        ".metadata.crc",
    )
    native = Place(str(tmp_path))
    for path in (*stays, *goes):
        native.write(path, b"")
    for _ in range(2):
        clear_leftovers(native)
        left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
        assert left == set(stays)
    clear_leftovers(native.below("none"))


def test_a_stopped_stage_has_no_agent_and_its_successor_stands_where_it_stood() -> None:
    before, after = BatchLock(), BatchLock()
    before.block(CheckpointId(4), after=BatchId(7))
    before.stop()
    with before.agent() as mine:
        assert not mine
    after.succeed(before)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_enter, after, BatchId(7)).result(30), "the cut waits for the end of its batch"
        batch = pool.submit(_enter, after, BatchId(8))
        with pytest.raises(TimeoutError):
            batch.result(0.3)
        after.unblock(CheckpointId(4))
        assert batch.result(30)


def _enter(turns: BatchLock, number: BatchId) -> bool:
    with turns.batch(number, lambda: True):
        return True
