"""Clean-ups after checkpoints: the first at once, others after a pause, all that ask meanwhile together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from spark_abs.errors import Fenced
from spark_abs.stages.housekeeping import PAUSES, Housekeeping


class Work:
    """A clean-up, and a clock that says the given times in turn, the last one from then on.

    It is asked before a clean-up may begin, at its beginning and at its end.
    """

    def __init__(self, *outcomes: Exception | None, times: Iterable[float] = (0.0,)) -> None:
        self.done, self.times = 0, list(times)
        self.outcomes = list(outcomes)
        self.each = threading.Semaphore(0)
        self.failures: list[Exception] = []

    def clock(self) -> float:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]

    def clean(self) -> None:
        self.done += 1
        self.each.release()
        if self.outcomes and (outcome := self.outcomes.pop(0)) is not None:
            raise outcome

    def await_next(self) -> None:
        assert self.each.acquire(timeout=30)


@contextmanager
def keeping(work: Work) -> Iterator[Housekeeping]:
    found = Housekeeping(work.clean, work.failures.append, work.clock)
    try:
        yield found
    finally:
        found.close()


def test_the_first_clean_up_begins_at_once_and_the_next_is_put_off() -> None:
    work = Work(times=[0, 0, 1000])
    with keeping(work) as housekeeping:
        housekeeping.ask()
        work.await_next()
        for _ in range(5):
            housekeeping.ask()
        assert work.done == 1
    assert work.done == 2, "those that were put off are done together at the end"


def test_a_clean_up_that_takes_no_time_is_not_put_off() -> None:
    work = Work()
    with keeping(work) as housekeeping:
        for _ in range(3):
            housekeeping.ask()
            work.await_next()
    assert work.done == 3


def test_nothing_is_done_at_the_end_that_was_not_asked_for() -> None:
    work = Work()
    with keeping(work):
        pass
    assert work.done == 0


@pytest.mark.parametrize("error", [OSError("no store"), ValueError("a fault")])
def test_a_clean_up_that_failed_is_tried_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    work = Work(error)
    with keeping(work) as housekeeping:
        housekeeping.ask()
        work.await_next()
        housekeeping.ask()
        work.await_next()
    assert (work.done, work.failures) == (2, [])
    assert "it is tried again after the next checkpoint" in caplog.text


def test_a_fenced_run_is_told() -> None:
    fence = Fenced("a newer run")
    work = Work(fence)
    with keeping(work) as housekeeping:
        housekeeping.ask()
        work.await_next()
    assert work.failures == [fence]


def test_a_pause_follows_from_the_time_that_the_clean_up_took() -> None:
    work = Work(times=[0, 0, 0.5, 0.5 + PAUSES * 0.5])
    with keeping(work) as housekeeping:
        housekeeping.ask()
        work.await_next()
        housekeeping.ask()
        work.await_next()
    assert work.done == 2
