"""Rows of a Parquet file as Arrow batches of a bounded size in memory, however well the file is compressed.

A footer has the size of a column before compression, but a dictionary holds a repeated value only once:
twenty kilobytes in each of ten thousand rows look like twenty. So the longest value of a dictionary is looked
up, and it determines how many rows are decoded at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

BATCH_BYTES = 16 * 2**20
"""Bytes of a batch in memory; one row may have more."""
BATCH_ROWS = 65_536

_BLIND_ROWS = 256
"""Rows that are decoded at a time if the length of values is unknown."""
_WIDTHS = {
    "BOOLEAN": 1,
    "INT32": 4,
    "INT64": 8,
    "INT96": 8,
    "FLOAT": 4,
    "DOUBLE": 8,
    "FIXED_LEN_BYTE_ARRAY": 16,
}
_LOOK_BYTES = 2**18
"""Bytes that are read at once to look at a dictionary: the rest of its column is not needed for that."""
_BYTES = "BYTE_ARRAY"
_DICTIONARIES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_INCREMENTAL = "DELTA_BYTE_ARRAY"
"""An encoding that stores only the difference to the value before."""


def read_batches(
    source: pa.NativeFile, columns: Sequence[str], most_rows: int = BATCH_ROWS, most_bytes: int = BATCH_BYTES
) -> Iterator[pa.RecordBatch]:
    """Read columns of a Parquet file; columns that the file lacks are left out.

    Args:
        source: the file; it stays open.
        columns: top-level ones.
        most_rows: of a batch.
        most_bytes: of a batch in memory, which only a batch of one row exceeds.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be read.
    """
    with pq.ParquetFile(source) as file:
        names = set(file.schema_arrow.names)
        wanted = [name for name in columns if name in names]
        steps = _Steps(source, file, wanted, most_bytes)
        groups = ((steps.of(group, most_rows), group) for group in range(file.num_row_groups))
        for step, alike in groupby(groups, key=lambda found: found[0]):
            read = file.iter_batches(step, [group for _, group in alike], wanted)
            cut = (piece for batch in read for piece in pieces(batch, most_bytes))
            yield from cut if step == most_rows else _joined(cut, most_rows, most_bytes)


def pieces(batch: pa.RecordBatch, most_bytes: int = BATCH_BYTES) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of a bounded size in memory, in order; a row is never cut."""
    rows = batch.num_rows
    if rows < 2 or batch.nbytes <= most_bytes:
        yield batch
        return
    yield from pieces(batch.slice(0, rows // 2), most_bytes)
    yield from pieces(batch.slice(rows // 2), most_bytes)


def in_pieces(table: pa.Table) -> pa.Table:
    """Return a table whose chunks are of a bounded size."""
    cut = (piece for batch in table.to_batches() for piece in pieces(batch))
    return pa.Table.from_batches(cut, table.schema)


def uncompressed_size(footer: pq.FileMetaData) -> int:
    """Return the bytes of a file before compression; dictionary values count once."""
    return sum(int(footer.row_group(group).total_byte_size) for group in range(footer.num_row_groups))


def _joined(batches: Iterable[pa.RecordBatch], most_rows: int, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Put neighbours together as long as the bounds hold."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if held and (rows + batch.num_rows > most_rows or size + batch.nbytes > most_bytes):
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if held:
        yield pa.concat_batches(held)


class _Steps:
    """How many rows of a row group may be decoded at once."""

    def __init__(
        self, source: pa.NativeFile, file: pq.ParquetFile, columns: Sequence[str], most: int
    ) -> None:
        self._source, self._file, self._most = source, file, most
        self._leaves = _leaves_of(file, columns)
        self._as_dictionaries: pq.ParquetFile | None = None

    def of(self, group: int, most_rows: int) -> int:
        """Return it for one row group, between 1 and `most_rows`."""
        found = self._file.metadata.row_group(group)
        rows, each, blind = found.num_rows, 0.0, False
        if rows == 0:
            return most_rows
        for leaf in self._leaves:
            chunk = found.column(leaf)
            values = chunk.num_values / rows
            if chunk.physical_type != _BYTES:
                each += values * _WIDTHS[chunk.physical_type]
                continue
            each += values * 4 + chunk.total_uncompressed_size / rows
            if _DICTIONARIES.isdisjoint(chunk.encodings):
                blind |= _INCREMENTAL in chunk.encodings
            elif min(rows, most_rows) * values * chunk.total_uncompressed_size > self._most:
                longest = self._longest(group, leaf)
                blind |= longest is None
                each += values * (longest or 0)
        step = min(most_rows, int(self._most / max(each, 1.0)), _BLIND_ROWS if blind else most_rows)
        return max(step, 1)

    def _longest(self, group: int, leaf: int) -> int | None:
        """Return the bytes of the longest value in a dictionary; None if its first bytes do not show it."""
        schema = self._file.metadata.schema
        path = schema.column(leaf).path
        if self._as_dictionaries is None:
            paths = [schema.column(one).path for one in self._leaves]
            binary = [p for p, one in zip(paths, self._leaves, strict=True) if _is_binary(schema, one)]
            self._as_dictionaries = pq.ParquetFile(
                self._source, metadata=self._file.metadata, read_dictionary=binary, buffer_size=_LOOK_BYTES
            )
        rows = 1 if "." not in path else _BLIND_ROWS
        for batch in self._as_dictionaries.iter_batches(rows, [group], [path]):
            held = _dictionary_in(batch.column(0))
            if held is not None and len(held):
                longest: int = pc.max(pc.binary_length(held)).as_py()
                return longest
            break
        return None


def _is_binary(schema: pq.ParquetSchema, leaf: int) -> bool:
    return bool(schema.column(leaf).physical_type == _BYTES)


def _leaves_of(file: pq.ParquetFile, columns: Sequence[str]) -> list[int]:
    """Return the numbers of the leaves of top-level columns."""
    found: list[int] = []
    leaf = 0
    for field in file.schema_arrow:
        count = _count(field.type)
        if field.name in columns:
            found.extend(range(leaf, leaf + count))
        leaf += count
    return found


def _count(kind: pa.DataType) -> int:
    if not pa.types.is_nested(kind):
        return 1
    return sum(_count(kind.field(number).type) for number in range(kind.num_fields))


def _dictionary_in(column: pa.Array) -> pa.Array | None:
    """Return the dictionary of the one leaf of a column."""
    while not pa.types.is_dictionary(column.type):
        if pa.types.is_struct(column.type):
            column = column.field(0)
        elif pa.types.is_list(column.type):
            column = column.values
        else:
            return None
    return column.dictionary
