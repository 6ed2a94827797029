"""The operator inside Spark, with stand-ins for Spark's handle: what each partition remembers of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState

from spark_abs.errors import StateFunctionFailed
from spark_abs.state.batches import GroupAnswer, GroupBatch, per_batch
from spark_abs.state.declared import Before
from spark_abs.state.operator import Operator, Timeout
from spark_abs.state.packing import OUTPUT, ROWS, stream, table_of
from spark_abs.state.per_key import per_key
from spark_abs.state.processor import Processor

ROW = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
COUNT = pa.schema([("n", pa.int64())])


class Store:
    """One partition: what is kept under the key that is set."""

    handle_state = StatefulProcessorHandleState.INITIALIZED

    def __init__(self) -> None:
        self.key: Any = None
        self.kept: dict[Any, Any] = {}
        self.watermark_ms = 0
        self.processing_ms = 1
        self.timers: set[tuple[int, Any]] = set()

    def set_implicit_key(self, key: tuple[int]) -> None:
        self.key = key

    def _get_watermark_timestamp(self) -> int:
        return self.watermark_ms

    def _get_batch_timestamp(self) -> int:
        return self.processing_ms

    def at(self, *slot: Any) -> tuple[Any, ...]:
        return (self.key, *slot)


class Handle:
    """As Spark's `StatefulProcessorHandle`."""

    def __init__(self, store: Store) -> None:
        self._statefulProcessorApiClient = store

    def getValueState(self, name: str, _: Any) -> Any:  # noqa: N802 (Spark's name)
        return Value(self._statefulProcessorApiClient, name)

    def registerTimer(self, at_ms: int) -> None:  # noqa: N802 (Spark's name)
        store = self._statefulProcessorApiClient
        store.timers.add((at_ms, store.key))

    def deleteTimer(self, at_ms: int) -> None:  # noqa: N802 (Spark's name)
        store = self._statefulProcessorApiClient
        store.timers.discard((at_ms, store.key))

    getMapState = lambda self, name, *_: Slots(self._statefulProcessorApiClient, name)  # noqa: E731, N815


class Value:
    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    def get(self) -> Any:
        return self.store.kept.get(self.store.at(self.name))

    def update(self, value: Any) -> None:
        self.store.kept[self.store.at(self.name)] = value

    def clear(self) -> None:
        self.store.kept.pop(self.store.at(self.name), None)


class Slots(Value):
    def getValue(self, slot: Any) -> Any:  # noqa: N802 (Spark's name)
        return self.store.kept.get(self.store.at(self.name, *slot))

    def updateValue(self, slot: Any, value: Any) -> None:  # noqa: N802 (Spark's name)
        self.store.kept[self.store.at(self.name, *slot)] = value

    def removeKey(self, slot: Any) -> None:  # noqa: N802 (Spark's name)
        del self.store.kept[self.store.at(self.name, *slot)]


class Late:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> None:
        self.value += more


def count(key: tuple[Any, ...], rows: Iterator[Any], state: Any) -> tuple[Any, ...]:
    total = (state.get[0] if state.exists else 0) + sum(1 for _ in rows)
    state.update((total,))
    return key[0], total


def operator(uid: str = "count") -> Operator:
    out = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    return Operator("s", uid, 4, ("k",), ROW, COUNT, out, Timeout.EVENT_TIME)


def batch(
    store: Store, watermark_ms: int, *at_ms: int, before_ms: int = 0, uid: str = "count"
) -> tuple[list[int], int]:
    """Run a batch with rows of key 1 on a fresh processor; return counts, and how many rows were late."""
    store.watermark_ms, late = watermark_ms, Late()
    used: Any = late
    mine = operator(uid)
    processor = Processor(mine, per_key(mine, count, flat=False), "ts", used, Before(before_ms))
    handle: Any = Handle(store)
    processor.init(handle)
    rows = pa.table(
        [[1] * len(at_ms), pa.array([at * 1000 for at in at_ms], pa.int64()).cast(ROW.field(1).type)], ROW
    )
    timers: Any = None
    found = processor.handleInputRows((2,), iter([pd.DataFrame({ROWS: [stream(rows)]})]), timers)
    counts = [n for frame in found for data in frame[OUTPUT] for n in table_of(data)["n"].to_pylist()]
    processor.close()
    return counts, late.value


def test_a_row_is_late_by_the_watermark_of_the_batch_before() -> None:
    store = Store()
    assert batch(store, 0, 5, 6) == ([2], 0)
    assert batch(store, 10, 7, 11) == ([4], 0)
    assert batch(store, 20, 10, 11) == ([5], 1)


def test_a_partition_without_a_record_takes_the_watermark_that_the_query_begins_with() -> None:
    """As after a repartitioning: of all records one is left, in whichever partition."""
    store = Store()
    batch(store, 0, 5)
    batch(store, 10, 11)
    record = next(key for key in store.kept if key[0] == (-1,))
    for before_ms, expected in ((10, ([2], 1)), (0, ([3], 0))):
        fresh = Store()
        fresh.kept = {key: value for key, value in store.kept.items() if key != record}
        assert batch(fresh, 20, 10, 11, before_ms=before_ms) == (
            [expected[0][0] + 1],
            expected[1],
        )
        assert batch(fresh, 30, 20, 21)[1] == 1


def test_a_function_does_not_go_on_with_the_state_of_another_one() -> None:
    """Two of one stage, in the other order: each would find what the other has left, in the same form."""
    store = Store()
    batch(store, 0, 5)
    with pytest.raises(StateFunctionFailed, match="belongs to another function"):
        batch(store, 0, 5, uid="other")


RING = pa.schema([("k", pa.int64()), ("at", pa.int64()), ROW.field("ts")])
CLOCKS = [Timeout.EVENT_TIME, Timeout.PROCESSING_TIME]
Rings = Sequence[tuple[int, int | None]]


class Alarms:
    """A vectorised function over one partition: each key times out when its row says, be that past or not.

    What a key that has timed out says next, `again` tells; None: it is not mentioned.
    """

    def __init__(self, clock: Timeout) -> None:
        self.clock, self.store = clock, Store()
        self.again: Any = lambda key, at: at
        self.calls: list[tuple[list[int], list[int]]] = []
        """Keys with rows and keys that have timed out, of each call of the last batch."""
        self.waiting: dict[int, int] = {}
        """What the function has asked for and not had."""

    def batch(self, now_ms: int, rings: Rings = ()) -> list[tuple[list[int], list[int]]]:
        """Run a batch as Spark does: rows by key group, then the timers, each of which it then deletes."""
        store, mine = self.store, Operator("s", "alarms", 2, ("k",), RING, COUNT, COUNT, self.clock)
        store.watermark_ms = store.processing_ms = now_ms
        self.calls = []
        event_time = "ts" if self.clock is Timeout.EVENT_TIME else None
        late: Any = Late()
        processor = Processor(mine, per_batch(mine, self.call), event_time, late)
        handle: Any = Handle(store)
        processor.init(handle)
        timers: Any = None
        for group in sorted({key % 2 for key, _ in rings}):
            # Without an event time none is late.
            asked = [{"k": key, "at": at} for key, at in rings if key % 2 == group]
            rows = pa.Table.from_pylist(asked, RING)
            list(processor.handleInputRows((group,), iter([pd.DataFrame({ROWS: [stream(rows)]})]), timers))
        for at_ms, key in sorted(store.timers):
            if at_ms <= now_ms:
                store.set_implicit_key(key)
                list(processor.handleExpiredTimer(key, timers, ExpiredTimerInfo(at_ms)))
                store.timers.discard((at_ms, key))
        processor.close()
        return self.calls

    def call(self, rows: pa.Table, _: pa.Table, batch: GroupBatch) -> GroupAnswer:
        asked = {row["k"]: row["at"] for row in rows.to_pylist()}
        late = batch.timed_out["k"].to_pylist()
        self.calls.append((sorted(asked), sorted(late)))
        new = {key: at for key, at in asked.items() if at is not None}
        for key in late:
            at = self.again(key, self.waiting.pop(key))
            if at is not None:
                new[key] = at
        self.waiting.update(new)
        columns = [list(new), [0] * len(new), list(new.values())]
        schema = pa.schema([*COUNT.insert(0, pa.field("k", pa.int64())), ("timeout_ms", pa.int64())])
        return GroupAnswer(pa.table(columns, schema))


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_timeout_that_is_past_when_it_is_asked_for_again_stops_no_timer(clock: Timeout) -> None:
    run = Alarms(clock)
    assert run.batch(50, [(0, 110), (2, 210)]) == [([0, 2], [])]
    assert run.batch(150) == [([], [0])]
    assert run.batch(150) == []  # its clock has to move on first
    assert run.batch(151) == [([], [0])]
    assert run.batch(300) == [([], [0, 2])]
    run.again = lambda key, at: at + 300 if key else None
    assert run.batch(400) == [([], [0, 2])]
    assert run.batch(510) == []
    assert run.batch(511) == [([], [2])]


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_key_with_rows_that_asks_for_a_time_that_is_past_times_out_in_the_same_batch(
    clock: Timeout,
) -> None:
    run = Alarms(clock)
    run.again = lambda *_: None
    assert run.batch(300, [(0, 110), (2, 310), (1, 300)]) == [([0, 2], []), ([1], []), ([], [0])]
    assert run.batch(301) == [([], [1])]
    assert run.batch(311) == [([], [2])]
    assert run.store.timers == set()


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_group_that_an_earlier_version_has_left_without_its_timer_has_it_again(clock: Timeout) -> None:
    run = Alarms(clock)
    run.batch(50, [(0, 110), (2, 210)])
    run.store.timers.clear()
    assert run.batch(300) == []
    assert run.batch(300, [(0, 110)]) == [([0], [2]), ([], [0, 2])]
    assert run.batch(400) == [([], [0, 2])]


batches = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.dictionaries(st.integers(0, 7), st.none() | st.integers(-20, 20), max_size=4),
        st.lists(st.none() | st.integers(-20, 20), min_size=1, max_size=4),
    ),
    max_size=12,
)


@given(st.sampled_from(CLOCKS), batches)
def test_each_group_has_one_timer_for_what_waits_longest(
    clock: Timeout, story: list[tuple[int, dict[int, int | None], list[int | None]]]
) -> None:
    """Whatever is asked for, past or not: it is called once the clock has moved past it."""
    run, now = Alarms(clock), 100
    for passed, rings, answers in story:
        now += passed
        said = [None if answer is None else now + answer for answer in answers]
        run.again = lambda key, _, said=said: said[key % len(said)]
        before = {key for key, at in run.waiting.items() if at < now and passed}
        calls = run.batch(now, [(k, None if at is None else now + at) for k, at in rings.items()])
        assert before <= {key for call in calls for keys in call for key in keys}
        waiting = {group: [at for k, at in run.waiting.items() if k % 2 == group] for group in (0, 1)}
        expected = {(max(min(ats), now) + 1, (group,)) for group, ats in waiting.items() if ats}
        assert run.store.timers == expected
