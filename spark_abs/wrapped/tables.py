"""The tables that a wrapped query names: found, compared with what is recorded, and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_abs.catalog.names import parse, readings
from spark_abs.catalog.recorded import refuse_other_table
from spark_abs.catalog.target import TableTarget, find_target
from spark_abs.errors import UsageError
from spark_abs.manifest import Manifest, OutputVersion
from spark_abs.model import NO_TABLE, AttemptId, StageId
from spark_abs.protocol.control import AttachedSink, ControlState, forgotten
from spark_abs.store.storage import Storage, table_location
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Declared = TableTarget | str
"""A table whose place is known, or a name for which a session has not been asked yet."""


def declare(texts: Sequence[str], storage: Storage) -> tuple[Declared, ...]:
    """Take the tables of a query before it starts: relative paths count from here.

    Raises:
        UsageError: a text can be no table; as far as that can be known, which a session in this thread
            helps with.
    """
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    found: list[Declared] = []
    for text in texts:
        parsed = parse(text)
        if isinstance(parsed, str):
            found.append(TableTarget(text, table_location(parsed)))
            continue
        if parsed is None:
            raise UsageError(f"table {text!r} is no name of a table: {readings(text, 'schema.name')}")
        if session is not None:
            find_target(session, storage, text)
        found.append(text)
    return tuple(found)


def find(session: SparkSession, storage: Storage, declared: Sequence[Declared]) -> tuple[TableTarget, ...]:
    """Find where the tables of a query are now.

    Raises:
        UsageError: as `find_target`.
    """
    return tuple(t if isinstance(t, TableTarget) else find_target(session, storage, t) for t in declared)


def find_again(session: SparkSession, storage: Storage, before: TableTarget) -> TableTarget:
    """Find where a table is that was not there: who makes it may have given it a place of its own."""
    return before if before.name is None else find_target(session, storage, before.sql)


def refuse_others(
    stage: StageId,
    tables: Sequence[TableTarget],
    state: ControlState,
    newest: Manifest | None,
    storage: Storage,
) -> None:
    """Refuse names that lead elsewhere than at the newest checkpoint, or when the query came to them.

    Not if the query was forgotten since.

    Raises:
        Refused: one does.
    """
    if stage in forgotten(state):
        return
    part = newest.stage(stage) if newest is not None else None
    outputs = part.outputs if part is not None else ()
    mine = [s for s in state.sinks if s.stage == stage]
    at_cut = [_at_cut(stage, output, state.attempt.id) for output in outputs if output.kind == "table"]
    for table in tables:
        refuse_other_table(
            f"query {stage!r}",
            table,
            records=mine,
            attempt=state.attempt.id,
            storage=storage,
            otherwise=f"say so with `spark-abs forget ROOT {stage}` and start the query again",
            at_cut=at_cut,
        )


def _at_cut(stage: StageId, output: OutputVersion, attempt: AttemptId) -> AttachedSink:
    return AttachedSink(
        stage, stage, output.table, output.table_id, output.version, name=output.name, attempt=attempt
    )


def attached(
    stage: StageId, tables: Sequence[TableTarget], state: ControlState, storage: Storage
) -> tuple[AttachedSink, ...]:
    """Return the tables that a query comes to, each at the version that it has before its first batch."""
    return tuple(_attached(stage, table, state, storage) for table in tables)


def came(stage: StageId, target: TableTarget, attempt: AttemptId, storage: Storage) -> AttachedSink:
    """Return a table that the query has made: it had no rows when the query came."""
    table = Table.open(storage.place(target.uri))
    return AttachedSink(stage, stage, table.uri, table.id, NO_TABLE, name=target.said, attempt=attempt)


def _attached(stage: StageId, target: TableTarget, state: ControlState, storage: Storage) -> AttachedSink:
    place, name, attempt = storage.place(target.uri), target.said, state.attempt.id
    try:
        table = Table.open(place)
    except FileNotFoundError:
        return AttachedSink(stage, stage, place.uri, "", NO_TABLE, name=name, attempt=attempt)
    # A run may have been killed before it recorded the table that its function had made.
    before = [s.table_id for s in state.sinks if s.stage == stage and name and s.name == name]
    version = NO_TABLE if before and not any(before) else table.version
    return AttachedSink(stage, stage, table.uri, table.id, version, name=name, attempt=attempt)
