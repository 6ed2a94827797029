"""Work on many files in threads: in one thread hashing, reading and writing would wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A file whose size is known."""

    @property
    def size(self) -> int:
        """Bytes."""


F = TypeVar("F", bound=Sized)
A = TypeVar("A")
R = TypeVar("R")

THREADS = min(8, 2 * (os.cpu_count() or 1))
_FEW, _SMALL = 16, 2**20
"""Below this number of files and of bytes, one thread is faster than starting several."""


def for_each(files: Sequence[F], work: Callable[[F], None], done: Callable[[F], None]) -> None:
    """Call `work` for each file in threads, started in order, and `done` in this thread as each ends.

    The first error of either is raised after all threads have ended; files not yet begun are skipped.
    """
    if len(files) <= _FEW and sum(file.size for file in files) <= _SMALL:
        for file in files:
            work(file)
            done(file)
        return
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="spark-abs-files")
    try:
        futures = {pool.submit(work, file): file for file in files}
        for future in as_completed(futures):
            future.result()
            done(futures[future])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_threads(work: Callable[[A], R], given: Iterable[A]) -> list[R]:
    """Call `work` for each in threads; return the results in order. The first error is raised after all."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="spark-abs-files") as pool:
        return list(pool.map(work, given))
