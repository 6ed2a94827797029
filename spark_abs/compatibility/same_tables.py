"""Whether the Delta tables of sinks are as the last run left them; other programs may have changed them."""

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
    """Refuse a sink's table that was replaced, or that is older than at the newest checkpoint.

    Only records of the current attempt are compared: the first start after a restore has none, and the
    restore has checked the tables itself. Changes nothing. `existing="take_over"` accepts the table as it is,
    once: until a run of the root has taken it over.

    Raises:
        TableChanged: the message has the recorded table, the present table, and the remedies.
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
        why = (
            f"was replaced by a different table: its id is {table.id}, the recorded id is {' or '.join(ids)}"
        )
        raise TableChanged(_told(sink, place.uri, why, taken))
    recorded = newest_version(past, table.id)
    if table.version < recorded:
        why = f"is at version {table.version}, older than version {recorded} of the newest checkpoint"
        raise TableChanged(_told(sink, place.uri, f"{why}: perhaps a backup was put back", taken))


def newest_version(past: Past, table_id: str) -> Version:
    """Return a table's version at the attempt's newest checkpoint; `NO_TABLE` if that has no such table."""
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
            "to continue with the table as it is, rename the sink and declare it with existing='take_over' "
            f"(run {taken} has used the takeover of the present name)"
        )
    return (
        f"sink {sink.name!r}: {uri} {why}. Rows that the job has committed are missing from it and would "
        "not be written again. Put the recorded table back; or restore the job to a checkpoint that the "
        f"table still has (restart='checkpoint', or a restore, whose plan shows each table); or {meant}; or "
        "give the sink a new name and a new table, which gets the rows from now on"
    )


def refuse_moved_sink(sink: SinkSpec, state: ControlState, storage: Storage) -> None:
    """Refuse a sink whose table name now leads to a different table.

    Raises:
        Refused: the name leads to a different table; the message says what to do.
    """
    if sink.target is not None:
        refuse_other_table(
            f"sink {sink.name!r}",
            sink.target,
            records=[record for record in _recorded(state, storage) if record.sink == sink.name],
            attempt=state.attempt.id,
            storage=storage,
            otherwise="give the sink a new name: it then begins as a new sink",
        )


def _recorded(state: ControlState, storage: Storage) -> Iterator[AttachedSink]:
    yield from (sink for sink in state.sinks if sink.version is None)
    for sink in state.outside:
        table = table_of(sink.kind, sink.settings, storage)
        if table is not None:
            yield AttachedSink(
                sink.stage, sink.sink, table.path, "", name=table.name, attempt=state.attempt.id
            )
