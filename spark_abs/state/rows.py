"""The state of a function as rows, one for each key: read from key groups and written to them.

A row has the columns `key` and `value`, structs of the declared columns, `timeout_ms`, and `expires_ms`, the
end of its time to live; null for none. A key with only a timeout has a null `value`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from spark_abs.errors import UsageError
from spark_abs.manifest import StateFunction
from spark_abs.state.arrow_types import schema_of
from spark_abs.state.evolution import fitted, form_digest
from spark_abs.state.group import Change, Head, KeyGroup, read_head, segment_schema
from spark_abs.state.keys import by_key, canonical, group_of, hashes
from spark_abs.state.segments import EXPIRES, KEY, REMOVED, STATE, TIMEOUT

TIMEOUT_MS, EXPIRES_MS = "timeout_ms", "expires_ms"


@dataclass(frozen=True)
class StateRows:
    """The form of the rows of a function's state."""

    function: StateFunction
    key: pa.Schema = field(init=False)
    value: pa.Schema = field(init=False)
    segment: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        """Read the declared types.

        Raises:
            Refused: a type cannot be read from the manifest.
        """
        object.__setattr__(self, "key", schema_of(self.function.key))
        object.__setattr__(self, "value", schema_of(self.function.state))
        object.__setattr__(self, "segment", segment_schema(self.key, self.value))

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        return pa.schema(
            [
                pa.field("key", pa.struct(list(self.key))),
                pa.field("value", pa.struct(list(self.value))),
                pa.field(TIMEOUT_MS, pa.int64()),
                pa.field(EXPIRES_MS, pa.int64()),
            ]
        )


@dataclass
class HeldGroup:
    """A store of one key group in memory."""

    head: bytes | None = None
    segments: dict[int, bytes] = field(default_factory=dict)
    timer: int | None = None

    def read_head(self) -> bytes | None:
        """Return the head."""
        return self.head

    def write_head(self, data: bytes) -> None:
        """Replace the head."""
        self.head = data

    def remove_head(self) -> None:
        """Remove the head."""
        self.head = None

    def read_segment(self, slot: int) -> bytes | None:
        """Return the bytes in a slot."""
        return self.segments.get(slot)

    def write_segment(self, slot: int, data: bytes) -> None:
        """Write bytes to a slot."""
        self.segments[slot] = data

    def remove_segment(self, slot: int) -> None:
        """Empty a slot."""
        del self.segments[slot]

    def set_timer(self, at_ms: int) -> None:
        """Register the native timer."""
        self.timer = at_ms

    def remove_timer(self, at_ms: int) -> None:  # noqa: ARG002 (there is one)
        """Remove it."""
        self.timer = None


def read_group(rows: StateRows, number: int, head: bytes, segments: Mapping[int, bytes]) -> pa.Table:
    """Return the rows of one key group.

    Raises:
        DamageError: the head cannot be read, or a segment is missing or altered.
    """
    held = HeldGroup(head, dict(segments))
    group = KeyGroup.load(
        number,
        held,
        head=read_head(head),
        at=head,
        known=None,
        fit=lambda table: fitted(table, rows.function, rows.segment),
    )
    table = group.all_rows(rows.segment)
    removed = table[REMOVED].fill_null(False).combine_chunks()
    return pa.table(
        [
            _struct(table, KEY, rows.key, None),
            _struct(table, STATE, rows.value, removed),
            table[TIMEOUT],
            table[EXPIRES],
        ],
        schema=rows.schema,
    )


def write_groups(rows: StateRows, table: pa.Table) -> dict[int, HeldGroup]:
    """Write rows to key groups, one segment each, in place of the groups' old content.

    Raises:
        UsageError: a key occurs twice, or a row has neither a value nor a timeout.
    """
    table = table.combine_chunks()
    keys = [canonical(column) for column in _fields(table["key"], rows.key)]
    hashed = hashes(keys)
    _, starts = by_key(keys, hashed)
    if len(starts) - 1 != table.num_rows:
        raise UsageError(
            f"{table.num_rows} rows of state have only {len(starts) - 1} keys: give each key one row"
        )
    removed = np.asarray(table["value"].is_null())
    if bool(np.any(removed & np.asarray(table[TIMEOUT_MS].is_null()))):
        raise UsageError("a row of state has neither a value nor a timeout: leave it out")
    flat = pa.table(
        [
            *keys,
            *_fields(table["value"], rows.value),
            pa.array(removed),
            table[TIMEOUT_MS],
            table[EXPIRES_MS],
        ],
        schema=rows.segment,
    )
    numbers = group_of(hashed, rows.function.key_groups)
    groups = {}
    for number in np.unique(numbers).tolist():
        held = HeldGroup()
        group_rows = flat.filter(pa.array(numbers == number))
        nowhere = np.full(group_rows.num_rows, -1, np.int64)
        KeyGroup(number, [], Head(form_digest(rows.function)), None).apply(
            Change(group_rows, nowhere, nowhere), held, now_ms=0
        )
        groups[number] = held
    return groups


def group_numbers(rows: StateRows, table: pa.Table) -> pa.Array:
    """Return the key group of each row."""
    columns = [canonical(column) for column in _fields(table["key"], rows.key)]
    return pa.array(group_of(hashes(columns), rows.function.key_groups), pa.int32())


def _struct(table: pa.Table, prefix: str, schema: pa.Schema, null: pa.Array | None) -> pa.Array:
    columns = [_one(table[prefix + f.name]) for f in schema]
    if not columns:
        return pa.array([{}] * table.num_rows, pa.struct([]), mask=None if null is None else np.asarray(null))
    return pa.StructArray.from_arrays(columns, fields=list(schema), mask=null)


def _fields(column: pa.ChunkedArray, schema: pa.Schema) -> list[pa.Array]:
    array = _one(column)
    return [field.cast(f.type) for f, field in zip(schema, array.flatten(), strict=True)]


def _one(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
