"""The rows of an epoch, read out of the files of its entries without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from spark_abs.channels.follow import follow
from spark_abs.channels.schema import conformed
from spark_abs.errors import DamageError
from spark_abs.model import Branch, ChannelId, DataFile, Version, checked_relative
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.root import Root

BATCH_ROWS = 32_768


class EpochRows(Rows):
    """The rows of the entries of a channel between two versions, as far as they count on a path."""

    def __init__(
        self,
        root: Root,
        channel: ChannelId,
        path: Sequence[Branch],
        after: Version,
        until: Version,
        schema: pa.Schema,
        read: Callable[[], None] = lambda: None,
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

        Raises:
            DamageError: an entry is not there any more.
        """
        entries = tuple(follow(root, channel, path).between(after, until))
        self._files: tuple[DataFile, ...] = tuple(file for entry in entries for file in entry.files)
        self._root, self._place = root, root.path(root.channel(channel))
        self._read = read
        self.schema = schema
        self.count = sum(file.rows for file in self._files)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Iterate the batches; see `Rows`."""
        for file in self._files:
            path = f"{self._place}/{checked_relative(file.path)}"
            try:
                source = self._root.fs.open_input_file(path)
            except FileNotFoundError:
                raise DamageError(
                    f"{path} is not there any more, and holds rows that were not sent"
                ) from None
            with source, pq.ParquetFile(source) as parquet:
                there = set(parquet.schema_arrow.names)
                columns = [name for name in self.schema.names if name in there]
                for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
                    yield conformed(batch, self.schema)
        self._read()
