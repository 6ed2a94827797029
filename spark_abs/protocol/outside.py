"""Sinks outside: the rows to send next, and the mark of a sink after a restore.

Rows for such a sink lie in the channel of an output. An epoch is what lies there between the cuts of two
completed checkpoints; it is sent whole, after the completion, and committed together with its mark. So a
crash at any moment leaves one of two things: the mark before it and none of its rows, or its mark and all.
The channel holds what has not been sent, so no transaction stays open meanwhile.

A sink may also take each batch as an epoch of its own, as soon as its entry is in the channel: an entry is
never withdrawn but by going back to a checkpoint, and then the mark says that it was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    Branch,
    CheckpointId,
    RunId,
    Version,
    counts,
)
from spark_abs.protocol.changes import FIRST_ENTRY


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a sink has committed: all that counts in its channel up to entry `version`."""

    attempt: AttemptId
    """Whose entry that is."""
    checkpoint: CheckpointId
    """The checkpoint whose cut it is, or of an entry between two cuts the newest one before it that was known
    to be complete; 0 where the channel begins."""
    version: Version


@dataclass(frozen=True, slots=True)
class Owner:
    """Who sends: one sink of one root, in one run. Run numbers only grow: a newer one fences older ones."""

    root: str
    """The identity of the root."""
    job: str
    sink: str
    run: RunId


@dataclass(frozen=True, slots=True)
class Epoch:
    """What is committed at once: the entries after `after` up to those of `mark`, that mark included."""

    owner: Owner
    after: Mark
    mark: Mark
    floor: Version = FIRST_ENTRY
    """No restore goes back to before this entry any more: what was kept to undo epochs up to it may go."""
    first: bool = False
    """Whether nothing was ever committed: the sink has no mark yet."""
    savepoint: str | None = None
    """The name of the savepoint that the epoch ends with, None if that is no savepoint."""
    asked: tuple[Version, ...] = ()
    """The entries to which the kept checkpoints go back, oldest first, as they were some time ago; empty if
    they are not known. What has been completed since goes back to a later entry."""

    def may_return_to(self, version: Version) -> bool:
        """Say whether a restore may go back to an entry with which an epoch has ended."""
        if not self.asked:
            return version >= self.floor
        return version in self.asked or version > self.asked[-1]


def next_epochs(mark: Mark, cuts: Iterable[Mark], path: Sequence[Branch]) -> tuple[tuple[Mark, Mark], ...]:
    """Return the epochs to send, oldest first, each with the mark before it and its own mark.

    Args:
        mark: what the sink has committed; it counts on the path.
        cuts: the cuts of completed checkpoints in the channel, of abandoned attempts too, in any order.
        path: what counts in the channel, see `channel_path`.
    """
    ahead = {c.version: c for c in cuts if c.version > mark.version and is_on(path, c)}
    ordered = [ahead[version] for version in sorted(ahead)]
    return tuple(zip([mark, *ordered], ordered, strict=False))


def next_batches(
    mark: Mark, entries: Iterable[tuple[AttemptId, Version]], cuts: Iterable[Mark], path: Sequence[Branch]
) -> tuple[tuple[Mark, Mark], ...]:
    """Return what is to be sent to a sink that takes each batch: as `next_epochs`, entry by entry.

    Also a cut after the last entry is returned, without rows: its mark lets what is older go. No epoch has
    an entry in its middle, so one can go back to any cut between two of them, complete by now or later.

    Args:
        mark: what the sink has committed; it counts on the path.
        entries: those of the channel that hold rows.
        cuts: the cuts of completed checkpoints in the channel, in any order.
        path: what counts in the channel, see `channel_path`.
    """
    mine = sorted((c for c in cuts if is_on(path, c)), key=lambda c: (c.version, -c.checkpoint))
    ahead = {v: Mark(a, NO_EPOCH, v) for a, v in entries if v > mark.version and counts(path, a, v)}
    ahead |= {c.version: c for c in mine if c.version > mark.version}
    found, before, newest = [], mark, mark.checkpoint
    for version in sorted(ahead):
        while mine and mine[0].version <= version:
            newest = max(newest, mine.pop(0).checkpoint)
        at = replace(ahead[version], checkpoint=newest)
        found.append((before, at))
        before = at
    return tuple(found)


def is_on(path: Sequence[Branch], mark: Mark) -> bool:
    """Say whether all rows up to a mark count on a path."""
    return counts(path, mark.attempt, mark.version)


def may_miss(path: Sequence[Branch], mark: Mark, oldest: AttemptId) -> bool:
    """Say whether entries after a mark that count may be gone, where the next ones are.

    Args:
        path: what counts in the channel.
        mark: what the sink has committed.
        oldest: whose the oldest entry is that is left: what is gone is of that attempt or of older ones.
    """
    return any(b.attempt <= oldest and (b.until is None or b.until > mark.version) for b in path)


def line_to(path: Sequence[Branch], mark: Mark) -> tuple[Branch, ...]:
    """Cut the path of a mark's attempt off after the mark."""
    return (*path[:-1], Branch(mark.attempt, mark.version))


def meeting(line: Sequence[Branch], path: Sequence[Branch]) -> Mark:
    """Return the last point of `line` that counts on `path`, as a mark of no checkpoint.

    Where they have nothing in common that is the beginning of the newest attempt of `path`.
    """
    found = Mark(path[-1].attempt, NO_EPOCH, FIRST_ENTRY)
    for mine, other in zip(line, path, strict=False):
        if mine.attempt != other.attempt:
            break
        until = min(v for v in (mine.until, other.until) if v is not None)
        if until >= FIRST_ENTRY:
            found = Mark(mine.attempt, NO_EPOCH, until)
    return found


def mark_after_rollback(
    mark: Mark, line: Sequence[Branch], path: Sequence[Branch], cuts: Iterable[Mark]
) -> Mark:
    """Return a sink's mark after the rows that do not count on `path` are undone.

    Args:
        mark: what it has committed.
        line: the path to it, see `line_to`.
        path: what counts from now on.
        cuts: known cuts, for the checkpoint's id.
    """
    if is_on(path, mark):
        return mark
    met = meeting(line, path)
    ids = (c.checkpoint for c in cuts if (c.attempt, c.version) == (met.attempt, met.version))
    return Mark(met.attempt, max(ids, default=NO_EPOCH), met.version)


def sent_behind(
    back: Mark, mark: Mark, line: Sequence[Branch], cuts: Iterable[Mark]
) -> tuple[CheckpointId, ...]:
    """Return the checkpoints whose epochs a sink has committed after `back`, as far as they are known.

    None of them if it has committed only batches after it, whose checkpoint never was complete.
    """
    mine = [c for c in cuts if is_on(line, c)]
    ids = {c.checkpoint for c in mine if back.version < c.version <= mark.version}
    before = {c.checkpoint for c in mine if c.version <= back.version} | {back.checkpoint}
    if mark.version > back.version and mark.checkpoint > max(before):
        ids.add(mark.checkpoint)
    return tuple(sorted(ids))


def asked_for(line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> tuple[Version, ...]:
    """Return the entries that a way to a kept checkpoint takes a sink back to, each once, oldest first.

    Args:
        line: the path to what a sink has committed.
        kept: the path to the cut of each checkpoint that one may go back to.
    """
    return tuple(sorted({meeting(line, target).version for target in kept}))


def undone_from(line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> Version:
    """Return the entry up to which nothing is undone any more, whichever kept checkpoint one goes back to.

    On the way to an abandoned branch that is the fork, which may lie before every kept checkpoint.

    Args:
        line: the path to what a sink has committed.
        kept: the path to the cut of each checkpoint that one may go back to.
    """
    return next(iter(asked_for(line, kept)), FIRST_ENTRY)


def needed_from(mark: Mark, line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> Version:
    """Return the entry after which a sink, or one that goes back to a kept checkpoint, may still read.

    Args:
        mark: what it has committed.
        line: the path to it.
        kept: the path to the cut of each checkpoint that one may go back to.
    """
    needed = mark.version
    for target in kept:
        until = target[-1].until
        met = meeting(line, target).version
        if until is not None and met < until:
            needed = min(needed, met)
    return needed
