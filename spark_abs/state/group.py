"""One key group: its state in segments, lookups, and the changes of a batch.

New states are appended as a segment; a key's newest row counts. Enough segments of one level are merged, and
all segments once more rows are superseded than alive. So the written bytes grow with the touched state, not
with the whole state (see `adr/004-layout-of-function-state.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_abs.codec import from_json, to_json
from spark_abs.errors import DamageError
from spark_abs.state.keys import Hashes, Places
from spark_abs.state.segments import (
    EXPIRES,
    KEY,
    NEVER,
    REMOVED,
    STATE,
    TIMEOUT,
    Flags,
    Segment,
    SegmentMetadata,
    decode,
    digest_of,
    encode,
)

FORMAT = 1
_FAN, _SPREAD = 6, 5


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a key group, which is read first: its segments, oldest first, and its native timer."""

    operator: str
    """Digest of the operator: uid, number of groups, schemas."""
    segments: tuple[SegmentMetadata, ...] = ()
    slots: int = 0
    """How many slots have ever been used."""
    timer: int | None = None
    """The time of the group's one native timer. A timer fires when its time is reached, a timeout is due when
    its time has passed: so this is the earliest timeout plus one, or later if a timeout was already past when
    the timer fired."""
    v: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(metadata.size for metadata in self.segments)


def read_head(data: bytes) -> Head:
    """Parse a head.

    Raises:
        DamageError: the bytes are not a head, or of an unknown version.
    """
    head = from_json(Head, data)
    if head.v != FORMAT:
        raise DamageError(f"the head of a key group has format {head.v}; this version reads {FORMAT}")
    return head


class GroupStore(Protocol):
    """The store of one key group. Calls are expensive. Changes of a failed batch are lost."""

    def read_head(self) -> bytes | None:
        """Return the head, None if the group has no state."""

    def write_head(self, data: bytes) -> None:
        """Replace the head."""

    def remove_head(self) -> None:
        """Remove the head: the group then has no state."""

    def read_segment(self, slot: int) -> bytes | None:
        """Return the bytes in a slot."""

    def write_segment(self, slot: int, data: bytes) -> None:
        """Write bytes to a new slot."""

    def remove_segment(self, slot: int) -> None:
        """Empty a slot."""

    def set_timer(self, at_ms: int) -> None:
        """Register a native timer."""

    def remove_timer(self, at_ms: int) -> None:
        """Remove a native timer."""


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of a batch to a key group."""

    table: pa.Table
    """All columns of a segment, with one row for each changed key, in canonical form."""
    where: Places
    rows: Places
    """The present row of each key, as `KeyGroup.find` returns it."""


class KeyGroup:
    """The state of one key group in memory.

    `alive[i][row]`: no newer segment has the key. A removal row is alive while an older segment may have the
    key. `pending` has the timeouts of alive rows: as in Spark, a key without state may have one.
    """

    def __init__(self, number: int, segments: list[Segment], head: Head, at: bytes | None) -> None:
        self.number = number
        self.head = head
        self.at = at
        """The head's bytes in the store: if the store has other bytes, this object is out of date."""
        self._metadata = list(head.segments)
        self._segments: list[Segment] = []
        self._alive: list[Flags] = []
        self._pending: list[Places] = []
        for segment in segments:
            self._supersede(*self.find(segment.keys, segment.hashes))
            self._segments.append(segment)
            self._append(segment)

    @classmethod
    def load(
        cls,
        number: int,
        store: GroupStore,
        *,
        head: Head,
        at: bytes,
        known: KeyGroup | None,
        fit: Callable[[pa.Table], pa.Table] = lambda table: table,
    ) -> KeyGroup:
        """Read a key group, without segments that `known` already has.

        `fit` converts each table to the columns of the present form.

        Raises:
            DamageError: a segment is missing or altered.
        """
        have: dict[str, Segment] = {}
        if known is not None:
            have = {n.digest: s for n, s in zip(known._metadata, known._segments, strict=True)}
        segments = []
        for metadata in head.segments:
            segment = have.get(metadata.digest)
            if segment is None:
                data = store.read_segment(metadata.slot)
                if data is None:
                    raise DamageError(f"segment {metadata.slot} of key group {number} is missing")
                segment = Segment(fit(decode(data, metadata.digest)))
            segments.append(segment)
        return cls(number, segments, head, at)

    @property
    def size(self) -> int:
        """Approximate bytes of memory."""
        return sum(segment.memory for segment in self._segments)

    def find(self, keys: list[pa.Array], hashed: Hashes) -> tuple[Places, Places]:
        """Return segment and row of each key, -1 for a key in no segment. Removed keys are found too."""
        where = np.full(len(hashed), -1, np.int64)
        rows = np.full(len(hashed), -1, np.int64)
        open_ = np.arange(len(hashed))
        for number in range(len(self._segments) - 1, -1, -1):
            if not len(open_):
                break
            found = self._segments[number].find([k.take(pa.array(open_)) for k in keys], hashed[open_])
            hit = found >= 0
            where[open_[hit]], rows[open_[hit]] = number, found[hit]
            open_ = open_[~hit]
        return where, rows

    def has_state(self, where: Places, rows: Places, now_ms: int) -> Flags:
        """Say for each found row whether it holds a state that has not expired."""
        has = np.zeros(len(where), np.bool_)
        for number, segment in enumerate(self._segments):
            at = np.flatnonzero(where == number)
            has[at] = ~segment.removed[rows[at]] & (segment.expires[rows[at]] > now_ms)
        return has

    def timeouts(self, where: Places, rows: Places) -> Places:
        """Return the timeouts of found rows, `NEVER` for none."""
        found = np.full(len(where), NEVER, np.int64)
        for number, pending in enumerate(self._pending):
            at = np.flatnonzero(where == number)
            found[at] = pending[rows[at]]
        return found

    def expires(self, where: Places, rows: Places) -> Places:
        """Return when the states of found rows expire, `NEVER` for no expiry."""
        found = np.full(len(where), NEVER, np.int64)
        for number, segment in enumerate(self._segments):
            at = np.flatnonzero(where == number)
            found[at] = segment.expires[rows[at]]
        return found

    def take(self, where: Places, rows: Places, schema: pa.Schema) -> pa.Table:
        """Return keys and states of found rows, in their order, with the column names of `schema`."""
        parts = [
            self._segments[number].table.select(schema.names).take(pa.array(rows[where == number]))
            for number in range(len(self._segments))
        ]
        if not parts:
            return schema.empty_table()
        order = np.argsort(np.argsort(where, kind="stable"), kind="stable")
        return pa.concat_tables(parts).take(pa.array(order)).cast(schema)

    def all_states(self, schema: pa.Schema) -> pa.Table:
        """Return keys and states of all keys that have a state, expired states included."""
        parts = [
            segment.table.select([n for n in segment.table.column_names if n.startswith((KEY, STATE))])
            .filter(pa.array(alive & ~segment.removed))
            .rename_columns(schema.names)
            .cast(schema)
            for segment, alive in zip(self._segments, self._alive, strict=True)
        ]
        return pa.concat_tables([schema.empty_table(), *parts])

    def all_rows(self, schema: pa.Schema) -> pa.Table:
        """Return the row of each key that has a state or a timeout, in the columns of a segment."""
        parts = []
        for segment, alive in zip(self._segments, self._alive, strict=True):
            kept = alive & (~segment.removed | (segment.timeouts != NEVER))
            parts.append(_widened(segment.table, schema).filter(pa.array(kept)))
        return pa.concat_tables([schema.empty_table(), *parts])

    def due(self, before_ms: int) -> tuple[Places, Places]:
        """Return segment and row of the keys whose timeout is before a time."""
        where, rows = [], []
        for number, pending in enumerate(self._pending):
            at = np.flatnonzero(pending < before_ms)
            where.append(np.full(len(at), number, np.int64))
            rows.append(at)
        if not where:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(where), np.concatenate(rows)

    def apply(
        self,
        change: Change,
        store: GroupStore,
        now_ms: int,
        due_ms: int | None = None,
        *,
        fired: bool = False,
    ) -> None:
        """Write the changes of a batch: one segment, merged with older ones if a merge is due, and the head.

        Args:
            change: the changes.
            store: the store to write to.
            now_ms: states that have expired by this time may be dropped.
            due_ms: the clock of timeouts; None without timeouts.
            fired: whether the native timer has fired: Spark then removes it.
        """
        needed = ~_silent(change.table) | (change.where >= 0)  # nothing to say of a key that was never here
        table = change.table if needed.all() else change.table.filter(pa.array(needed))
        self._supersede(change.where, change.rows)
        slots = self.head.slots
        for number in range(len(self._segments) - 1, -1, -1):
            if not self._alive[number].any():
                self._drop(number, store)
        first, level = self._merged_from(table.num_rows)
        if table.num_rows or first < len(self._segments):
            merged = self._merge(first, table, now_ms)
            for number in range(len(self._segments) - 1, first - 1, -1):
                self._drop(number, store)
            if len(merged):
                data = encode(merged.table)
                store.write_segment(slots, data)
                self._metadata.append(SegmentMetadata(slots, level, len(merged), len(data), digest_of(data)))
                self._segments.append(merged)
                self._append(merged)
                slots += 1
        timer = self._timer(due_ms, store, fired)
        self._write_head(replace(self.head, segments=tuple(self._metadata), slots=slots, timer=timer), store)

    def _drop(self, number: int, store: GroupStore) -> None:
        store.remove_segment(self._metadata[number].slot)
        for column in (self._metadata, self._segments, self._alive, self._pending):
            del column[number]

    def _timer(self, due_ms: int | None, store: GroupStore, fired: bool) -> int | None:
        """Register the native timer and return its time.

        Timers fire after a batch's rows, so a timer in the past fires in this batch. When they have fired, it
        is too late for this batch: a past timeout then waits until the clock has advanced.
        """
        earliest = min((int(p.min()) for p in self._pending if len(p)), default=NEVER)
        if fired and due_ms is not None:
            earliest = max(earliest, due_ms)
        timer = None if earliest == NEVER else earliest + 1
        past = due_ms is not None and earliest < due_ms
        if past or timer != self.head.timer:  # earlier versions may have left a past one in the head alone
            if self.head.timer is not None:
                store.remove_timer(self.head.timer)
            if timer is not None:
                store.set_timer(timer)
        return timer

    def _write_head(self, head: Head, store: GroupStore) -> None:
        if head == self.head and self.at is not None:
            return
        self.head = head
        if head.segments:
            self.at = to_json(head).encode()
            store.write_head(self.at)
        elif self.at is not None:
            self.at = None
            store.remove_head()

    def _supersede(self, where: Places, rows: Places) -> None:
        for number in range(len(self._alive)):
            at = rows[where == number]
            self._alive[number][at] = False
            self._pending[number][at] = NEVER

    def _append(self, segment: Segment) -> None:
        self._alive.append(np.ones(len(segment), np.bool_))
        self._pending.append(segment.timeouts.copy())

    def _mostly_dead(self, added: int) -> bool:
        """Say whether to rewrite all segments. Groups have different limits, to spread the rewrites."""
        rows = sum(len(s) for s in self._segments)
        alive = sum(int(a.sum()) for a in self._alive)
        slack = 1 + (self.number % 8) / 16
        return rows - alive > slack * (alive + added)

    def _merged_from(self, added: int) -> tuple[int, int]:
        """Return the first segment to merge with the added rows, and the level of the merged segment."""
        rows = added + sum(int(alive.sum()) for alive in self._alive)
        if self._mostly_dead(added):
            return 0, _level(rows)
        first, level = len(self._segments), _level(added)
        fan = _FAN + self.number % _SPREAD
        while added:
            run = first
            while run > 0 and self._metadata[run - 1].level <= level:
                run -= 1
            if first - run < fan - 1:
                break
            first, level = run, level + 1
        return first, level

    def _merge(self, first: int, table: pa.Table, now_ms: int) -> Segment:
        """Merge alive rows of segments with new rows, without rows that carry no information any more."""
        parts = []
        for number in range(first, len(self._segments)):
            segment, alive = self._segments[number], self._alive[number]
            if first == 0:  # nothing older is left that an expired state would have to hide
                alive = alive & ((segment.expires > now_ms) | (segment.timeouts != NEVER))
            parts.append(_widened(segment.table.filter(pa.array(alive)), table.schema))
        merged = pa.concat_tables([*parts, table])
        if first == 0:
            merged = merged.filter(pa.array(~_silent(merged)))
        return Segment.sorted(merged)


def _level(rows: int) -> int:
    return rows.bit_length() // 3


def _silent(table: pa.Table) -> Flags:
    """Say which rows only mark a key as removed: no state, no timeout."""
    silent: Flags = pc.and_(table[REMOVED], table[TIMEOUT].is_null()).to_numpy()
    return silent.astype(np.bool_)


def _widened(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Add to a segment's table the columns that were left out as empty."""
    for field in schema:
        if field.name not in table.column_names:
            value = False if field.name == REMOVED else None
            table = table.append_column(field, pa.array([value] * table.num_rows, field.type))
    return table.select(schema.names).cast(schema)


def segment_schema(key: pa.Schema, state: pa.Schema) -> pa.Schema:
    """Return the columns of a segment of an operator."""
    return pa.schema(
        [
            *(pa.field(KEY + f.name, f.type) for f in key),
            *(pa.field(STATE + f.name, f.type) for f in state),
            pa.field(REMOVED, pa.bool_()),
            pa.field(TIMEOUT, pa.int64()),
            pa.field(EXPIRES, pa.int64()),
        ]
    )
