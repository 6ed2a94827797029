"""The trigger decision (P2, P3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_abs.model import CheckpointKind
from spark_abs.protocol.trigger import (
    Past,
    Request,
    RunStatus,
    Trigger,
    TriggerSettings,
    WaitUntil,
    decide,
)

SETTINGS = TriggerSettings(interval_ms=100, min_pause_ms=40, timeout_ms=1_000)
PLAIN = Request("r0", CheckpointKind.CHECKPOINT)
SAVEPOINT = Request("r1", CheckpointKind.SAVEPOINT, "mine")
STOP = Request("r2", CheckpointKind.SYNC_SAVEPOINT)


def test_the_first_comes_one_interval_after_the_start() -> None:
    found = decide(99, RunStatus.RUNNING, SETTINGS, (), busy=False, past=Past())
    assert found == WaitUntil(100)


def test_it_triggers_when_the_interval_is_over() -> None:
    assert decide(100, RunStatus.RUNNING, SETTINGS, (), busy=False, past=Past()) == Trigger(None)


def test_the_interval_runs_from_trigger_to_trigger() -> None:
    past = Past(0, triggered_ms=150, decided_ms=160)
    assert decide(200, RunStatus.RUNNING, SETTINGS, (), busy=False, past=past) == WaitUntil(250)


def test_the_pause_wins_over_the_interval() -> None:
    """A checkpoint that took long is not followed by the next at once."""
    past = Past(0, triggered_ms=100, decided_ms=290)  # the interval was over at 200
    assert decide(300, RunStatus.RUNNING, SETTINGS, (), busy=False, past=past) == WaitUntil(330)


def test_one_is_claimed_at_a_time() -> None:
    found = decide(10_000, RunStatus.RUNNING, SETTINGS, (SAVEPOINT,), busy=True, past=Past())
    assert found == WaitUntil(None)


@pytest.mark.parametrize(
    ("most", "pending", "begins"), [(1, 0, True), (1, 1, False), (3, 2, True), (3, 3, False)]
)
def test_no_more_are_open_at_once_than_allowed(most: int, pending: int, begins: bool) -> None:
    """Periodic and requested ones alike."""
    settings = replace(SETTINGS, max_concurrent=most)
    periodic = decide(10_000, RunStatus.RUNNING, settings, (), busy=False, past=Past(), pending=pending)
    asked = decide(10_000, RunStatus.RUNNING, settings, (PLAIN,), busy=False, past=Past(), pending=pending)
    expected = (Trigger(None), Trigger(PLAIN)) if begins else (WaitUntil(None), WaitUntil(None))
    assert (periodic, asked) == expected


def test_a_savepoint_waits_for_no_place() -> None:
    """And goes before a checkpoint that was asked for earlier."""
    found = decide(5, RunStatus.RUNNING, SETTINGS, (PLAIN, SAVEPOINT), busy=False, past=Past(), pending=1)
    assert found == Trigger(SAVEPOINT)


def test_with_several_open_the_pause_still_runs_from_the_newest_outcome() -> None:
    settings = replace(SETTINGS, max_concurrent=3)
    past = Past(0, triggered_ms=100, decided_ms=290)
    assert decide(300, RunStatus.RUNNING, settings, (), busy=False, past=past, pending=1) == WaitUntil(330)


def test_a_request_waits_for_neither_interval_nor_pause() -> None:
    past = Past(0, triggered_ms=10, decided_ms=20)
    assert decide(21, RunStatus.RUNNING, SETTINGS, (SAVEPOINT,), busy=False, past=past) == Trigger(SAVEPOINT)


def test_requests_are_served_in_order() -> None:
    assert decide(5, RunStatus.RUNNING, SETTINGS, (STOP, SAVEPOINT), busy=False, past=Past()) == Trigger(STOP)


def test_without_an_interval_only_requests_trigger() -> None:
    on_demand = replace(SETTINGS, interval_ms=None)
    assert decide(10**9, RunStatus.RUNNING, on_demand, (), busy=False, past=Past()) == WaitUntil(None)


@pytest.mark.parametrize("status", [s for s in RunStatus if s is not RunStatus.RUNNING])
def test_nothing_triggers_by_itself_unless_the_job_runs(status: RunStatus) -> None:
    assert decide(10**9, status, SETTINGS, (SAVEPOINT,), busy=False, past=Past()) == WaitUntil(None)


def test_a_stopping_job_takes_its_own_savepoint() -> None:
    found = decide(5, RunStatus.STOPPING, SETTINGS, (SAVEPOINT, STOP), busy=False, past=Past())
    assert found == Trigger(STOP)
