"""The rows of an epoch, read without Spark from the files of its entries, in one part or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import pyarrow as pa

from spark_abs.channels.follow import follow
from spark_abs.channels.schema import conformed
from spark_abs.errors import DamageError
from spark_abs.model import Branch, ChannelId, DataFile, Version, checked_relative
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.root import Root
from spark_abs.store.row_batches import read_batches

BATCH_ROWS = 32_768
PART_BYTES = 64 * 2**20
"""Uncompressed bytes from which a task of Spark is worth its cost, see ADR 10."""

T = TypeVar("T")


class Tasks(Protocol):
    """Calls a function with each part, in tasks of Spark."""

    def __call__(self, work: Callable[[Rows], T], parts: Sequence[Rows]) -> list[T]:
        """Return the results in the order of the parts; raises what `Rows.each_part` raises."""
        ...


class FileRows(Rows):
    """The rows of some files of a channel. Picklable: each reader opens the root itself."""

    def __init__(self, root: Root, channel: ChannelId, files: Sequence[DataFile], schema: pa.Schema) -> None:
        self._root, self._channel, self._files = root, channel, tuple(files)
        self.schema = schema
        self.count = sum(file.rows for file in self._files)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Iterate the batches; see `Rows`."""
        place = self._root.path(self._root.channel(self._channel))
        for file in self._files:
            path = f"{place}/{checked_relative(file.path)}"
            try:
                source = self._root.fs.open_input_file(path)
            except FileNotFoundError:
                raise DamageError(f"{path} is missing, and it holds rows that were not sent") from None
            with source:
                for batch in read_batches(source, self.schema.names, BATCH_ROWS):
                    yield conformed(batch, self.schema)

    def parts(self) -> list[Rows]:
        """Divide the rows into parts of whole files, of about `PART_BYTES` or a file; in order."""
        groups: list[list[DataFile]] = []
        size = PART_BYTES
        for file in self._files:
            if size >= PART_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.uncompressed
        return [FileRows(self._root, self._channel, group, self.schema) for group in groups]


class EpochRows(FileRows):
    """The rows of the entries of a channel between two versions that count on a path."""

    def __init__(
        self,
        root: Root,
        channel: ChannelId,
        *,
        path: Sequence[Branch],
        after: Version,
        until: Version,
        schema: pa.Schema,
        read: Callable[[], None] = lambda: None,
        tasks: Tasks | None = None,
    ) -> None:
        """Read the log, but no rows.

        Args:
            root: the job's root.
            channel: the channel.
            path: what counts in it.
            after: the last entry that is left out.
            until: the last entry.
            schema: what is given out: columns that a file lacks are null, others are left out.
            read: called when all rows have been read.
            tasks: where work on many rows is done.

        Raises:
            DamageError: an entry is not there any more.
        """
        entries = tuple(follow(root, channel, path).between(after, until))
        super().__init__(root, channel, [file for entry in entries for file in entry.files], schema)
        self._read, self._tasks = read, tasks

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Iterate the batches; see `Rows`."""
        yield from super().__iter__()
        self._read()

    def each_part(self, work: Callable[[Rows], T]) -> list[T]:
        """Call `work` with each part in a task of Spark, if they are several; see `Rows`."""
        parts = self.parts()
        if self._tasks is None or len(parts) < 2:
            return [work(self)]
        found = self._tasks(work, parts)
        self._read()
        return found
