"""The rows of an output as records of Kafka: the columns that rows may have, and how the client gets them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Producer

from spark_abs.errors import SinkFailed, SinkUnreachable
from spark_abs.sinks.kafka.client import FENCED
from spark_abs.sinks.kafka.config import is_topic

RECORDS = 10_000
"""The most records that are handed to the client at once."""
BYTES = 8 * 2**20
"""About the most bytes of them: a transaction may end between two pieces."""
_TEXT = "string or binary"
_KINDS = {
    "value": _TEXT,
    "key": _TEXT,
    "topic": "string",
    "partition": "int",
    "headers": "array<struct<key string, value binary>>",
}


def misfits(schema: pa.Schema, topic: str | None) -> Iterator[str]:
    """Iterate the reasons why rows cannot be records, a line each: columns are those of Spark's own sink."""
    names = set(schema.names)
    if "value" not in names:
        yield f"there is no column 'value' ({_TEXT})"
    for name, kind in _KINDS.items():
        if name in names and not _fits(name, schema.field(name).type):
            yield f"column {name!r} is {schema.field(name).type}, and must be {kind}"
    for name in schema.names:
        if name not in _KINDS:
            yield f"column {name!r} has no place in a record"
    if topic is None and "topic" not in names:
        yield "no topic is given, and there is no column 'topic' (string)"
    if topic is not None and "topic" in names:
        yield f"topic {topic!r} is given, and a column 'topic' is there too: remove one of them"


def proposal(schema: pa.Schema) -> str:
    """Return an expression that makes records of any rows, for a message."""
    key = next((name for name in schema.names if name not in _KINDS), "id")
    return (
        "this makes records of any rows:\n  "
        f'frame.selectExpr("CAST({key} AS STRING) AS key", "to_json(struct(*)) AS value")'
    )


def slices(batch: pa.RecordBatch, most: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of at most so many rows, and of about `BYTES` at most."""
    most = max(1, min(most, batch.num_rows * BYTES // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, most):
        yield batch.slice(start, most)


def misplaced(batch: pa.RecordBatch, partitions: int) -> str:
    """Name a partition of the rows that a topic with so many partitions lacks; empty if it has them all."""
    if "partition" not in batch.schema.names:
        return ""
    least, most = pc.min_max(batch.column("partition")).as_py().values()
    if least is None or (least >= 0 and most < partitions):
        return ""
    return str(least if least < 0 else most)


def by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Iterate the rows for each topic, in their order.

    Raises:
        SinkFailed: a row has no topic, or no valid name of one.
    """
    if topic is not None:
        yield topic, batch
        return
    named = batch.column("topic")
    if named.null_count:
        raise SinkFailed("column 'topic' is null in a row: each row needs a topic")
    for name in sorted(named.unique().to_pylist()):
        if not is_topic(name):
            raise SinkFailed(f"column 'topic' is {name!r} in a row, which is not the name of a topic")
        yield name, batch.filter(pc.equal(named, name))


def hand_over(producer: Producer, topic: str, batch: pa.RecordBatch, patience_s: float) -> None:
    """Put the rows of a batch into the client's queue, in their order; wait while it is full.

    Many records go in one call. librdkafka takes headers and partitions record by record only: its call for
    many has no headers, and Python's does not hand on the partitions.

    Raises:
        SinkFailed: a record is too large, or its partition is not there.
        SinkUnreachable: no record left the queue for so long.
    """
    until = time.monotonic() + patience_s
    if not {"headers", "partition"} & set(batch.schema.names):
        _many(producer, topic, _messages(batch), until)
        return
    for arguments in _arguments(batch):
        while True:
            try:
                producer.produce(topic, **arguments)
                break
            except BufferError:
                _wait(producer, topic, until)
            except KafkaException as error:
                _refuse(topic, error.args[0])
    producer.poll(0)


def _many(producer: Producer, topic: str, messages: list[dict[str, Any]], until: float) -> None:
    while True:
        taken = producer.produce_batch(topic, messages)
        if taken == len(messages):
            break
        errors = [message.pop("_error") for message in messages if "_error" in message]
        for error in errors:
            if error.code() != KafkaError._QUEUE_FULL:
                _refuse(topic, error)
        messages = messages[taken:]  # after the first for which there is no room none is taken
        _wait(producer, topic, until)
    producer.poll(0)


def _wait(producer: Producer, topic: str, until: float) -> None:
    if time.monotonic() > until:
        raise SinkUnreachable(f"topic {topic}: records wait, and no broker takes them")
    producer.poll(0.1)


def _refuse(topic: str, error: KafkaError) -> None:
    if error.code() in FENCED:
        raise KafkaException(error)
    raise SinkFailed(f"topic {topic} does not take a record: {error.str()}")


def _messages(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    values = _bytes(batch, "value")
    if "key" not in batch.schema.names:
        return [{"value": value} for value in values]
    return [{"value": v, "key": k} for v, k in zip(values, _bytes(batch, "key"), strict=True)]


def _arguments(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    nothing: Sequence[Any] = [None] * batch.num_rows
    there = batch.schema.names
    keys = _bytes(batch, "key") if "key" in there else nothing
    partitions = batch.column("partition").to_pylist() if "partition" in there else nothing
    headers = batch.column("headers").to_pylist() if "headers" in there else nothing
    for value, key, partition, named in zip(_bytes(batch, "value"), keys, partitions, headers, strict=True):
        found: dict[str, Any] = {"value": value, "key": key}
        if partition is not None:
            found["partition"] = partition
        if named:
            found["headers"] = [(one["key"], one["value"]) for one in named]
        yield found


def _bytes(batch: pa.RecordBatch, name: str) -> list[bytes | None]:
    found: list[bytes | None] = batch.column(name).cast(pa.binary()).to_pylist()
    return found


def _fits(name: str, kind: pa.DataType) -> bool:
    if name in ("value", "key"):
        return bool(kind in (pa.string(), pa.binary()))
    if name == "headers":
        fields = kind.value_type if pa.types.is_list(kind) else None
        return (
            fields is not None
            and pa.types.is_struct(fields)
            and [(f.name, f.type) for f in fields] == [("key", pa.string()), ("value", pa.binary())]
        )
    return bool(kind == (pa.string() if name == "topic" else pa.int32()))
