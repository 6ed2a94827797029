"""What has changed the table of a sink since a version, and by whom.

A table may have several writers: the attempts of this root, other roots of spark_abs, and anybody else. A
restore undoes what this root did. The rows of another root stay: its own positions have gone past them. What
anybody else did is undone only if that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from spark_abs.model import AttemptId, Version
from spark_abs.sinks.delta.commit_metadata import SinkMetadata, note_of
from spark_abs.store.log import LogCommit
from spark_abs.store.table import Table


class Who(StrEnum):
    """Who made a commit."""

    OWN = "own"
    ROOT = "another root"
    OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Own:
    """Tells the commits of one root from those of all others."""

    job: str
    root: str
    """The identity of the root."""
    attempts: frozenset[AttemptId]
    """Its attempts that began before roots had an identity: their commits do not name it."""

    def wrote(self, note: SinkMetadata) -> bool:
        """Say whether this root made a commit."""
        if note.job != self.job:
            return False
        return note.root == self.root if note.root else note.attempt in self.attempts

    def author(self, commit: LogCommit | None, table: str) -> Who:
        """Say who made a commit of a table; None for one that is not in the log any more."""
        note = note_of(commit, table) if commit is not None else None
        if note is None:
            return Who.OTHERS
        return Who.OWN if self.wrote(note) else Who.ROOT


@dataclass(frozen=True, slots=True)
class Changes:
    """The commits after a version that changed rows of a table, by who made them."""

    own: tuple[Version, ...] = ()
    own_rows: int = 0
    """Rows that this root has added, and that are still in the table."""
    of_roots: tuple[Version, ...] = ()
    """Of other roots: a restore leaves their rows."""
    of_others: tuple[Version, ...] = ()
    """Of anybody else, or not in the log any more."""
    rows_of_others: int = 0

    def __bool__(self) -> bool:
        return bool(self.own or self.of_roots or self.of_others)


NO_CHANGES = Changes()
"""Nobody has changed a row."""


def changes_since(table: Table, version: Version, own: Own) -> Changes:
    """Read the log of a table from after `version` to the version read. Every commit is opened once.

    Rows count if their file is in the table now and was not in it at `version`.
    """
    versions: dict[Who, list[Version]] = {who: [] for who in Who}
    added: dict[str, tuple[Who, int]] = {}
    left: set[str] = set()
    for number, commit in commits_since(table, version):
        if commit is None or commit.data_change:
            who = own.author(commit, table.uri)
            versions[who].append(number)
            if commit is not None:
                left.update(path for path in commit.removed if added.pop(path, None) is None)
                added.update((file.path, (who, file.rows)) for file in commit.adds if file.path not in left)
    rows = dict.fromkeys(Who, 0)
    for who, number_of_rows in added.values():
        rows[who] += number_of_rows
    return Changes(
        tuple(versions[Who.OWN]),
        rows[Who.OWN],
        tuple(versions[Who.ROOT]),
        tuple(versions[Who.OTHERS]),
        rows[Who.OTHERS],
    )


def commits_since(table: Table, after: Version) -> Iterator[tuple[Version, LogCommit | None]]:
    """Iterate the commits above a version, up to the version read; None for one that is gone."""
    for number in range(after + 1, table.version + 1):
        yield Version(number), table.read_commit(number)
