"""Which thread of a stage does what: a batch and the agent of an idle stage never commit at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spark_abs.model import CheckpointId
from spark_abs.store.root import Root
from tests.channel_support import position
from tests.unit.test_stage_modes import UNALIGNED, Both

PATIENCE_S = 10


class OneAtATime:
    """Watches a stage's writer: who is in it while somebody else is, and stops whoever shall be stopped."""

    def __init__(self, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used_by = list[str]()
        self.together = list[tuple[str, str]]()
        self._inside: str | None = None
        self.arrived, self.go = threading.Event(), threading.Event()
        self.stops: str | None = None
        (writer,) = both.runner._outputs.channels
        for owner, names in (
            (writer, ("commit_batch", "commit_barrier", "refresh")),
            (writer.log, ("after", "commit_of")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            me = threading.current_thread().name
            if self._inside not in (None, me):
                self.together.append((str(self._inside), me))
            before, self._inside = self._inside, me
            self.used_by.append(me)
            try:
                if name == self.stops:
                    self.arrived.set()
                    assert self.go.wait(PATIENCE_S)
                return call(*given, **named)
            finally:
                self._inside = before

        return watched


@pytest.fixture
def both(tmp_path: Path) -> Both:
    made = Both(Root(str(tmp_path)))
    made.batch(0, position("a.main", 1), position("b.main", 1))
    return made


def in_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def test_the_agent_goes_away_while_a_batch_is_at_work(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = OneAtATime(both, monkeypatch)

    def look_on() -> None:
        """Do what the coordinator's thread does with a stage."""
        both.runner.offer(UNALIGNED)
        both.runner.offer_idle()
        both.runner.checkpoint_progress(UNALIGNED)
        both.runner.declined(None)
        both.runner.notify(CheckpointId(7), completed=False)

    both.during = lambda: in_thread("coordinator", look_on).join(PATIENCE_S)
    both.batch(1, position("a.main", 2), position("b.main", 2))
    assert set(watch.used_by) == {threading.current_thread().name}
    assert both.cuts() == [(1, 1)]  # the batch has taken the barrier


@pytest.mark.parametrize("at", ["refresh", "commit_barrier"])
def test_a_batch_waits_until_the_agent_has_committed(
    both: Both, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    watch = OneAtATime(both, monkeypatch)
    both.runner.offer(UNALIGNED)
    watch.stops = at
    agent = in_thread("coordinator", both.runner.offer_idle)
    assert watch.arrived.wait(PATIENCE_S)
    watch.stops = None
    begun = threading.Event()
    both.during = begun.set
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(both.batch, 1, position("a.main", 2), position("b.main", 2))
        assert not begun.wait(0.2)  # without a turn of its own it has begun by now
        watch.go.set()
        batch.result(PATIENCE_S)
    agent.join(PATIENCE_S)
    assert watch.together == []
    # What was planned while the agent looked for it is seen by it: then the batch carries the barrier.
    assert both.cuts() in ([(1, 0)], [(1, 1)])


def test_without_turns_both_are_in_the_writer_at_once(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it."""

    @contextmanager
    def anybody() -> Any:
        yield True

    watch = OneAtATime(both, monkeypatch)
    monkeypatch.setattr(both.runner.batch_lock, "agent", anybody)
    both.runner.offer(UNALIGNED)
    watch.stops = "commit_barrier"
    agent = in_thread("coordinator", both.runner.offer_idle)
    assert watch.arrived.wait(PATIENCE_S)
    watch.stops = None
    with ThreadPoolExecutor(1) as pool:
        pool.submit(both.batch, 1, position("a.main", 2), position("b.main", 2)).exception(PATIENCE_S)
    watch.go.set()
    agent.join(PATIENCE_S)
    assert watch.together
