"""The checks of every sink that keeps a mark: is this run the newest, and is the mark the expected one.

Pure code. A sink reads its mark, under a lock or before a compare-and-set, and asks here if it may commit.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from spark_abs.errors import CommitConflict, Fenced, Refused
from spark_abs.protocol.outside import Epoch, Mark, Owner


class StoredMark(Protocol):
    """The mark of a sink as its kind stores it."""

    @property
    def run(self) -> int:
        """The newest run that has recovered the sink."""

    @property
    def mark(self) -> Mark | None:
        """What the sink has committed last, None for nothing."""


Stored = TypeVar("Stored", bound=StoredMark)


def refuse_replaced(owner: Owner, stored: StoredMark | None) -> None:
    """Refuse a run if a newer one has recovered the sink.

    Raises:
        Fenced: one has.
    """
    if stored is not None and stored.run > owner.run:
        raise Fenced(f"run {owner.run} of sink {owner.sink!r} was replaced by run {stored.run}")


def require_run(owner: Owner, stored: Stored | None) -> Stored:
    """Return the mark of a sink that the owner's run has recovered.

    Raises:
        CommitConflict: another run has, or none; `recover` comes before the next try.
    """
    if stored is None or stored.run != owner.run:
        raise mark_changed(owner, stored)
    return stored


def require_mark(epoch: Epoch, stored: Stored | None) -> Stored:
    """Return the mark of a sink that the epoch's run has recovered, if it is the one that the epoch follows.

    Raises:
        CommitConflict: another commit has taken place; `recover` comes before the next try.
    """
    known = require_run(epoch.owner, stored)
    if known.mark != (None if epoch.first else epoch.after):
        raise mark_changed(epoch.owner, stored)
    return known


def mark_changed(owner: Owner, stored: StoredMark | None) -> CommitConflict:
    """Return the error for a mark that another commit has changed."""
    return CommitConflict(f"the mark of sink {owner.sink!r} has changed since it was read: {stored}")


def refuse_kept(owner: Owner, why: str) -> None:
    """Refuse to take committed rows back, if `why_not` has a reason against it.

    Raises:
        Refused: it has.
    """
    if why:
        raise Refused(f"what sink {owner.sink!r} has committed cannot be taken back: {why}")


def refuse_moved(owner: Owner, before: str, now: str) -> None:
    """Refuse a sink that is declared with another target than the one that its mark is about.

    Raises:
        Refused: the targets differ.
    """
    if before != now:
        raise Refused(
            f"sink {owner.sink!r} has written to {before}, and is now declared with {now}; its mark counts "
            f"only for {before}: give the sink another name, or declare it with {before} again"
        )
