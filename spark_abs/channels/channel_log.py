"""The log of a channel, read for one attempt of its producer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from spark_abs.channels.entries import EntryMetadata, entry_from, note_of
from spark_abs.model import NO_BATCH, AttemptId, BatchId, Entry, Version
from spark_abs.store.log import LogCommit
from spark_abs.store.table import Table


class ChannelLog:
    """The entries of one attempt in a channel, as of the table's loaded version."""

    def __init__(self, table: Table, app: str, attempt: AttemptId) -> None:
        """Take the channel.

        Args:
            table: its table.
            app: the id under which the attempt commits batches to it, see `app_id`.
            attempt: the attempt.
        """
        self._table, self._app, self._attempt = table, app, attempt

    def last_batch(self) -> BatchId:
        """Return the newest batch that was committed, `NO_BATCH` if none was."""
        last = self._table.transaction(self._app)
        return NO_BATCH if last is None else BatchId(last)

    def commit_of(self, batch: BatchId) -> tuple[Version, EntryMetadata] | None:
        """Return the commit of a batch, None if there is none."""
        if self.last_batch() < batch:
            return None
        return next(((c.version, note) for c, note in self._backwards() if note.batch == batch), None)

    def plans(self, after: BatchId) -> dict[BatchId, str]:
        """Return the offsets of batches after `after`, from the metadata of their commits."""
        found: dict[BatchId, str] = {}
        for _, note in self._backwards():
            if NO_BATCH < note.batch <= after:
                break
            if note.batch != NO_BATCH and note.offsets is not None:
                found[note.batch] = note.offsets
        return found

    def after(self, version: Version) -> tuple[Entry, ...]:
        """Return the attempt's entries above `version`, ascending."""
        newer = list(takewhile(lambda entry: entry.version > version, self._entries()))
        return tuple(reversed(newer))

    def find(self, is_it: Callable[[Entry], bool]) -> Entry | None:
        """Return the attempt's newest entry for which `is_it` holds."""
        return next(filter(is_it, self._entries()), None)

    def _entries(self) -> Iterator[Entry]:
        return (entry_from(commit.version, note, commit.adds) for commit, note in self._backwards())

    def _backwards(self) -> Iterator[tuple[LogCommit, EntryMetadata]]:
        """Iterate the commits of the attempt backwards from the loaded version.

        Older attempts were fenced before this one began, so the walk ends at their first entry, or at the
        oldest entry that clean-up has left.
        """
        for commit in self._table.backwards():
            note = note_of(commit)
            if note is None:
                continue
            if note.attempt != self._attempt:
                return
            yield commit, note
