"""The log of a Delta sink's table, read for one writer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_abs.model import NO_BATCH, BatchId, SinkWriter, Version
from spark_abs.sinks.delta.commit_metadata import SinkMetadata, note_of
from spark_abs.store.table import Table


@dataclass(frozen=True, slots=True)
class Passed:
    """Commits that need not be read again: those after `own` up to `newest` have no batch of the writer's."""

    newest: Version
    own: Version
    """The last that has one, or brought the attempt to the table; the oldest in the log if there is none."""


NOTHING_PASSED = Passed(Version(-1), Version(-1))


class SinkLog:
    """The commits of one writer in a table's log, as of the version that the table has read."""

    def __init__(self, table: Table, writer: SinkWriter) -> None:
        self._table, self._writer = table, writer

    def last_batch(self) -> BatchId:
        """Return the newest batch that was committed, `NO_BATCH` if none was."""
        last = self._table.transaction(self._writer.app)
        return NO_BATCH if last is None else BatchId(last)

    def plans(self, after: BatchId) -> dict[BatchId, str]:
        """Return the offsets of the batches after `after` that commits name."""
        found: dict[BatchId, str] = {}
        for _, note in self.backwards():
            if note is not None and (note.begins or NO_BATCH < note.batch <= after):
                break
            found |= {p.batch: p.offsets for p in (note.plans if note else ()) if p.batch > after}
        return found

    def commit_of(self, batch: BatchId) -> tuple[Version, SinkMetadata] | None:
        """Return the commit of a batch, None if there is none."""
        if self.last_batch() < batch:
            return None
        for version, note in self.backwards():
            if note is not None and note.batch == batch:
                return version, note
            if note is not None and (note.begins or NO_BATCH < note.batch < batch):
                return None
        return None

    def backwards(self, passed: Passed = NOTHING_PASSED) -> Iterator[tuple[Version, SinkMetadata | None]]:
        """Iterate the log from the version read backwards, with the notes of this writer.

        Passed commits are left out, unless the log was cleaned up and no longer has `passed.own`.
        """
        for version, note in self.of_attempt(passed):
            yield version, note if note is not None and self.is_mine(note) else None

    def of_attempt(self, passed: Passed = NOTHING_PASSED) -> Iterator[tuple[Version, SinkMetadata | None]]:
        """Do as `backwards`, with the notes of all stages of this attempt."""
        version = int(self._table.version)
        while version >= 0:
            commit = self._table.read_commit(passed.own) if version == passed.newest else None
            commit = commit or self._table.read_commit(version)
            if commit is None:
                return
            note = note_of(commit, self._table.uri)
            yield commit.version, note if note is not None and self._is_of_attempt(note) else None
            version = commit.version - 1

    def is_mine(self, note: SinkMetadata) -> bool:
        """Say whether a commit is one of this stage in this attempt, or brought the table back for it."""
        if not self._is_of_attempt(note):
            return False
        if not self._writer.root:
            return note.sink == self._writer.name
        return note.restored is not None or note.stage == self._writer.stage

    def _is_of_attempt(self, note: SinkMetadata) -> bool:
        writer = self._writer
        return (note.job, note.root, note.attempt) == (writer.job, writer.root, writer.attempt)
