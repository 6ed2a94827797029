"""Whose turn it is: what keeps a batch from beginning, and that a stop gets through all of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_abs.errors import StageStopped
from spark_abs.model import BatchId, CheckpointId
from spark_abs.stages.batch_lock import BatchLock


def begin(turns: BatchLock, permitted: threading.Event, asked: threading.Event) -> str:
    def may_begin() -> bool:
        asked.set()
        return permitted.is_set()

    try:
        with turns.batch(BatchId(1), may_begin):
            return "begun"
    except StageStopped:
        return "stopped"


def test_a_batch_that_waits_is_asked_for_again_and_again() -> None:
    turns, permitted, asked = BatchLock(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(begin, turns, permitted, asked)
        assert asked.wait(10)
        permitted.set()
        assert batch.result(10) == "begun"


@pytest.mark.parametrize("held", [False, True])
def test_a_stop_ends_the_waiting(held: bool) -> None:
    """For credit, captures, or while the stage is held: the batch does not begin any more."""
    turns, permitted, asked = BatchLock(), threading.Event(), threading.Event()
    if held:
        turns.block(CheckpointId(1))
        permitted.set()
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(begin, turns, permitted, asked)
        assert asked.wait(10)
        turns.stop()
        assert batch.result(10) == "stopped"


def test_a_query_that_others_stop_does_not_wait_for_its_turn() -> None:
    turns, stopped, asked = BatchLock(), threading.Event(), threading.Event()
    turns.is_stopped = stopped.is_set
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(begin, turns, threading.Event(), asked)
        assert asked.wait(10)
        stopped.set()
        assert batch.result(10) == "stopped"
        turns.block(CheckpointId(1))
        assert pool.submit(begin, turns, threading.Event(), asked).result(10) == "stopped"


def test_nobody_waits_for_a_look_at_the_store() -> None:
    """While the question whether a batch may begin is being answered, the agent has its turn."""
    turns, answer, asked = BatchLock(), threading.Event(), threading.Event()

    def may_begin() -> bool:
        asked.set()
        return answer.wait(10)

    def batch() -> None:
        with turns.batch(BatchId(1), may_begin):
            pass

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(batch)
        assert asked.wait(10)
        with turns.agent() as mine:
            assert mine
        answer.set()
        waiting.result(10)


def test_each_block_holds_until_it_is_taken_back() -> None:
    """The end of a loop may be looked at while an exact savepoint holds a stage."""
    turns, permitted, asked = BatchLock(), threading.Event(), threading.Event()
    permitted.set()
    turns.block(CheckpointId(4))
    turns.block(CheckpointId(5))
    successor = BatchLock()
    successor.succeed(turns)
    for lock in (turns, successor):
        lock.unblock(CheckpointId(5))
        with ThreadPoolExecutor(1) as pool:
            batch = pool.submit(begin, lock, permitted, asked)
            with pytest.raises(TimeoutError):
                batch.result(0.2)
            lock.unblock(CheckpointId(4))
            assert batch.result(10) == "begun"
