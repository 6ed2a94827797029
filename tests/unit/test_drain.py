"""The end of event time (P21): how a batch is planned for it, what is recorded, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.errors import DamageError, Fenced, Refused, UsageError
from spark_abs.model import (
    AttemptId,
    ChannelId,
    CheckpointId,
    RunId,
    StageId,
    dumps_position,
)
from spark_abs.plan.graph import JobGraph, SinkDecl, StageDecl
from spark_abs.protocol.attempt_changes import begin_attempt
from spark_abs.protocol.control import (
    ControlState,
    begin_drain,
    begin_job,
    begin_run,
)
from spark_abs.run.drain import Drain
from spark_abs.snapshots.layout import END_OF_TIME_MS, at_end_of_time, parse_offsets
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import NativeLog
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from tests.channel_support import Log, position


@pytest.mark.parametrize("version", [1, 2])
def test_the_batch_at_the_end_of_time_reads_nothing_and_differs_in_the_watermark_alone(version: int) -> None:
    lines = ["0:{}", "1:-"] if version == 2 else ["{}", "-"]
    text = "\n".join([f"v{version}", '{"batchWatermarkMs":5,"batchTimestampMs":7,"conf":{"a":"b"}}', *lines])
    before, after = parse_offsets(text), parse_offsets(at_end_of_time(text))
    assert (after.version, after.offsets, after.conf) == (before.version, before.offsets, before.conf)
    assert (after.timestamp_ms, after.watermark_ms) == (7, END_OF_TIME_MS)
    assert END_OF_TIME_MS * 1000 < 2**63, "Spark counts event time in microseconds"


def test_a_plan_without_a_watermark_is_not_one_of_sparks() -> None:
    with pytest.raises(DamageError, match="batchWatermarkMs"):
        at_end_of_time("v1\n{}\n{}")


def begun() -> ControlState:
    return begin_run(begin_job("job", 0), "host", 1, 0)


def test_a_drain_stays_until_a_restore_undoes_it() -> None:
    state = begin_run(begin_drain(begun(), RunId(1), "last"), "host", 1, 0)
    assert state.attempt.drain == "last"
    assert (
        begin_attempt(
            state, AttemptId(1), checkpoint=CheckpointId(3), plan="", host="host", pid=1, now_ms=0
        ).attempt.drain
        is None
    )


def test_a_run_that_was_replaced_begins_no_drain() -> None:
    with pytest.raises(Fenced):
        begin_drain(begin_run(begun(), "host", 2, 0), RunId(1), "last")


def drain(*, bounded: bool = False, mixed: bool = False) -> Drain:
    source, behind = StageId("source"), StageId("after")
    graph = JobGraph(
        (
            StageDecl(source, (), has_native=True),
            StageDecl(behind, (ChannelId("source.main"),), has_native=mixed),
        ),
        (SinkDecl("sink", behind, "main", "/table"),),
    )
    plans = {
        source: PlanFacts(("files",), (), (), False, True, {}),
        behind: PlanFacts(("files",) if mixed else (), (ChannelId("source.main"),), (), False, True, {}),
    }
    nothing: Any = None
    ctx: Any = SimpleNamespace(bounded=bounded)
    return Drain(ctx, nothing, graph, plans, {})


def test_a_job_of_sources_and_stages_behind_them_can_be_drained() -> None:
    drain().check()


def test_what_ends_by_itself_or_reads_a_source_beside_channels_cannot() -> None:
    with pytest.raises(UsageError, match="a bounded run ends by itself"):
        drain(bounded=True).check()
    with pytest.raises(UsageError, match="stage 'after' reads a native source beside its channels"):
        drain(mixed=True).check()


def test_one_request_for_a_drain_is_answered_and_another_one_refused() -> None:
    asked = drain()
    asked.ask("last", None)  # a start that goes on with a drain
    asked.ask("last", "first")
    for name in ("last", "other"):
        with pytest.raises(UsageError, match="is being drained already, with savepoint 'last'"):
            asked.ask(name, "second")
    assert asked.request() == "first"


def test_a_request_that_comes_when_the_savepoint_is_taken_is_refused() -> None:
    asked = drain()
    asked.ask("last", None)
    assert asked.request() == asked.request()
    with pytest.raises(UsageError, match="is being drained already"):
        asked.ask("last", "late")


class Behind:
    """A stage behind the channel `a.main`, whose query works when a test says so, and its drain."""

    def __init__(self, path: Path) -> None:
        root, self.path = Root(str(path / "root")), path
        for log in ("offsets", "commits"):
            (path / log).mkdir()
        self.channel, self.native = Log(root), NativeLog(Place(str(path)))
        self.isActive, start = True, (position("a.main", -1),)
        runner = SimpleNamespace(native=self.native, consumed=lambda: self.native.consumed() or start)
        stages: Any = {StageId("b"): SimpleNamespace(runner=runner, query=self)}
        ctx: Any = SimpleNamespace(root=root)
        control: Any = SimpleNamespace(state=begun())
        self.decl = StageDecl(StageId("b"), (ChannelId("a.main"),), has_native=False)
        nothing: Any = None
        self.drain = Drain(ctx, control, nothing, {}, stages)

    def plan(self, batch: int, version: int) -> None:
        offset = json.dumps(dumps_position(position("a.main", version)))
        metadata = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": batch, "conf": {}})
        (self.path / "offsets" / str(batch)).write_text(f"v1\n{metadata}\n{offset}")

    def commit(self, batch: int) -> None:
        (self.path / "commits" / str(batch)).write_text("v1\n{}")

    def read_all(self, meanwhile: Iterator[None]) -> None:
        """Wait until the stage has read all; each look is a step of what happens meanwhile."""
        self.drain._read_all(self.decl, lambda: next(meanwhile))
        assert next(meanwhile, "over") == "over", "it has not waited for the rest"


@pytest.fixture
def behind(tmp_path: Path) -> Behind:
    return Behind(tmp_path)


def test_a_stage_has_read_all_also_while_batches_and_rows_come_without_end(behind: Behind) -> None:
    """They come of timers of processing time, of its own and of the stage before it."""
    first, last = behind.channel.batch(1), behind.channel.batch(2)

    def meanwhile() -> Iterator[None]:
        behind.plan(0, first)
        yield
        later = behind.channel.batch(3)
        behind.commit(0)
        behind.plan(1, last)
        yield
        behind.commit(1)
        behind.plan(2, later)
        yield
        yield
        behind.channel.batch(4)
        behind.commit(2)
        behind.plan(3, later)
        yield

    behind.read_all(meanwhile())


def test_entries_that_start_no_batch_are_not_waited_for(behind: Behind) -> None:
    last = behind.channel.batch(1)
    behind.channel.batch()

    def meanwhile() -> Iterator[None]:
        behind.plan(0, last)
        behind.commit(0)
        yield
        yield

    behind.read_all(meanwhile())


def test_a_batch_that_is_planned_has_to_end_in_a_query_that_goes_on(behind: Behind) -> None:
    """It may be the one at the end of event time, planned by a run that was killed."""
    last = behind.channel.batch(1)
    behind.plan(0, last)
    behind.commit(0)
    behind.plan(1, last)

    def meanwhile() -> Iterator[None]:
        yield
        behind.isActive = False
        yield
        behind.commit(1)
        yield
        behind.isActive = True
        yield

    behind.read_all(meanwhile())


@pytest.mark.parametrize("read", [False, True])
def test_a_stop_ends_the_wait_for_a_stage_and_so_does_a_failure(behind: Behind, read: bool) -> None:
    behind.plan(0, behind.channel.batch(1))
    if read:
        behind.commit(0)
        behind.plan(1, 0)

    def meanwhile() -> Iterator[None]:
        yield
        yield
        raise Refused("stopped")

    with pytest.raises(Refused, match="stopped"):
        behind.read_all(meanwhile())
