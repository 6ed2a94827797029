"""Rows into and out of the operator: all rows of a key group are passed as one Arrow stream.

Spark's operator passes rows to Python through pandas, one by one, and loses values that pandas cannot
represent. It passes a stream of bytes unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_abs.spark.plan_facts import function_name
from spark_abs.state.keys import canonical, group_of, hashes
from spark_abs.store.row_batches import in_pieces, pieces

GROUP, ROWS, OUTPUT = "key_group", "rows", "output"
PACKED = pa.schema([(GROUP, pa.int32()), (ROWS, pa.binary())])

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 500_000, 64 * 2**20


@dataclass(frozen=True)
class Pack:
    """Turns rows into one stream for each key group. Runs before the shuffle, in `mapInArrow`."""

    rows: pa.Schema
    key: tuple[str, ...]
    key_groups: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pack the rows of a task, some hundred thousand at a time."""
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            held.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
                yield from pieces(self._packed(held))
                held, rows, size = [], 0, 0
        if rows:
            yield from pieces(self._packed(held))

    def _packed(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        table = fitted(pa.Table.from_batches(batches), self.rows)
        numbers = group_of(hashes([canonical(table[name]) for name in self.key]), self.key_groups)
        order = np.argsort(numbers, kind="stable")
        table, numbers = table.take(pa.array(order)).combine_chunks(), numbers[order]
        groups, starts = np.unique(numbers, return_index=True)
        ends = [*starts[1:].tolist(), len(numbers)]
        streams = [
            stream(table.slice(start, end - start)) for start, end in zip(starts.tolist(), ends, strict=True)
        ]
        return pa.record_batch([pa.array(groups, pa.int32()), pa.array(streams, pa.binary())], schema=PACKED)


@dataclass(frozen=True)
class Unpack:
    """Turns the operator's output into rows. Runs after it, in `mapInArrow`."""

    output: pa.Schema
    uid: str

    @property
    def __name__(self) -> str:
        """Its name in Spark's plan, which identifies the stateful function below it."""
        return function_name(self.uid)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Unpack one stream after the other."""
        for batch in batches:
            for data in batch.column(0):
                yield from in_pieces(table_of(data.as_buffer()).cast(self.output)).to_batches()


def stream(table: pa.Table) -> bytes:
    """Return a table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def table_of(data: bytes | pa.Buffer) -> pa.Table:
    """Read an Arrow stream."""
    return pa.ipc.open_stream(data).read_all()


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast a table to a schema that differs only in names, time zones and nullability."""
    renamed = table.rename_columns(schema.names)
    return renamed if renamed.schema.equals(schema) else renamed.cast(schema)


def on_time(rows: pa.Table, event_time: str, late_ms: int) -> pa.Table:
    """Drop late rows, whose event time is not after a watermark. Rows without an event time stay."""
    column = rows[event_time]
    if pa.types.is_struct(column.type):  # a window: its end counts
        column = pc.struct_field(column, "end")
    micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    return rows.filter(pc.fill_null(pc.greater(micros, late_ms * 1000), True))
