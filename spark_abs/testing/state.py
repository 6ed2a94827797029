"""Run a stateful function without Spark: batch by batch, with clocks that the test sets.

    run = StateDriver.per_key(count, key=["user"], rows=ROWS, state=STATE, output=OUT)
    assert run.batch([("ann", 1)]) == [("ann", 1)]

Except for Spark's state store, the code is that of a job: key groups, segments, timeouts. `restart` clears
the cache, so that the state is read again from its store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from spark_abs.model import BatchId
from spark_abs.state.batches import BatchFunction, per_batch
from spark_abs.state.group import KeyGroup, read_head
from spark_abs.state.keys import canonical, group_of, hashes
from spark_abs.state.operator import (
    BatchTime,
    Cache,
    GroupFunction,
    Operator,
    Timeout,
    run_group,
)
from spark_abs.state.per_key import KeyFunction, per_key
from spark_abs.state.values import table, tuples


@dataclass
class MemoryGroup:
    """The store of one key group, in memory; counts reads and writes."""

    head: bytes | None = None
    segments: dict[int, bytes] = field(default_factory=dict)
    timers: set[int] = field(default_factory=set)
    bytes_read: int = 0
    bytes_written: int = 0

    def read_head(self) -> bytes | None:
        """Return the head."""
        return self.head

    def write_head(self, data: bytes) -> None:
        """Replace the head."""
        self.head = data
        self.bytes_written += len(data)

    def remove_head(self) -> None:
        """Remove the head."""
        self.head = None

    def read_segment(self, slot: int) -> bytes | None:
        """Return the bytes in a slot."""
        data = self.segments.get(slot)
        self.bytes_read += len(data or b"")
        return data

    def write_segment(self, slot: int, data: bytes) -> None:
        """Fill a slot."""
        assert slot not in self.segments, f"slot {slot} is written twice"
        self.segments[slot] = data
        self.bytes_written += len(data)

    def remove_segment(self, slot: int) -> None:
        """Empty a slot."""
        del self.segments[slot]

    def set_timer(self, at_ms: int) -> None:
        """Register the one native timer."""
        assert not self.timers, "a key group has one native timer"
        self.timers.add(at_ms)

    def remove_timer(self, at_ms: int) -> None:
        """Remove it."""
        self.timers.remove(at_ms)


class StateDriver:
    """Runs one stateful operator over batches. State is kept as in Spark, in memory.

    A batch that fails leaves the state as it was, as in Spark.
    """

    def __init__(self, operator: Operator, function: GroupFunction) -> None:
        self.operator = operator
        self.groups: dict[int, MemoryGroup] = {}
        self._function = function
        self._cache = Cache()
        self._batches = 0

    @classmethod
    def per_key(
        cls,
        function: KeyFunction,
        *,
        key: Sequence[str],
        rows: pa.Schema,
        state: pa.Schema,
        output: pa.Schema,
        flat: bool = False,
        **options: Any,
    ) -> StateDriver:
        """Drive a function as `map_groups_with_state` calls it, or `flat_map_groups_with_state` if `flat`.

        Args:
            function: the function of key, rows and state.
            key: the key columns.
            rows: schema of the rows.
            state: schema of the state.
            output: schema of the returned rows.
            flat: whether the function returns any number of rows.
            options: `timeout`, `ttl_ms`, `key_groups`, `max_group_bytes`, as for the operator.
        """
        operator = _operator(key, rows, state, output, options)
        return cls(operator, per_key(operator, function, flat))

    @classmethod
    def per_batch(
        cls,
        function: BatchFunction,
        *,
        key: Sequence[str],
        rows: pa.Schema,
        state: pa.Schema,
        output: pa.Schema,
        **options: Any,
    ) -> StateDriver:
        """Drive a function as `map_batches_with_state` calls it; see `per_key`."""
        operator = _operator(key, rows, state, output, options)
        return cls(operator, per_batch(operator, function))

    def batch(
        self,
        rows: Iterable[Any] | pa.Table = (),
        *,
        processing_ms: int = 0,
        watermark_ms: int | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run one batch: rows as tuples, dicts or a table. Returns the output as tuples, in no order.

        As in Spark, timers fire after all rows, and a fired timer is deleted after the call.
        """
        given = rows if isinstance(rows, pa.Table) else table(list(rows), self.operator.rows)
        time = BatchTime(BatchId(self._batches), processing_ms, watermark_ms)
        hashed = hashes([canonical(given[name]) for name in self.operator.key])
        numbers = group_of(hashed, self.operator.key_groups)
        threshold = time.threshold(self.operator.timeout)
        before = {n: MemoryGroup(g.head, dict(g.segments), set(g.timers)) for n, g in self.groups.items()}
        out: list[tuple[Any, ...]] = []

        def run(number: int, rows: pa.Table) -> None:
            store = self.groups[number]
            out.extend(
                tuples(
                    run_group(
                        self.operator,
                        self._function,
                        store=store,
                        cache=self._cache,
                        scope="",
                        group=number,
                        rows=rows,
                        time=time,
                    )
                )
            )

        try:
            for number in sorted(set(numbers.tolist())):
                self.groups.setdefault(number, MemoryGroup())
                run(number, given.take(pa.array(np.flatnonzero(numbers == number))))
            for number, group in sorted(self.groups.items()):
                fired = {t for t in group.timers if threshold is not None and t <= threshold}
                if fired:
                    run(number, given.slice(0, 0))
                    group.timers -= fired
        except Exception:
            self.groups = before
            raise
        self._batches += 1
        return out

    def group_of(self, key: tuple[Any, ...]) -> int:
        """Return the number of a key's group."""
        names = self.operator.key_schema
        columns = [canonical(column) for column in table([key], names).columns]
        return int(group_of(hashes(columns), self.operator.key_groups)[0])

    def go_on_from(self, other: StateDriver) -> None:
        """Take over the state of an earlier version of the function, as a job's next start does.

        Raises:
            StateFunctionFailed: the function cannot continue with this state.
        """
        self.operator = self.operator.after(other.operator.form)
        self.groups, self._batches = other.groups, other._batches
        self.restart()

    def restart(self) -> None:
        """Clear the cached state of the process."""
        self._cache = Cache()

    @property
    def states(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """All states by key, read from the store, expired ones included."""
        found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        width = len(self.operator.key)
        for number, store in self.groups.items():
            for row in tuples(stored_states(self.operator, store, number)):
                found[row[:width]] = row[width:]
        return found


def stored_states(operator: Operator, store: MemoryGroup, number: int) -> pa.Table:
    """Return the states of one key group from its store."""
    if store.head is None:
        return operator.states_schema.empty_table()
    head = read_head(store.head)
    return KeyGroup.load(number, store, head=head, at=store.head, known=None, fit=operator.fit).all_states(
        operator.states_schema
    )


def _operator(
    key: Sequence[str], rows: pa.Schema, state: pa.Schema, output: pa.Schema, options: dict[str, Any]
) -> Operator:
    given = {"key_groups": 4, **options}
    given["timeout"] = Timeout(given.get("timeout", Timeout.NONE))
    return Operator("", "test", key=tuple(key), rows=rows, state=state, output=output, **given)
