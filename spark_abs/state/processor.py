"""The operator inside Spark: a processor of `transformWithStateInPandas` whose keys are key groups.

One part is private to Spark: the client behind the handle, which sets the key of the state and knows the
batch's time in all time modes. Written for Spark 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from spark_abs.codec import from_json, to_json
from spark_abs.errors import DamageError
from spark_abs.manifest import StateFunction
from spark_abs.model import BatchId
from spark_abs.state.declared import NOTHING, Before
from spark_abs.state.operator import BatchTime, Cache, GroupFunction, Operator, Timeout, run_group
from spark_abs.state.packing import OUTPUT, ROWS, on_time, stream, table_of

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql.streaming.stateful_processor import (
        ExpiredTimerInfo,
        MapState,
        TimerValues,
        ValueState,
    )

BATCH_PROPERTY, QUERY_PROPERTY = "streaming.sql.batchId", "sql.streaming.queryId"
RECORD_GROUP = -1
"""The key of each partition's `Record`; key groups count from 0."""
FORMAT = 1

_BYTES = StructType([StructField("bytes", BinaryType())])
_SLOT = StructType([StructField("slot", IntegerType())])
_cache = Cache()


@dataclass(frozen=True, slots=True)
class Record:
    """The data of the operator that each partition stores beside its key groups.

    All partitions have the same record, under a key that does not move. After a repartitioning one partition
    has it, and the others begin as in a stage's first batch.
    """

    function: StateFunction
    watermark_ms: int
    """The watermark of the last batch; 0 without event-time timeouts.

    Like Spark's operators, a batch drops late rows by the watermark of the batch before.
    """
    v: int = FORMAT


class _Group:
    """One key group in Spark's state store. Its key must be set before each use."""

    def __init__(
        self, handle: StatefulProcessorHandle, heads: ValueState, segments: MapState, firing: int | None
    ) -> None:
        self._handle, self._heads, self._segments, self._firing = handle, heads, segments, firing

    def read_head(self) -> bytes | None:
        return _bytes(self._heads.get())

    def write_head(self, data: bytes) -> None:
        self._heads.update((data,))

    def remove_head(self) -> None:
        self._heads.clear()

    def read_segment(self, slot: int) -> bytes | None:
        return _bytes(self._segments.getValue((slot,)))

    def write_segment(self, slot: int, data: bytes) -> None:
        self._segments.updateValue((slot,), (data,))

    def remove_segment(self, slot: int) -> None:
        self._segments.removeKey((slot,))

    def set_timer(self, at_ms: int) -> None:
        self._handle.registerTimer(at_ms)

    def remove_timer(self, at_ms: int) -> None:
        if at_ms != self._firing:  # Spark removes the one that has fired
            self._handle.deleteTimer(at_ms)


def _bytes(row: tuple[Any, ...] | None) -> bytes | None:
    return None if row is None else bytes(row[0])


class Processor(StatefulProcessor):
    """Runs the operator for the key groups of one partition in one batch. Spark creates one for each."""

    def __init__(
        self,
        operator: Operator,
        function: GroupFunction,
        event_time: str | None,
        late: Accumulator[int],
        before: Before = NOTHING,
    ) -> None:
        """Take the operator and function to run, and the facts for a partition without a record."""
        self._operator, self._function = operator, function
        self._event_time, self._late, self._before = event_time, late, before

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state. Spark also calls this on the driver, which has no state."""
        self._handle = handle
        self._client = handle._statefulProcessorApiClient
        self._heads = handle.getValueState("heads", _BYTES)
        self._segments = handle.getMapState("segments", _SLOT, _BYTES)
        self._batch: tuple[BatchTime, int] | None = None
        self._live = self._client.handle_state is not StatefulProcessorHandleState.PRE_INIT

    def handleInputRows(  # noqa: N802 (Spark's name)
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: TimerValues,  # noqa: ARG002, N803 (asked for at once)
    ) -> Iterator[pd.DataFrame]:
        """Run a key group for its rows and its timed-out keys."""
        tables = [table_of(data) for frame in rows for data in frame[ROWS]]  # frames of pandas
        yield from self._run(int(key[0]), pa.concat_tables(tables), None)

    def handleExpiredTimer(  # noqa: N802 (Spark's name)
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: ARG002, N803 (asked for at once)
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Run a key group without rows for its timed-out keys."""
        firing = expiredTimerInfo.getExpiryTimeInMs()
        yield from self._run(int(key[0]), self._operator.rows.empty_table(), firing)

    def close(self) -> None:
        """Record the batch's watermark, by which the next batch drops late rows."""
        if self._live:
            self._begin()

    def _run(self, group: int, rows: pa.Table, firing: int | None) -> Iterator[pd.DataFrame]:
        time, late_ms = self._begin()
        self._client.set_implicit_key((group,))
        if self._event_time is not None and self._operator.timeout is Timeout.EVENT_TIME and rows.num_rows:
            on_time_rows = on_time(rows, self._event_time, late_ms)
            self._late.add(rows.num_rows - on_time_rows.num_rows)
            rows = on_time_rows
        store = _Group(self._handle, self._heads, self._segments, firing)
        scope = f"{_property(QUERY_PROPERTY)}/{self._operator.uid}/{self._operator.digest}"
        output = run_group(
            self._operator,
            self._function,
            store=store,
            cache=_cache,
            scope=scope,
            group=group,
            rows=rows,
            time=time,
        )
        if output.num_rows:
            yield pd.DataFrame({OUTPUT: [stream(output)]})

    def _begin(self) -> tuple[BatchTime, int]:
        """Return the batch and the watermark for late rows; check and renew the record once."""
        if self._batch is not None:
            return self._batch
        operator = self._operator
        watermark = None if self._event_time is None else self._client._get_watermark_timestamp()
        time = BatchTime(
            BatchId(int(_property(BATCH_PROPERTY) or -1)), self._client._get_batch_timestamp(), watermark
        )
        self._client.set_implicit_key((RECORD_GROUP,))
        data = _bytes(self._heads.get())
        late_by = watermark if operator.timeout is Timeout.EVENT_TIME else None
        if data is None:
            origin = self._before.functions.get(operator.uid, operator.form)
            record = Record(origin, self._before.watermark_ms)
        else:
            record = from_json(Record, data)
        if record.v != FORMAT:
            raise DamageError(
                f"{operator.name}: its record has format {record.v}, this version reads {FORMAT}"
            )
        self._operator = operator = operator.after(record.function)
        now = Record(operator.form, late_by or 0)
        if data is None or record != now:
            self._heads.update((to_json(now).encode(),))
        self._batch = time, record.watermark_ms
        return self._batch


def _property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)
