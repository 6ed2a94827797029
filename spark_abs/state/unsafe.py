"""The rows of a function's state store in Spark's format: the bytes of its `UnsafeRow`.

A row is a word of null bits, a word for each field, and the longer fields at its end: their words hold size
and offset. This module has only the forms that key groups need; a test compares them with bytes that Spark
wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from spark_abs.errors import DamageError
from spark_abs.snapshots.operators import HEADS, SEGMENTS
from spark_abs.state.operator import Timeout
from spark_abs.state.rows import HeldGroup

_WORD = 8
_TIMERS = {Timeout.PROCESSING_TIME: "$procTimers", Timeout.EVENT_TIME: "$eventTimers"}
_NOTHING = struct.pack("<qq", 1, 0)
"""A row of one field that is null."""


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One entry of a state store."""

    family: str
    """The column family: the state variable, or an index of timers."""
    key: bytes
    value: bytes


def group_rows(number: int, group: HeldGroup, timeout: Timeout) -> Iterator[StoreRow]:
    """Return the entries of a key group."""
    if group.head is None:
        return
    yield head_row(number, group.head)
    for slot, data in sorted(group.segments.items()):
        yield StoreRow(SEGMENTS, _row(_number(number), _number(slot)), _row(data))
    if group.timer is not None:
        family = _TIMERS[timeout]
        yield StoreRow(f"{family}_keyToTimestamp", _row(_number(number), group.timer), _NOTHING)
        yield StoreRow(f"{family}_timestampToKey", _row(group.timer, _number(number)), _NOTHING)


def head_row(number: int, data: bytes) -> StoreRow:
    """Return the entry that holds the head of a key group."""
    return StoreRow(HEADS, _number(number), _row(data))


def bytes_of(row: bytes) -> bytes:
    """Return the bytes in the only field of a row.

    Raises:
        DamageError: the row does not have this form.
    """
    if len(row) < 2 * _WORD or row[:_WORD] != bytes(_WORD):
        raise DamageError("a row of state does not have the layout that stateful functions write")
    size, at = struct.unpack_from("<ii", row, _WORD)
    if at != 2 * _WORD or not 0 <= size <= len(row) - at:
        raise DamageError("a row of state does not have the layout that stateful functions write")
    return row[at : at + size]


def _number(value: int) -> bytes:
    """Return a row of one int."""
    return struct.pack("<qiI", 0, value, 0)


def _row(*fields: int | bytes) -> bytes:
    """Return a row of longs, and of bytes or rows."""
    words, behind = struct.pack("<q", 0), b""
    start = _WORD * (1 + len(fields))
    for field in fields:
        if isinstance(field, int):
            words += struct.pack("<q", field)
        else:
            words += struct.pack("<ii", len(field), start + len(behind))
            behind += field + bytes(-len(field) % _WORD)
    return words + behind
