"""Work on several files at a time ends as a whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_abs.manifest import Location, StoredFile
from spark_abs.snapshots import parallel
from spark_abs.snapshots.parallel import for_each


def files(count: int, size: int = 2**20) -> list[StoredFile]:
    return [StoredFile(str(number), size, "", Location("", 0, 1)) for number in range(count)]


def test_files_are_worked_on_beside_each_other_and_told_of_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No file could end if only one were worked on."""
    monkeypatch.setattr(parallel, "THREADS", 3)
    together, told = threading.Barrier(3, timeout=30), list[tuple[str, threading.Thread]]()

    def work(_: StoredFile) -> None:
        together.wait()

    for_each(files(3), work, lambda file: told.append((file.path, threading.current_thread())))
    assert sorted(path for path, _ in told) == ["0", "1", "2"]
    assert {thread for _, thread in told} == {threading.current_thread()}


def test_a_few_small_files_need_no_threads() -> None:
    workers = set[threading.Thread]()
    for_each(files(3, 10), lambda _: workers.add(threading.current_thread()), lambda _: None)
    assert workers == {threading.current_thread()}


def test_an_error_is_raised_when_nobody_is_at_work_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is at work then ends; nobody begins another file."""
    both, seen, ended = threading.Barrier(2, timeout=30), threading.Event(), list[str]()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            seen.set()
            super().shutdown(wait=wait)

    def work(file: StoredFile) -> None:
        if file.path in ("0", "1"):
            both.wait()
        if file.path == "0":
            raise OSError("no space")
        assert seen.wait(30)
        ended.append(file.path)

    monkeypatch.setattr(parallel, "THREADS", 2)
    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Pool)
    with pytest.raises(OSError, match="no space"):
        for_each(files(100), work, lambda _: None)
    assert {"1"} <= set(ended) <= {"1", "2"}
    assert not [t for t in threading.enumerate() if t.name.startswith("spark-abs-files")]
