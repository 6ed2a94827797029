"""How a run ends, of a job or of wrapped queries: in which order, and with what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.errors import Fenced
from spark_abs.model import RunId
from spark_abs.protocol.messages import StatusChanged
from spark_abs.protocol.trigger import RunStatus
from spark_abs.run import lifecycle as module
from spark_abs.run.lifecycle import Lifecycle, Termination

STEPS = ("lease held", "queries", "coordination", "copies", "finish", "lease let go")


class Life:
    """A run whose parts note down when it is their turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[object] = []
        self.statuses: list[tuple[RunStatus, str]] = []
        self.termination = Termination()
        monkeypatch.setattr(module, "end", lambda _, how: self.done.append(how))
        monkeypatch.setattr(module, "holding_lease", self.hold)

    @contextmanager
    def hold(self, *_: object) -> Iterator[None]:
        self.done.append("lease held")
        yield
        self.done.append("lease let go")

    def hear(self, event: StatusChanged) -> None:
        self.statuses.append((event.status, event.why))

    def live(self, watch: Callable[[], str], failing: str = "", **steps: Callable[[], None]) -> Life:
        """Live to the end."""

        def noted(step: str) -> Callable[[], None]:
            def call() -> None:
                self.done.append(step)
                steps.get(step, lambda: None)()

            return call

        coordination: Any = SimpleNamespace(put=self.hear, close=noted("coordination"))
        snapshots: Any = SimpleNamespace(close=noted("copies"))
        ctx: Any = SimpleNamespace(job="shop", root=None, run=RunId(7))
        lifecycle = Lifecycle(
            ctx,
            "job shop",
            self.termination,
            coordination,
            snapshots,
            watch=watch,
            stop_queries=noted("queries"),
            finish=noted("finish"),
            on_end=noted("on_end"),
        )
        for _ in range(2):  # what was told already is no news
            lifecycle.report(RunStatus.RUNNING, failing)
        lifecycle.start()
        assert self.termination.over.wait(30)
        return self


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(monkeypatch)


def fail(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def test_its_parts_end_one_after_the_other_and_then_its_end_is_recorded(life: Life) -> None:
    life.live(lambda: "finished")
    assert life.statuses == [(RunStatus.STOPPING, "")]
    assert life.done == [*STEPS, "finished", "on_end"]
    life.termination.raise_failure()


def test_what_fails_is_told_once_and_still_when_it_is_stopped(life: Life) -> None:
    life.live(lambda: "stopped", failing="stage 'a' failed")
    assert life.statuses == [
        (RunStatus.RUNNING, "stage 'a' failed"),
        (RunStatus.STOPPING, "stage 'a' failed"),
    ]


def test_an_error_ends_it_in_order_too_and_is_what_it_ended_with(life: Life) -> None:
    error = OSError("no route\nand more of it")
    life.live(fail(error))
    assert life.statuses == [(RunStatus.FAILED, "no route")]
    assert life.done == [*STEPS, error, "on_end"]
    with pytest.raises(OSError, match="no route"):
        life.termination.raise_failure()


def test_what_cannot_be_finished_fails_it(life: Life) -> None:
    error = OSError("not all was sent")
    life.live(lambda: "finished", finish=lambda: life.termination.fail(error))
    assert life.done[-2:] == [error, "on_end"]


@pytest.mark.parametrize("step", ["queries", "coordination", "copies", "finish", "on_end"])
def test_a_step_that_fails_fails_the_run_and_keeps_no_other_from_being_done(life: Life, step: str) -> None:
    """A query, the coordinator's thread or a lease that outlived it would be in the way of the next start."""
    error = OSError("gone")
    life.live(lambda: "stopped", "", **{step: fail(error)})
    assert life.done == [*STEPS, "stopped" if step == "on_end" else error, "on_end"]
    with pytest.raises(OSError, match="gone"):
        life.termination.raise_failure()


def test_the_first_failure_is_kept() -> None:
    termination = Termination()
    assert [termination.requested, termination.await_request(0)] == [False, False]
    termination.fail(OSError("first"))
    termination.fail(OSError("second"))
    assert [termination.requested, termination.await_request(0)] == [True, True]
    with pytest.raises(OSError, match="first"):
        termination.raise_failure()


def test_a_run_that_was_replaced_does_not_hold_the_lease_for_which_the_other_waits(life: Life) -> None:
    life.live(fail(Fenced("run 7 was replaced")))
    assert "lease held" not in life.done
    assert life.done[:4] == ["queries", "coordination", "copies", "finish"]
