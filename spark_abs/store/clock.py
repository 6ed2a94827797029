"""The wall clock, as it is written to storage, and one that decisions of a run go by."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return the wall clock in milliseconds since 1970."""
    return int(time.time() * 1000)


def steady_ms() -> int:
    """Return milliseconds by a clock of this process that nobody sets: what is due comes in time."""
    return int(time.monotonic() * 1000)
