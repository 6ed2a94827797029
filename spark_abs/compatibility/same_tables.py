"""Whether the Delta tables of sinks are those that the last run left; others may change them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from spark_abs.catalog.recorded import refuse_other_table
from spark_abs.compatibility.restored import Past
from spark_abs.errors import TableChanged
from spark_abs.model import NO_RUN, NO_TABLE, RunId, Version
from spark_abs.plan.specs import SinkSpec
from spark_abs.protocol.control import AttachedSink, ControlState, taken_over
from spark_abs.sinks.registry import table_of
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table


def require_same_table(sink: SinkSpec, past: Past) -> None:
    """Refuse a table that is another one than the sink has written, or older than its newest checkpoint.

    The records of the attempt count: the first start after a restore finds none, and the restore has looked
    at the tables itself. Changes nothing. `existing="take_over"` says that the table is meant as it is: once,
    until a run of the root has taken it over.

    Raises:
        TableChanged: names what was recorded, what is there, and the ways on.
    """
    state = past.control
    if sink.table is None:
        return
    if sink.existing is not None and all(known.sink != sink.name for known in state.sinks):
        return  # a new sink, which says that the table is meant
    place = past.root.storage.place(sink.table)
    taken = taken_over(state, sink.name, place.uri)
    if sink.existing == "take_over" and taken == NO_RUN:
        return
    mine = (known for known in state.sinks if known.attempt == state.attempt.id and known.table == place.uri)
    ids = sorted({known.table_id for known in mine if known.table_id})
    if not ids:
        return
    try:
        table = Table.open(place)
    except FileNotFoundError:
        raise TableChanged(_told(sink, place.uri, f"is gone: its id was {' or '.join(ids)}", taken)) from None
    if table.id not in ids:
        why = f"is another table: its id is {table.id}, recorded is {' or '.join(ids)}"
        raise TableChanged(_told(sink, place.uri, why, taken))
    recorded = newest_version(past, table.id)
    if table.version < recorded:
        why = f"is at version {table.version}, and was at {recorded} at the newest checkpoint"
        raise TableChanged(_told(sink, place.uri, f"{why}, as where a backup was put back", taken))


def newest_version(past: Past, table_id: str) -> Version:
    """Return the version of a table at the newest checkpoint of the attempt; `NO_TABLE` if it names none."""
    manifest = past.manifest
    if manifest is None or manifest.attempt != past.control.attempt.id:
        return NO_TABLE
    if any(sink.table_id == table_id and sink.took_over > manifest.run for sink in past.control.sinks):
        return NO_TABLE  # it was taken over since, as it was
    outputs = (output for part in manifest.stages for output in part.outputs if output.table_id == table_id)
    return max((output.version for output in outputs if output.version is not None), default=NO_TABLE)


def _told(sink: SinkSpec, uri: str, why: str, taken: RunId) -> str:
    meant = "declare the sink with existing='take_over' to continue with the table as it is"
    if taken != NO_RUN:
        meant = (
            f"to continue with the table as it is, give the sink another name with existing='take_over', "
            f"which under this name was used up by run {taken}"
        )
    return (
        f"sink {sink.name!r}: {uri} {why}. Rows that the job has committed are missing from it and "
        "would not be written again. Put the right table back; or take the job back to a checkpoint that the "
        f"table has (restart='checkpoint', or a restore, whose plan shows each table); or {meant}; "
        "or give the sink another name and table, which gets the rows from now on"
    )


def refuse_moved_sink(sink: SinkSpec, state: ControlState, storage: Storage) -> None:
    """Refuse a sink whose table has a name that leads to another table than before.

    Raises:
        Refused: it does; says what to do.
    """
    if sink.target is not None:
        refuse_other_table(
            f"sink {sink.name!r}",
            sink.target,
            records=[record for record in _recorded(state, storage) if record.sink == sink.name],
            attempt=state.attempt.id,
            storage=storage,
            otherwise="give the sink another name, under which it begins",
        )


def _recorded(state: ControlState, storage: Storage) -> Iterator[AttachedSink]:
    yield from (sink for sink in state.sinks if sink.version is None)
    for sink in state.outside:
        table = table_of(sink.kind, sink.settings, storage)
        if table is not None:
            yield AttachedSink(
                sink.stage, sink.sink, table.path, "", name=table.name, attempt=state.attempt.id
            )
