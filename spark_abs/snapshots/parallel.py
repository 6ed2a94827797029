"""Work on many files at a time: hashing, reading and writing them wait for each other in one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A file whose size is known."""

    @property
    def size(self) -> int:
        """Bytes."""


F = TypeVar("F", bound=Sized)

THREADS = min(8, 2 * (os.cpu_count() or 1))
_FEW, _SMALL = 16, 2**20
"""So few files, and so few bytes in all, are sooner done than threads are started for them."""


def for_each(files: Sequence[F], work: Callable[[F], None], done: Callable[[F], None]) -> None:
    """Call `work` for every file in threads, begun in their order, and `done` in this one as each ends.

    The first error is raised, from either, when no thread is at work any more; what had not begun is left.
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
