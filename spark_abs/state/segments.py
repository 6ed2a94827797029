"""Segments: the immutable columnar pieces of a key group's state.

A segment is an Arrow stream: a row per key, in the order of the keys' hashes, each key once. Its columns are
`k:<name>` for the key, `s:<name>` for the state, and where they apply `@removed` (the key has no state any
more), `@timeout` and `@expires` (milliseconds; null for none).
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
"""A time that does not come: no timeout, no expiry."""

Millis = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SegmentNote:
    """What the head of a key group says of a segment; `slot` is its key in the state store."""

    slot: int
    level: int
    rows: int
    size: int
    digest: str
    """BLAKE2b of its bytes: what a worker has read before is known by it."""


class Segment:
    """A segment in memory, with what lookups need. Never changed."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()
        self.keys = [_one(table, name) for name in table.column_names if name.startswith(KEY)]
        self.hashes = hashes(self.keys)
        if len(self.hashes) and bool(np.any(self.hashes[1:] < self.hashes[:-1])):
            raise DamageError("a segment of state is not sorted by the hashes of its keys")

    @classmethod
    def sorted(cls, table: pa.Table) -> Segment:
        """Make a segment of rows in any order, each key once."""
        keys = [_one(table, name) for name in table.column_names if name.startswith(KEY)]
        order = np.argsort(hashes(keys), kind="stable")
        return cls(table.take(pa.array(order)))

    def __len__(self) -> int:
        return len(self.hashes)

    @cached_property
    def memory(self) -> int:
        """Bytes of memory that it takes, about."""
        return int(self.table.nbytes) + 26 * len(self)

    @cached_property
    def removed(self) -> Flags:
        """Whether each row says that its key has no state."""
        return self._flags(REMOVED)

    @cached_property
    def timeouts(self) -> Millis:
        """When each key times out."""
        return self._millis(TIMEOUT)

    @cached_property
    def expires(self) -> Millis:
        """When each state is no longer there."""
        return self._millis(EXPIRES)

    def find(self, keys: list[pa.Array], hashed: Hashes) -> Places:
        """Return the row of each key, -1 where it has none."""
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
    """Return the bytes of a segment; columns that say nothing are left out."""
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
        DamageError: the bytes are not those that were written.
    """
    if digest_of(data) != digest:
        raise DamageError("a segment of state does not have the digest that its head names")
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def digest_of(data: bytes) -> str:
    """Return the digest by which a segment is known."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
