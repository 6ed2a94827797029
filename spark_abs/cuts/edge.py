"""Whether a cut of a query that reads a table fits a cut of the query that writes it: pure code.

As in `cut.py`, but the commits of the writer need not be told from those of others: the version is known that
the table had between two batches of the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Stand(Enum):
    """How far a reader has read a table, compared with a cut of its writer."""

    ALIGNED = auto()
    """It has read exactly the rows that the table had at the cut."""
    BEHIND = auto()
    """It has rows of the cut to read."""
    BEYOND = auto()
    """It has read rows from after the cut: no later batch of it fits the cut."""


@dataclass(frozen=True, slots=True)
class ReadUntil:
    """How far a stream has read a table."""

    version: int
    """The first version that is not read to its end."""
    in_part: bool = False
    """Whether a part of that version is read; an initial snapshot that is not finished counts as such."""


def compare(read: ReadUntil, version: int, changes: Callable[[int], bool]) -> Stand:
    """Compare a position with the version of the table at the cut of its writer.

    Commits that change no rows count for neither side.

    Args:
        read: the position.
        version: the version, -1 if there was no table.
        changes: says whether a version has changed rows; True if that is not known any more.
    """
    if read.in_part:
        return Stand.BEHIND if read.version <= version else Stand.BEYOND
    if any(changes(number) for number in range(version, read.version - 1, -1)):
        return Stand.BEHIND
    if any(changes(number) for number in range(version + 1, read.version)):
        return Stand.BEYOND
    return Stand.ALIGNED


def together(stands: Iterable[Stand]) -> Stand:
    """Return where a query stands that reads a table through several sources, or several tables."""
    found = set(stands)
    if Stand.BEYOND in found:
        return Stand.BEYOND
    return Stand.BEHIND if Stand.BEHIND in found else Stand.ALIGNED
