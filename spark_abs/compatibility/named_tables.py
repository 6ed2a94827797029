"""Whether the names of sinks' tables still lead to the tables that the job has written."""

from __future__ import annotations

from collections.abc import Iterator

from spark_abs.catalog.recorded import refuse_moved
from spark_abs.codec import from_json
from spark_abs.plan.specs import SinkSpec
from spark_abs.protocol.control import AttachedSink, ControlState
from spark_abs.sinks.delta.epoch_sink import EpochTable
from spark_abs.sinks.registry import DELTA
from spark_abs.store.storage import Storage


def refuse_moved_sink(sink: SinkSpec, state: ControlState, storage: Storage) -> None:
    """Refuse a sink whose table has a name that leads to another table than before.

    Raises:
        Refused: it does; says what to do.
    """
    if sink.target is not None:
        refuse_moved(
            f"sink {sink.name!r}",
            sink.target,
            [record for record in _recorded(state) if record.sink == sink.name],
            state.attempt.id,
            storage,
            "give the sink another name, under which it begins",
        )


def _recorded(state: ControlState) -> Iterator[AttachedSink]:
    yield from (sink for sink in state.sinks if sink.version is None)
    for sink in state.outside:
        if sink.kind == DELTA:
            table = from_json(EpochTable, sink.settings)
            yield AttachedSink(
                sink.stage, sink.sink, table.path, "", name=table.name, attempt=state.attempt.id
            )
