"""Work on many files at a time: hashing, reading and writing them wait for each other in one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")

THREADS = min(8, 2 * (os.cpu_count() or 1))


def for_each(items: Iterable[T], work: Callable[[T], None], done: Callable[[T], None]) -> None:
    """Call `work` for every item in threads, begun in their order, and `done` in this one as each ends.

    The first error is raised, from either, when no thread is at work any more; what had not begun is left.
    """
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="spark-abs-files")
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in as_completed(futures):
            future.result()
            done(futures[future])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
