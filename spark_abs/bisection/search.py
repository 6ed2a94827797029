"""Bisection over moments of which some can no longer be read: pure code.

It asks the ends, and then halves what is between a moment that is known to be good and a later one that is
known to be bad. So it ends with two neighbours that were both asked, whatever the answers to others would be.
If data stay bad once they are bad, this is the only change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """Where the answer changes; all moments in between, if there are any, cannot be read."""

    good: int | None
    """The last moment that is good; None if the oldest one that can be read is bad."""
    bad: int | None
    """The first moment that is bad; None if the newest one that can be read is good."""


def first_change(count: int, is_readable: Callable[[int], bool], is_bad: Callable[[int], bool]) -> Change:
    """Find where moments become bad.

    For n moments it asks at most log2(n) of them, rounded up, and the two ends.

    Args:
        count: how many moments there are; they are numbered from 0, the oldest.
        is_readable: says whether a moment can be asked. Should be cheap. Is called once for a moment.
        is_bad: says whether a readable moment is bad. Is called once for a moment.
    """
    known: dict[int, bool] = {}

    def readable(at: int) -> bool:
        if at not in known:
            known[at] = is_readable(at)
        return known[at]

    newest = next((at for at in reversed(range(count)) if readable(at)), None)
    if newest is None:
        return Change(None, None)
    if not is_bad(newest):
        return Change(newest, None)
    oldest = _oldest(newest, readable)
    if oldest == newest or is_bad(oldest):
        return Change(None, oldest)
    good, bad = oldest, newest
    while (middle := _middle(good, bad, readable)) is not None:
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return Change(good, bad)


def _oldest(newest: int, readable: Callable[[int], bool]) -> int:
    """Return the oldest readable moment. If the first is not readable, those that are not are its neighbours.

    Old versions of tables are what a clean-up takes away.
    """
    if readable(0):
        return 0
    gone, there = 0, newest
    while there - gone > 1:
        middle = (gone + there) // 2
        if readable(middle):
            there = middle
        else:
            gone = middle
    return there


def _middle(good: int, bad: int, readable: Callable[[int], bool]) -> int | None:
    """Return the readable moment next to the middle of two others; None if there is none between them."""
    middle = (good + bad) // 2
    between = sorted(range(good + 1, bad), key=lambda at: abs(at - middle))
    return next((at for at in between if readable(at)), None)
