"""Named points at which a test can pause or kill a run. Outside of tests they do nothing."""

from __future__ import annotations

from collections.abc import Callable

Failpoint = Callable[[str], None]


def no_failpoint(point: str) -> None:
    """Do nothing: fault points are for tests."""
