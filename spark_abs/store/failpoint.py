"""Named points at which a test may hold or end what runs; in a run nothing happens there."""

from __future__ import annotations

from collections.abc import Callable

Failpoint = Callable[[str], None]


def no_failpoint(point: str) -> None:
    """Do nothing: fault points are for tests."""
