"""What a stage does and has not read is told, and the stage that holds a checkpoint up is named."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.checkpointing.late_stages import late_stages
from spark_abs.checkpointing.reporting import OpenBarrier, Reporter, ahead_ms, furthest_behind
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, BatchId, ChannelId, DataFile, Entry, RunId, StageId, Version
from spark_abs.protocol.late import late_by_themselves
from spark_abs.settings import Settings
from spark_abs.spark.query_progress import QueryProgress, parse_progress
from spark_abs.stages.activity import Activity, Done, said
from spark_abs.stages.alignment_backlog import CheckpointProgress
from spark_abs.stages.unread import Unread
from spark_abs.store.activity import (
    PATH,
    Earlier,
    Longest,
    Phase,
    RunActivity,
    Skips,
    StageActivity,
    phase_said,
    read_activity,
    write_activity,
)
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.channel_support import JOB, Log, barrier, position
from tests.unit.test_stage_modes import Both

CHANNEL = ChannelId("a.main")


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


def test_a_batch_is_told_with_its_phase_and_both_ages() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.begin(BatchId(7))
    clock.ms += 2_000
    activity.enter(Phase.CALLING, "mail")
    clock.ms += 9_000
    activity.enter(Phase.CALLING, "mail")
    assert activity.now is not None
    assert (activity.now.began_ms, activity.now.since_ms) == (1_000, 3_000)
    assert said(activity.now, clock.ms) == (
        "batch 7 has been under way for 11.0 s: function 'mail' is called, for 9.0 s"
    )
    activity.end(finished=True)
    activity.enter(Phase.CALLING, "late")
    longest = Longest(Phase.CALLING, "mail", 9_000)
    assert activity.done == Done(BatchId(7), 1_000, 12_000, 11_000, 11_000, longest, waited_ms=2_000)
    told: object = activity.now
    assert told is None, "no phase outside of a batch"


def test_the_time_for_which_a_batch_waits_is_told_apart() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.begin(BatchId(7))
    for phase in (Phase.WRITING, Phase.WAITING, Phase.COMMITTING, Phase.WAITING):
        clock.ms += 1_000
        activity.enter(phase)
    assert activity.now is not None
    assert activity.now.waited_ms == 2_000, "before its phase"
    clock.ms += 500
    activity.end(finished=True)
    assert activity.done.waited_ms == 2_500


def test_the_longest_phase_is_not_that_of_one_slow_batch_among_many() -> None:
    clock = Clock()
    activity = Activity(clock)
    told = []
    for batch, took in enumerate((9_000, 10, 20, 30, 40)):
        activity.begin(BatchId(batch))
        activity.enter(Phase.CALLING, "mail")
        clock.ms += took
        activity.end(finished=True)
        assert activity.done.longest is not None
        told.append(activity.done.longest.ms)
    assert told == [9_000, 9_000, 9_000, 30, 40]


def test_a_batch_that_failed_is_no_finished_one_and_the_slowest_is_remembered() -> None:
    clock = Clock()
    activity = Activity(clock)
    for batch, took in ((0, 30), (1, 10)):
        activity.begin(BatchId(batch))
        clock.ms += took
        activity.end(finished=True)
    done = activity.done
    assert (done.last_ms, done.slowest_ms) == (10, 30)
    activity.begin(BatchId(2))
    activity.end(finished=False)
    assert (activity.now, activity.done) == (None, done)


def test_every_phase_has_a_sentence() -> None:
    assert {phase: phase_said(phase, "x") for phase in Phase if not phase_said(phase, "x")} == {}
    assert phase_said(Phase.WAITING, "credit on a.main") == "it waits for credit on a.main"
    assert len(phase_said(Phase.CALLING, "f" * 10_000)) < 150


def test_the_record_is_read_as_written_and_a_damaged_or_later_one_is_none(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    assert read_activity(root) is None
    told = RunActivity(RunId(3), 1_000, (StageActivity(StageId("a"), Phase.CALLING, "mail", 5),))
    write_activity(root, told)
    assert read_activity(root) == told
    path = Path(root.path(PATH))
    path.write_text(path.read_text()[:-5])
    assert read_activity(root) is None
    write_activity(root, replace(told, v=99))
    assert read_activity(root) is None


def entry(version: int, rows: int) -> Entry:
    files = (DataFile("part.parquet", 10 * rows, rows),) if rows else ()
    return Entry(Version(version), AttemptId(1), files=files)


def counted(root: Root) -> Unread:
    ctx: Any = SimpleNamespace(root=root)
    return Unread(ctx)


def test_unread_rows_are_those_of_earlier_runs_and_those_that_were_written_since(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    Control.create(root, JOB, 0)
    log = Log(root)
    first, second = log.batch(1, 2, 3), log.batch(4)
    unread = counted(root)
    unread.wrote({CHANNEL: entry(second + 1, 5)})
    unread.wrote({CHANNEL: entry(second + 1, 5)})  # repeated
    unread.wrote({CHANNEL: entry(second + 2, 0)})
    found = unread.after(position(CHANNEL, first), moved_ms=9)
    assert (found.entries, found.rows, found.more, found.moved_ms) == (2, 6, False, 9)
    assert found.oldest_ms is not None
    assert unread.after(position(CHANNEL, 0)).rows == 9, "each reader has its own position"
    assert unread.after(position(CHANNEL, second + 1)).oldest_ms is None


def test_more_entries_than_are_counted_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_abs.stages.unread.MOST_READ", 2)
    root = Root(str(tmp_path))
    Control.create(root, JOB, 0)
    log = Log(root)
    versions = [log.batch(n) for n in range(4)]
    unread = counted(root)
    found = unread.after(position(CHANNEL, 0))
    assert (found.rows, found.more) == (2, True)
    unread.wrote({CHANNEL: entry(versions[-1] + 1, 1)})
    assert unread.after(position(CHANNEL, versions[-1])).more is False


def test_a_log_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    unread = counted(Root(str(tmp_path)))
    unread.wrote({CHANNEL: entry(4, 2)})
    assert unread.after(position(CHANNEL, 3)).rows == 2


def test_an_entry_without_rows_is_no_row_that_was_read(tmp_path: Path) -> None:
    unread = counted(Root(str(tmp_path)))
    unread.wrote({CHANNEL: entry(4, 2)})
    unread.wrote({CHANNEL: entry(5, 0)})
    assert unread.has_rows(CHANNEL, Version(3), Version(5))
    assert not unread.has_rows(CHANNEL, Version(4), Version(5)), "a barrier"


@pytest.mark.parametrize(
    ("without_cut", "first"),
    [
        ({"tell": ("clean", "customers")}, {"tell"}),
        ({"tell": ("match",), "match": ("clean",)}, {"match"}),
        ({"clean": (), "match": ("clean",), "tell": ("match",)}, {"clean"}),
        ({"left": (), "right": (), "join": ("left", "right")}, {"left", "right"}),
        ({}, set()),
    ],
)
def test_a_stage_is_late_by_itself_if_all_before_it_have_passed_the_barrier_on(
    without_cut: dict[str, tuple[str, ...]], first: set[str]
) -> None:
    stages: Any = without_cut
    assert late_by_themselves(stages) == first
    assert late_by_themselves(stages, [StageId("slow-copy")]) == {*first, "slow-copy"}


class Member:
    """A stage as checkpoints see it."""

    def __init__(self, name: str, taken: bool, producers: tuple[str, ...] = (), work: str = "") -> None:
        self.name, self._taken, self.producers, self._work = name, taken, frozenset(producers), work

    def has_taken(self, _: object) -> bool:
        return self._taken

    def checkpoint_progress(self, _: object) -> CheckpointProgress:
        inputs = tuple(f"{name}.main" for name in sorted(self.producers))
        what = "its state is being copied" if self._taken else f"the barrier has not come out of {inputs}"
        return CheckpointProgress(None, what, work="" if self._taken else self._work, behind=inputs)

    def activity(self) -> StageActivity:
        return StageActivity(StageId(self.name))


def test_the_stage_whose_batch_is_still_running_is_named_and_not_those_before_it() -> None:
    """Both stages before it have acknowledged; the one after it only waits."""
    work = "batch 7 has been under way for 11.3 s: function 'mail' is called"
    stages: Any = [
        Member("last", False, ("tell",), "batch 3 has been under way for 0.1 s: it waits"),
        Member("clean", True),
        Member("customers", True),
        Member("tell", False, ("clean", "customers"), work),
    ]
    found = late_stages(barrier(1), stages, [StageId("clean"), StageId("customers")])
    assert [(late.stage, late.first) for late in found] == [("tell", True), ("last", False)]
    assert found[0].why == f"{work}; the barrier in clean.main, customers.main comes after it"
    assert found[1].why == "the barrier has not come out of ('tell.main',)"


def test_a_cut_that_is_being_copied_holds_a_checkpoint_up() -> None:
    stages: Any = [Member("a", True), Member("b", False, ("a",))]
    found = late_stages(barrier(1), stages, ())
    assert (found[0].stage, found[0].first, found[0].why) == (
        "a",
        True,
        "its state is being copied",
    )
    assert found[1].first, "the barrier is in front of it"


def reporter(tmp_path: Path, *stages: Any) -> Reporter:
    root = Root(str(tmp_path))
    ctx: Any = SimpleNamespace(root=root, run=RunId(4), natives="native")
    settings = Settings.resolve(None, {}, {}, {"interval": "3s"})
    open_ = (OpenBarrier(barrier(1), frozenset({StageId("a")})),)
    return Reporter(ctx, lambda: stages, lambda: open_, settings=lambda: settings, skips=lambda: Skips(3, 77))


def test_the_reporter_tells_stages_settings_disks_and_who_is_late(tmp_path: Path) -> None:
    reporter(tmp_path, Member("a", True), Member("b", False, ("a",), "batch 1 …")).report()
    found = read_activity(Root(str(tmp_path)))
    assert found is not None
    assert [one.stage for one in found.stages] == ["a", "b"]
    assert [(late.checkpoint, late.stage, late.first) for late in found.late] == [(1, "b", True)]
    assert (found.settings["interval_ms"], found.run, found.skips) == ("3000", 4, Skips(3, 77))
    (disk,) = found.disks
    assert 0 < disk.free <= disk.total
    assert "deltalake" in found.versions


def test_the_reporter_writes_only_what_has_changed(tmp_path: Path) -> None:
    told = reporter(tmp_path, Member("a", True))
    told.report()
    path = Path(tmp_path, PATH)
    before = json.loads(path.read_text())
    told.report()
    assert json.loads(path.read_text()) == before


def test_the_clock_of_the_store_is_compared_with_both_ends_of_a_write(tmp_path: Path) -> None:
    assert ahead_ms(5_000, began_ms=4_000, ended_ms=16_000) == 0, "a slow store is no clock that is wrong"
    assert ahead_ms(5_000, began_ms=65_000, ended_ms=65_010) == 60_000
    assert ahead_ms(65_010, began_ms=5_000, ended_ms=5_010) == -60_000
    told = reporter(tmp_path, Member("a", True))
    told.report()
    os.utime(Path(tmp_path, PATH), (0, 0))
    assert told._ahead_of_store(1_000, 2_000) == 1_000
    found = told._look(0)
    assert (found.ahead_of_store_ms, found.usual_write_ms) == (0, found.write_ms)


def test_of_the_older_samples_the_one_that_was_furthest_behind_counts() -> None:
    samples = [Earlier(StageId("a"), n, rows=n, lag_ms=lag) for n, lag in enumerate((0, 70, 0, 80, 0, 90))]
    assert furthest_behind(samples[:1]) == samples[0]
    assert furthest_behind(samples) == samples[1]


class Lost(Member):
    def activity(self) -> StageActivity:
        raise DamageError("offsets/7 is missing")


def test_what_fails_in_the_reporter_is_logged_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, looks = reporter(tmp_path, Lost("a", True)), iter((False, False, False, True))
    monkeypatch.setattr(told._done, "wait", lambda _: next(looks))
    with caplog.at_level(logging.WARNING):
        told._run()
    assert [record.message for record in caplog.records] == ["no activity: offsets/7 is missing"]


def test_a_stage_tells_its_batch_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    both = Both(Root(str(tmp_path)))
    seen: list[StageActivity] = []
    both.during = lambda: seen.append(both.runner.activity())
    assert (both.runner.activity().phase, both.runner.activity().batch) == (Phase.IDLE, -1)
    both.plan(0, position("a.main", 1), position("b.main", 0))
    both.runner.run_batch(None, 0)  # type: ignore[arg-type]
    assert [(one.phase, one.batch, one.under_way) for one in seen] == [(Phase.READING, 0, True)]
    assert both.runner.activity().phase is Phase.ENDING, "Spark has not recorded its end"
    both._file("commits", 0, "v1\n{}")
    after = both.runner.activity()
    assert (after.phase, after.batch, after.last_ms is not None) == (Phase.IDLE, 0, True)
    assert both.runner.producers == {"a", "b"}


def test_the_progress_of_a_late_stage_names_the_batch_under_way(tmp_path: Path) -> None:
    both = Both(Root(str(tmp_path)))
    found: list[CheckpointProgress] = []
    both.during = lambda: found.append(both.runner.checkpoint_progress(barrier(1)))
    both.batch(0, position("a.main", 1), position("b.main", 1))
    assert found[0].work.startswith("batch 0 has been under way for 0.")
    assert found[0].behind == ("a.main", "b.main")
    assert both.runner.checkpoint_progress(barrier(1)).work == ""


def test_a_report_of_spark_is_read_and_a_strange_one_is_none() -> None:
    plain = {
        "batchId": 7,
        "numInputRows": 40,
        "processedRowsPerSecond": 3.5,
        "stateOperators": [{"numRowsTotal": 4, "memoryUsedBytes": 100}] * 2,
        "eventTime": {"watermark": "1970-01-01T00:00:00.000Z"},
    }
    assert parse_progress(json.dumps(plain)) == QueryProgress(7, 40, 3.5, 8, 200, has_watermark=True)
    stateless = {**plain, "stateOperators": [], "processedRowsPerSecond": "Infinity", "eventTime": {}}
    assert parse_progress(json.dumps(stateless)) == QueryProgress(7, 40, None, None, None)
    assert [parse_progress(text) for text in ("[]", "{", '{"batchId": null}')] == [None] * 3
