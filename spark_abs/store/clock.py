"""The wall clock, as it is written to storage."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return the wall clock in milliseconds since 1970."""
    return int(time.time() * 1000)
