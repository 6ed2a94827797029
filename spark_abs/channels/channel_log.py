"""The log of a channel, read for one attempt of its producer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spark_abs.channels.entries import EntryMetadata, entry_of, note_of
from spark_abs.model import NO_BATCH, AttemptId, BatchId, Entry, Version
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

    def entry_of_batch(self, batch: BatchId) -> Entry | None:
        """Return the entry of a batch, None if there is none."""
        return None if self.last_batch() < batch else self.find(lambda e: e.batch == batch)

    def note_of_batch(self, batch: BatchId) -> EntryMetadata | None:
        """Return the metadata of a batch's commit, None if there is none."""
        entry = self.entry_of_batch(batch)
        commit = self._table.read_commit(entry.version) if entry is not None else None
        return note_of(commit) if commit is not None else None

    def plans(self, after: BatchId) -> dict[BatchId, str]:
        """Return the offsets of batches after `after`, from the metadata of their commits."""
        found: dict[BatchId, str] = {}
        for commit in self._table.backwards():
            note = note_of(commit)
            if note is None:
                continue
            if note.attempt != self._attempt or NO_BATCH < note.batch <= after:
                break
            if note.batch != NO_BATCH and note.offsets is not None:
                found[note.batch] = note.offsets
        return found

    def after(self, version: Version) -> tuple[Entry, ...]:
        """Return the attempt's entries above `version`, ascending."""
        newer = []
        for entry in self._backwards():
            if entry.version <= version:
                break
            newer.append(entry)
        return tuple(reversed(newer))

    def find(self, is_it: Callable[[Entry], bool]) -> Entry | None:
        """Return the attempt's newest entry for which `is_it` holds."""
        return next((entry for entry in self._backwards() if is_it(entry)), None)

    def _backwards(self) -> Iterator[Entry]:
        """Iterate the entries of the attempt backwards from the loaded version.

        Older attempts were fenced before this one began, so the walk ends at their first entry, or at the
        oldest entry that clean-up has left.
        """
        for commit in self._table.backwards():
            entry = entry_of(commit)
            if entry.attempt not in (self._attempt, 0):
                return
            if entry.attempt:
                yield entry
