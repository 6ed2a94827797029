"""The base of sinks that keep their mark and the newest run beside their rows.

The object knows the mark that it stored last, and forgets it while a step is under way: after a step that
failed, nothing is committed before `recover` has read the mark again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from spark_abs.errors import CommitConflict, Fenced, Refused
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink


class StoredMark(Protocol):
    """The mark of a sink as its kind stores it."""

    @property
    def run(self) -> int:
        """The newest run that has recovered the sink."""

    @property
    def mark(self) -> Mark | None:
        """What the sink has committed last, None for nothing."""


Stored = TypeVar("Stored", bound=StoredMark)


class MarkedSink(TwoPhaseSink, Generic[Stored]):
    """A sink whose kind reads its mark, fences older runs, adds an epoch and goes back."""

    _known: Stored | None = None
    """The mark that this object stored last, while it may commit."""

    @abstractmethod
    def _read_mark(self, owner: Owner) -> Stored | None:
        """Read the stored mark; changes nothing."""

    @abstractmethod
    def _fence(self, owner: Owner) -> Stored:
        """Refuse older runs from now on, store the owner's run and return the mark. Errors as `recover`."""

    @abstractmethod
    def _add(self, epoch: Epoch, known: Stored, rows: Rows) -> Stored:
        """Commit the rows and the mark of an epoch at once, if the stored mark is the known one; return it.

        Raises:
            Fenced: a newer run has recovered the sink.
            CommitConflict: the stored mark is another one.
        """

    @abstractmethod
    def _go_back(self, owner: Owner, known: Stored, back: Mark, *, keep: bool) -> Stored:
        """Store an older mark, and unless `keep`, take back the rows after it. Errors as `_add`."""

    def mark(self, owner: Owner) -> Mark | None:
        """Return the mark; changes nothing."""
        stored = self._read_mark(owner)
        return None if stored is None else stored.mark

    def recover(self, owner: Owner) -> Mark | None:
        """Refuse older runs, and return the mark."""
        self._known = None
        known = self._known = self._fence(owner)
        return known.mark

    def commit(self, epoch: Epoch, rows: Rows) -> None:
        """Commit an epoch on top of the mark that is known."""
        known = require_mark(epoch, self._known)
        self._known = None
        self._known = self._add(epoch, known, rows)

    def abort(self, owner: Owner, back: Mark, *, keep: bool) -> None:
        """Go back to a mark, unless the sink is there or has committed nothing."""
        why = "" if keep else self.why_not(owner, back)
        if why:
            raise Refused(f"sink {owner.sink!r} cannot take back the rows that it has committed: {why}")
        if self._known is None or self._known.run != owner.run:
            self.recover(owner)
        known = require_run(owner, self._known)
        if self._is_at(known, back):
            return
        self._known = None
        self._known = self._go_back(owner, known, back, keep=keep)

    def _is_at(self, known: Stored, back: Mark) -> bool:
        """Say whether the sink has committed nothing after a mark."""
        return known.mark is None or known.mark == back

    def close(self) -> None:
        """Forget the mark; a kind with connections closes them, too."""
        self._known = None


def refuse_replaced(owner: Owner, stored: StoredMark | None) -> None:
    """Refuse a run if a newer run has recovered the sink.

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
    """Return the mark of a sink that the epoch's run has recovered, if the epoch follows that mark.

    Raises:
        CommitConflict: another commit has taken place; `recover` comes before the next try.
    """
    known = require_run(epoch.owner, stored)
    if known.mark != (None if epoch.first else epoch.after):
        raise mark_changed(epoch.owner, stored)
    return known


def require_unchanged(owner: Owner, known: Stored, stored: Stored | None) -> Stored:
    """Return the stored mark if it is the known one.

    Raises:
        Fenced: a newer run has recovered the sink.
        CommitConflict: another commit has taken place; `recover` comes before the next try.
    """
    refuse_replaced(owner, stored)
    if stored is None or (stored.run, stored.mark) != (known.run, known.mark):
        raise mark_changed(owner, stored)
    return stored


def mark_changed(owner: Owner, stored: StoredMark | None) -> CommitConflict:
    """Return the error for a mark that another commit has changed."""
    return CommitConflict(f"the mark of sink {owner.sink!r} has changed since it was read: {stored}")


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
