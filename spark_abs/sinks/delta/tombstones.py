"""Tombstones of a merged Delta table: deleted keys, with the sequence of the delete.

They lie in files below the root that no reader of the table sees. The commit of a batch names those that
count after it, so that commit decides them as it decides the rows, and a restore brings both back. A file
that no commit names does not exist; it goes when it is old.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_abs.channels.files import write_parquet
from spark_abs.errors import DamageError
from spark_abs.model import checked_relative, is_number
from spark_abs.sinks.delta.commit_metadata import SinkMetadata, TombstoneFile, Tombstones, note_of
from spark_abs.store.root import Root
from spark_abs.store.row_batches import read_batches
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

DIRECTORY = "tombstones"
_FILES = 16
"""So many files of a level become one of the next, so that a batch reads few."""


def said_before(notes: Iterator[SinkMetadata | None]) -> Tombstones | None:
    """Return the tombstones that count by the metadata of a root, the newest first; None if none do."""
    for note in notes:
        if note is not None and (note.tombstones is not None or note.has_rows or note.restored is not None):
            return note.tombstones
    return None


def said_at(table: Table, version: int, job: str, root: str) -> Tombstones | None:
    """Return the tombstones that counted at a version of a table for the sink of a root."""

    def notes() -> Iterator[SinkMetadata | None]:
        for number in range(version, -1, -1):
            commit = table.read_commit(number)
            if commit is None:
                return
            note = note_of(commit, table.uri)
            yield note if note is not None and (note.job, note.root) == (job, root) else None

    return said_before(notes())


class TombstoneStore:
    """The tombstones of one sink."""

    def __init__(self, root: Root, sink: str, kept_ms: int) -> None:
        """Take the place of the files; nothing is read.

        Args:
            root: the job's root.
            sink: its name in paths, `<stage>.<sink>`.
            kept_ms: for how long at least a file counts.
        """
        self._root, self._directory, self._kept_ms = root, f"{DIRECTORY}/{sink}", kept_ms

    def live(self, before: Tombstones | None, like: Tombstones) -> Tombstones:
        """Return which of the files that counted still do.

        Args:
            before: what the newest commit says.
            like: the key and the sequence as they are now; of others none counts.
        """
        if before is None or not before.files:
            return like
        if _names(before) != _names(like):
            log.warning("%s: deletes by another key or sequence are forgotten", self._directory)
            return like
        old = _now_ms() - self._kept_ms
        return replace(like, files=tuple(file for file in before.files if file.newest_ms > old))

    def read(self, session: SparkSession, tombstones: Tombstones) -> DataFrame | None:
        """Return the rows of all files, None if there is none.

        Raises:
            DamageError: a file is gone.
        """
        paths = [self._root.path(checked_relative(file.directory)) for file in tombstones.files]
        if not paths:
            return None
        gone = [i.path for i in self._root.fs.get_file_info(paths) if i.type is fs.FileType.NotFound]
        if gone:
            raise DamageError(
                f"{gone[0]} is gone, which says what was deleted: a late change would bring it back. Bring "
                "the file back, go back to a checkpoint before it, or forget it with a shorter tombstones_for"
            )
        return session.read.parquet(*(f"{self._root.top}/{file.directory}" for file in tombstones.files))

    def add(self, tombstones: Tombstones, deletes: DataFrame) -> Tombstones:
        """Write the tombstones of a batch, and return those that count once a commit names them.

        Killed in between, it leaves files that no commit names.
        """
        now = _now_ms()
        directory = self._new(now, 0)
        if write_parquet(deletes, self._root.top, directory).files:
            tombstones = replace(tombstones, files=(*tombstones.files, TombstoneFile(directory, now, 0)))
            tombstones = replace(tombstones, files=self.compacted(tombstones.files))
            if tombstones.files[-1].level:
                self._sweep({file.directory for file in tombstones.files})
        return tombstones

    def _new(self, now: int, level: int) -> str:
        return f"{self._directory}/{now}-{level}-{uuid.uuid4().hex[:12]}"

    def compacted(self, files: Sequence[TombstoneFile]) -> tuple[TombstoneFile, ...]:
        """Write the newest files of a level as one of the next, again and again, while they are many."""
        found = list(files)
        while True:
            level = found[-1].level
            last = [file for file in found if file.level == level]
            if len(last) < _FILES:
                return tuple(found)
            found = [file for file in found if file.level != level]
            found.append(self._one_of(last, level + 1))

    def _one_of(self, files: Sequence[TombstoneFile], level: int) -> TombstoneFile:
        newest = max(file.newest_ms for file in files)
        directory = self._new(newest, level)
        place = self._root.path(directory)
        if self._root.storage.place(place).local:
            self._root.fs.create_dir(place, recursive=True)
        writer: pq.ParquetWriter | None = None
        try:
            for batch in self._batches(files):
                if writer is None:
                    path = f"{place}/part-0.parquet"
                    writer = pq.ParquetWriter(path, batch.schema, filesystem=self._root.fs)
                writer.write_batch(batch)
        finally:
            if writer is not None:
                writer.close()
        return TombstoneFile(directory, newest, level)

    def _batches(self, files: Sequence[TombstoneFile]) -> Iterator[pa.RecordBatch]:
        for file in files:
            selector = fs.FileSelector(self._root.path(checked_relative(file.directory)))
            for info in self._root.fs.get_file_info(selector):
                if info.base_name.endswith(".parquet"):
                    with self._root.fs.open_input_file(info.path) as source:
                        yield from read_batches(source, pq.read_schema(source).names)

    def _sweep(self, named: set[str]) -> None:
        """Delete what is older than any tombstone that counts, at any checkpoint."""
        old = _now_ms() - self._kept_ms
        for info in self._root.fs.get_file_info(fs.FileSelector(self._root.path(self._directory))):
            made, _, _ = str(info.base_name).partition("-")
            if is_number(made) and int(made) <= old and f"{self._directory}/{info.base_name}" not in named:
                self._root.fs.delete_dir(info.path)


def _names(said: Tombstones) -> list[list[str]]:
    return [[column.casefold() for column in columns] for columns in (said.key, said.sequence_by)]


def _now_ms() -> int:
    return int(time.time() * 1000)
