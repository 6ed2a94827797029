"""The end of event time (P21): how a batch is planned for it, what is recorded, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.errors import DamageError, Fenced, UsageError
from spark_abs.model import AttemptId, ChannelId, CheckpointId, RunId, StageId
from spark_abs.plan.graph import JobGraph, PlanFacts, SinkDecl, StageDecl
from spark_abs.protocol.attempts import begin_attempt
from spark_abs.protocol.control import (
    ControlState,
    begin_drain,
    begin_job,
    begin_run,
)
from spark_abs.run.drain import Drain
from spark_abs.snapshots.layout import END_OF_TIME_MS, at_end_of_time, parse_offsets


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
    assert begin_attempt(state, AttemptId(1), CheckpointId(3), "", "host", 1, 0).attempt.drain is None


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
