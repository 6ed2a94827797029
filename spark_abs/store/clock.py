"""The wall clock, for stored times, and a monotonic clock, for decisions of a run."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return the wall clock in milliseconds since 1970."""
    return int(time.time() * 1000)


def steady_ms() -> int:
    """Return milliseconds of a monotonic clock of this process."""
    return int(time.monotonic() * 1000)
