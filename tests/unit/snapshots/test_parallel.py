"""Work on several files at a time ends as a whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_abs.snapshots import parallel
from spark_abs.snapshots.parallel import for_each


def test_items_are_worked_on_beside_each_other_and_told_of_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No item could end if only one were worked on."""
    monkeypatch.setattr(parallel, "THREADS", 3)
    together, told = threading.Barrier(3, timeout=30), list[tuple[int, threading.Thread]]()

    def work(_: int) -> None:
        together.wait()

    for_each(range(3), work, lambda i: told.append((i, threading.current_thread())))
    assert sorted(i for i, _ in told) == [0, 1, 2]
    assert {thread for _, thread in told} == {threading.current_thread()}


def test_an_error_is_raised_when_nobody_is_at_work_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is at work then ends; nobody begins another item."""
    both, seen, ended = threading.Barrier(2, timeout=30), threading.Event(), list[int]()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            seen.set()
            super().shutdown(wait=wait)

    def work(item: int) -> None:
        if item < 2:
            both.wait()
        if item == 0:
            raise OSError("no space")
        assert seen.wait(30)
        ended.append(item)

    monkeypatch.setattr(parallel, "THREADS", 2)
    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Pool)
    with pytest.raises(OSError, match="no space"):
        for_each(range(100), work, lambda _: None)
    assert {1} <= set(ended) <= {1, 2}
    assert not [t for t in threading.enumerate() if t.name.startswith("spark-abs-files")]
