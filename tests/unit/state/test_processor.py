"""The operator inside Spark, with stand-ins for Spark's handle: what each partition remembers of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState

from spark_abs.errors import StateFunctionFailed
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

    def set_implicit_key(self, key: tuple[int]) -> None:
        self.key = key

    def _get_watermark_timestamp(self) -> int:
        return self.watermark_ms

    def _get_batch_timestamp(self) -> int:
        return 1

    def at(self, *slot: Any) -> tuple[Any, ...]:
        return (self.key, *slot)


class Handle:
    """As Spark's `StatefulProcessorHandle`."""

    def __init__(self, store: Store) -> None:
        self._statefulProcessorApiClient = store

    def getValueState(self, name: str, _: Any) -> Any:  # noqa: N802 (Spark's name)
        return Value(self._statefulProcessorApiClient, name)

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
    with pytest.raises(StateFunctionFailed, match="another function's"):
        batch(store, 0, 5, uid="other")
