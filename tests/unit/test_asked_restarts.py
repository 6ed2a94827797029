"""A restart that somebody asked for: after the batch under way, and answered once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.errors import UsageError
from spark_abs.model import BatchId, StageId
from spark_abs.protocol.messages import Answer
from spark_abs.run.asked_restarts import AskedRestarts

PAIR, TAIL = StageId("pair"), StageId("tail")


class Stage:
    """A running stage whose batch ends when the test says so."""

    def __init__(self) -> None:
        self.name, self.is_quiet, self.refuses = PAIR, False, 0
        self.restarts = 0
        self.stopped = 0
        self.query = SimpleNamespace(stop=self._stop)
        self.error: Exception | None = None
        self.runner = SimpleNamespace(
            batch_lock=SimpleNamespace(refuse=self._refuse),
            native=SimpleNamespace(newest_planned=lambda: BatchId(7)),
        )

    def _refuse(self) -> None:
        self.refuses += 1

    def _stop(self) -> None:
        self.stopped += 1

    def restart(self, _: object) -> None:
        if self.error is not None:
            raise self.error
        self.restarts += 1


class Run:
    def __init__(self) -> None:
        self.stage = Stage()
        self.answers: list[Answer] = []
        self.taken: list[object] = []
        self.waits: bool | None = None
        """Whether the failed stage starts when it is told to; None if it has not failed."""
        self.drained = False
        stages: Any = {PAIR: self.stage}
        self.asked = AskedRestarts(stages, self._refuse)

    def _refuse(self) -> None:
        if self.drained:
            raise UsageError("the job is being drained")

    def look(self) -> list[tuple[str, bool, str]]:
        """Let the watching thread look once; return the answers so far."""
        recovery: Any = SimpleNamespace(
            waits=lambda _: self.waits is not None,
            start_now=lambda _: bool(self.waits),
            take=self.taken.append,
        )
        coordination: Any = SimpleNamespace(answer=self.answers.append)
        self.asked.look(recovery, coordination)
        return [(a.request_id, a.ok, a.message) for a in self.answers]


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_stage_is_restarted_when_its_batch_has_ended(run: Run) -> None:
    run.asked.ask(PAIR, "one")
    assert (run.look(), run.stage.refuses, run.asked.pending) == ([], 1, True)
    with pytest.raises(UsageError, match="stage 'pair' is being restarted already"):
        run.asked.ask(PAIR, "two")
    run.stage.is_quiet = True
    assert run.look() == run.look() == [("one", True, "stage 'pair' runs again")]
    assert (run.stage.stopped, run.stage.restarts, run.asked.pending) == (1, 1, False)


@pytest.mark.parametrize("starts", [True, False])
def test_a_failed_stage_does_not_wait_for_its_delay(run: Run, starts: bool) -> None:
    run.waits = starts
    run.asked.ask(PAIR, "one")
    said = "runs again" if starts else "could not be started: it failed again at its start"
    assert run.look() == [("one", starts, f"stage 'pair' {said}")]
    assert (run.stage.stopped, run.stage.restarts, run.stage.refuses) == (0, 0, 0)


def test_a_stage_that_cannot_be_started_is_said_and_left_to_the_policy(run: Run) -> None:
    run.stage.is_quiet, run.stage.error = True, OSError("no route")
    run.asked.ask(PAIR, "one")
    assert run.look() == [("one", False, "stage 'pair' could not be started: OSError: no route")]
    assert len(run.taken) == 1


@pytest.mark.parametrize("waits", [None, True])
def test_what_a_stage_is_started_with_changes_while_it_runs_no_batch(run: Run, waits: bool | None) -> None:
    quiet: list[tuple[bool, int]] = []

    def change() -> str:
        quiet.append((run.stage.is_quiet, run.stage.restarts))
        return "it reads less"

    run.waits = waits
    run.asked.ask(PAIR, "one", change)
    if waits is None:
        assert (run.look(), quiet) == ([], [])
    run.stage.is_quiet = True
    assert run.look() == [("one", True, "it reads less; stage 'pair' runs again")]
    assert quiet == [(True, 0)]


@pytest.mark.parametrize(("waits", "restarts"), [(None, 1), (True, 0)])
def test_a_refused_change_leaves_a_stage_as_it_was(run: Run, waits: bool | None, restarts: int) -> None:
    """One that works begins no batch any more, and so it is restarted; one that has failed waits on."""

    def change() -> str:
        raise UsageError("the batch has ended")

    run.stage.is_quiet, run.waits = True, waits
    run.asked.ask(PAIR, "one", change)
    assert run.look() == [("one", False, "the batch has ended")]
    assert (run.stage.restarts, run.asked.pending) == (restarts, False)


def test_no_unknown_stage_and_none_of_a_run_that_ends_is_restarted(run: Run) -> None:
    with pytest.raises(UsageError, match="no stage 'tail': the job has pair"):
        run.asked.ask(TAIL, "one")
    run.drained = True
    with pytest.raises(UsageError, match="is being drained"):
        run.asked.ask(PAIR, "one")
    assert (run.look(), run.stage.refuses) == ([], 0)
