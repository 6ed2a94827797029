"""Named points at which a test may hold or end what runs; in a run nothing happens there."""

from __future__ import annotations

from collections.abc import Callable

Probe = Callable[[str], None]


def no_probe(point: str) -> None:
    """Do nothing: fault points are for tests."""
