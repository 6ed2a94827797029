"""Segments: the immutable columnar pieces of a key group's state.

A segment is an Arrow stream with one row per key, in the order of the keys' hashes. Its columns are
`k:<name>` for the key, `s:<name>` for the state, and if needed `@removed` (the key's state was removed),
`@timeout` and `@expires` (milliseconds; null for none).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_abs.errors import DamageError
from spark_abs.state.keys import Hashes, Places, hashes, same

KEY, STATE = "k:", "s:"
REMOVED, TIMEOUT, EXPIRES = "@removed", "@timeout", "@expires"
NEVER = np.iinfo(np.int64).max
"""A time that never comes: no timeout, no expiry."""

Millis = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """The entry of a segment in the head of a key group. `slot` is its key in the state store."""

    slot: int
    level: int
    rows: int
    size: int
    digest: str
    """BLAKE2b of its bytes, by which a worker recognises a segment that it has read before."""


class Segment:
    """A segment in memory, prepared for lookups. Immutable."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()
        self.keys = [_one(table, name) for name in table.column_names if name.startswith(KEY)]
        self.hashes = hashes(self.keys)
        if len(self.hashes) and bool(np.any(self.hashes[1:] < self.hashes[:-1])):
            raise DamageError("a segment of state is not sorted by the hashes of its keys")

    @classmethod
    def sorted(cls, table: pa.Table) -> Segment:
        """Make a segment from rows in any order, each key once."""
        keys = [_one(table, name) for name in table.column_names if name.startswith(KEY)]
        order = np.argsort(hashes(keys), kind="stable")
        return cls(table.take(pa.array(order)))

    def __len__(self) -> int:
        return len(self.hashes)

    @cached_property
    def memory(self) -> int:
        """Approximate bytes of memory."""
        return int(self.table.nbytes) + 26 * len(self)

    @cached_property
    def removed(self) -> Flags:
        """Whether each row marks its key as removed."""
        return self._flags(REMOVED)

    @cached_property
    def timeouts(self) -> Millis:
        """When each key times out."""
        return self._millis(TIMEOUT)

    @cached_property
    def expires(self) -> Millis:
        """When each state expires."""
        return self._millis(EXPIRES)

    def find(self, keys: list[pa.Array], hashed: Hashes) -> Places:
        """Return the row of each key, -1 for none."""
        found = np.full(len(hashed), -1, np.int64)
        if not len(self):
            return found
        at = np.searchsorted(self.hashes, hashed)
        asked = np.arange(len(hashed))
        while len(asked):
            inside = at < len(self)
            inside[inside] &= self.hashes[at[inside]] == hashed[asked[inside]]
            asked, at = asked[inside], at[inside]
            if not len(asked):
                break
            equal = same([k.take(pa.array(asked)) for k in keys], [k.take(pa.array(at)) for k in self.keys])
            found[asked[equal]] = at[equal]
            asked, at = asked[~equal], at[~equal] + 1  # another key of the same hash
        return found

    def _flags(self, name: str) -> Flags:
        if name not in self.table.column_names:
            return np.zeros(len(self), np.bool_)
        flags: Flags = _one(self.table, name).fill_null(False).to_numpy(zero_copy_only=False)
        return flags

    def _millis(self, name: str) -> Millis:
        if name not in self.table.column_names:
            return np.full(len(self), NEVER, np.int64)
        millis: Millis = _one(self.table, name).fill_null(NEVER).to_numpy(zero_copy_only=False)
        return millis


def encode(table: pa.Table) -> bytes:
    """Return the bytes of a segment, without empty columns."""
    for name in (REMOVED, TIMEOUT, EXPIRES):
        if name in table.column_names:
            column = table[name]
            says = column.null_count < len(column) if name != REMOVED else bool(pc.any(column).as_py())
            if not says:
                table = table.drop_columns([name])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def decode(data: bytes, digest: str) -> pa.Table:
    """Read the table of a segment.

    Raises:
        DamageError: the bytes are altered.
    """
    if digest_of(data) != digest:
        raise DamageError("a segment of state does not have the digest that its head names")
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def digest_of(data: bytes) -> str:
    """Return the digest that identifies a segment."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
