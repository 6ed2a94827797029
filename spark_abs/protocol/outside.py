"""Sinks outside: the rows to send next, and the mark of a sink after a restore.

Rows for such a sink are in the channel of an output. An epoch has the rows between the cuts of two completed
checkpoints. It is sent as a whole after the completion, and committed together with its mark. So after a
crash the sink has either the earlier mark and no rows of the epoch, or the epoch's mark and all its rows. The
channel holds the rows that are not sent yet, so no transaction stays open meanwhile.

A sink may also take each batch as a separate epoch, as soon as the entry is in the channel. Only a restore
withdraws an entry, and then the mark shows that the entry was sent.
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
    """How far a sink has committed: all valid entries of its channel up to `version`."""

    attempt: AttemptId
    """The attempt of that entry."""
    checkpoint: CheckpointId
    """The checkpoint with its cut at that entry.

    Between two cuts, the newest earlier checkpoint known as complete; 0 at the beginning of the channel.
    """
    version: Version


@dataclass(frozen=True, slots=True)
class Owner:
    """The sender: one sink of one root in one run. Run numbers only grow: a newer run fences older ones."""

    root: str
    """The identity of the root."""
    job: str
    sink: str
    run: RunId


@dataclass(frozen=True, slots=True)
class Epoch:
    """A unit of commit: the entries after `after` up to `mark`, and `mark` itself."""

    owner: Owner
    after: Mark
    mark: Mark
    floor: Version = FIRST_ENTRY
    """No restore can go back to before this entry: data for undoing earlier epochs may be deleted."""
    first: bool = False
    """Whether the sink has committed nothing yet and so has no mark."""
    savepoint: str | None = None
    """The name of the savepoint that ends the epoch; None if a checkpoint ends it."""
    asked: tuple[Version, ...] = ()
    """The entries at the cuts of retained checkpoints, oldest first, as known some time ago.

    Empty if unknown.

    Checkpoints completed later have later entries.
    """

    def may_return_to(self, version: Version) -> bool:
        """Say whether a restore may go back to the end of an epoch."""
        if not self.asked:
            return version >= self.floor
        return version in self.asked or version > self.asked[-1]


def next_epochs(mark: Mark, cuts: Iterable[Mark], path: Sequence[Branch]) -> tuple[tuple[Mark, Mark], ...]:
    """Return the epochs to send, oldest first, each with the mark before it and its own mark.

    Args:
        mark: the mark of the sink; it is on the path.
        cuts: the cuts of completed checkpoints in the channel, of abandoned attempts too, in any order.
        path: the valid path of the channel, see `channel_path`.
    """
    ahead = {c.version: c for c in cuts if c.version > mark.version and is_on(path, c)}
    ordered = [ahead[version] for version in sorted(ahead)]
    return tuple(zip([mark, *ordered], ordered, strict=False))


def next_batches(
    mark: Mark, entries: Iterable[tuple[AttemptId, Version]], cuts: Iterable[Mark], path: Sequence[Branch]
) -> tuple[tuple[Mark, Mark], ...]:
    """Return the epochs for a sink that takes each batch: as `next_epochs`, entry by entry.

    A cut after the last entry is returned as an epoch without rows: its mark lets older data be deleted.
    Every epoch is one entry, so a restore can go back to any cut between entries, whenever its checkpoint
    completes.

    Args:
        mark: the mark of the sink; it is on the path.
        entries: the entries of the channel with rows.
        cuts: the cuts of completed checkpoints in the channel, in any order.
        path: the valid path of the channel, see `channel_path`.
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
    """Say whether all rows up to a mark are valid on a path."""
    return counts(path, mark.attempt, mark.version)


def may_miss(path: Sequence[Branch], mark: Mark, oldest: AttemptId) -> bool:
    """Say whether valid entries right after a mark may have been removed.

    Args:
        path: the valid path of the channel.
        mark: the mark of the sink.
        oldest: the attempt of the oldest entry left: removed entries are of this attempt or older ones.
    """
    return any(b.attempt <= oldest and (b.until is None or b.until > mark.version) for b in path)


def line_to(path: Sequence[Branch], mark: Mark) -> tuple[Branch, ...]:
    """Return the path of a mark's attempt up to the mark."""
    return (*path[:-1], Branch(mark.attempt, mark.version))


def meeting(line: Sequence[Branch], path: Sequence[Branch]) -> Mark:
    """Return the last point of `line` that is also on `path`, as a mark without a checkpoint.

    If the two have no point in common, this is the beginning of the newest attempt of `path`.
    """
    common = Mark(path[-1].attempt, NO_EPOCH, FIRST_ENTRY)
    for mine, other in zip(line, path, strict=False):
        if mine.attempt != other.attempt:
            break
        until = min(v for v in (mine.until, other.until) if v is not None)
        if until >= FIRST_ENTRY:
            common = Mark(mine.attempt, NO_EPOCH, until)
    return common


def mark_after_rollback(
    mark: Mark, line: Sequence[Branch], path: Sequence[Branch], cuts: Iterable[Mark]
) -> Mark:
    """Return a sink's mark after the rows that are not on `path` are undone.

    Args:
        mark: the mark of the sink.
        line: the path to it, see `line_to`.
        path: the path that is valid from now on.
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
    """Return the known checkpoints whose epochs a sink has committed after `back`.

    Empty if the sink has committed only batches without a completed checkpoint.
    """
    mine = [c for c in cuts if is_on(line, c)]
    ids = {c.checkpoint for c in mine if back.version < c.version <= mark.version}
    before = {c.checkpoint for c in mine if c.version <= back.version} | {back.checkpoint}
    if mark.version > back.version and mark.checkpoint > max(before):
        ids.add(mark.checkpoint)
    return tuple(sorted(ids))


def asked_for(line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> tuple[Version, ...]:
    """Return the entries to which restores of retained checkpoints take a sink back, each once, oldest first.

    Args:
        line: the path to the mark of the sink.
        kept: the path to the cut of each retained checkpoint.
    """
    return tuple(sorted({meeting(line, target).version for target in kept}))


def undone_from(line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> Version:
    """Return the entry up to which no restore of a retained checkpoint undoes rows.

    A restore to an abandoned branch goes back to the fork, which may be before every retained checkpoint.

    Args:
        line: the path to the mark of the sink.
        kept: the path to the cut of each retained checkpoint.
    """
    return next(iter(asked_for(line, kept)), FIRST_ENTRY)


def needed_from(mark: Mark, line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> Version:
    """Return the entry after which a sink may still read, now or after a restore of a retained checkpoint.

    Args:
        mark: the mark of the sink.
        line: the path to it.
        kept: the path to the cut of each retained checkpoint.
    """
    needed = mark.version
    for target in kept:
        until = target[-1].until
        met = meeting(line, target).version
        if until is not None and met < until:
            needed = min(needed, met)
    return needed
