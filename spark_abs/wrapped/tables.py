"""The tables of wrapped queries: found, recorded, and compared with records and with other queries."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.catalog.names import parse, readings
from spark_abs.catalog.recorded import refuse_other_table
from spark_abs.catalog.target import TableTarget, find_target
from spark_abs.errors import GraphError, TableChanged, UsageError
from spark_abs.manifest import Manifest, OutputVersion, StageSnapshot
from spark_abs.model import NO_TABLE, AttemptId, CheckpointId, StageId
from spark_abs.plan.tables import refer
from spark_abs.protocol.control import AttachedSink, ControlState, forgotten
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.stages.native import tables_read
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage, table_location
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

Declared = TableTarget | str
"""A table whose place is known, or a name that a session still has to resolve."""


def declare(texts: Sequence[str], storage: Storage) -> tuple[Declared, ...]:
    """Parse the tables of a query before it starts; relative paths count from the current directory.

    Raises:
        UsageError: a text names no table. Names in a catalog are checked only if a session is active.
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
            raise UsageError(f"{text!r} does not name a table: {readings(text, 'schema.name')}")
        if session is not None:
            find_target(session, storage, text)
        found.append(text)
    return tuple(found)


def find(session: SparkSession, storage: Storage, declared: Sequence[Declared]) -> tuple[TableTarget, ...]:
    """Return the current places of a query's tables.

    Raises:
        UsageError: as `find_target`.
    """
    return tuple(t if isinstance(t, TableTarget) else find_target(session, storage, t) for t in declared)


def find_again(session: SparkSession, storage: Storage, before: TableTarget) -> TableTarget:
    """Return the place of a table that did not exist: its creator may have chosen another place."""
    return before if before.name is None else find_target(session, storage, before.sql)


def refuse_others(
    stage: StageId,
    tables: Sequence[TableTarget],
    state: ControlState,
    newest: Manifest | None,
    storage: Storage,
) -> None:
    """Refuse names that lead to another table than at the newest checkpoint, or when it was attached.

    The names of a query that was forgotten since may lead anywhere.

    Raises:
        Refused: a name leads to another table.
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
            otherwise=f"run `spark-abs forget ROOT {stage}` and start the query again",
            at_cut=at_cut,
        )


def _at_cut(stage: StageId, output: OutputVersion, attempt: AttemptId) -> AttachedSink:
    return AttachedSink(
        stage, stage, output.table, output.table_id, output.version, name=output.name, attempt=attempt
    )


def attached(
    stage: StageId, tables: Sequence[TableTarget], state: ControlState, storage: Storage
) -> tuple[AttachedSink, ...]:
    """Return records of the tables of a query, each with its version before the query's first batch."""
    return tuple(_attached(stage, table, state, storage) for table in tables)


def came(stage: StageId, target: TableTarget, attempt: AttemptId, storage: Storage) -> AttachedSink:
    """Return the record of a table that the query has created: a restore may empty it."""
    table = Table.open(storage.place(target.uri))
    return AttachedSink(stage, stage, table.uri, table.id, NO_TABLE, name=target.said, attempt=attempt)


def _attached(stage: StageId, target: TableTarget, state: ControlState, storage: Storage) -> AttachedSink:
    place, name, attempt = storage.place(target.uri), target.said, state.attempt.id
    table = Table.find(place)
    if table is None:
        return AttachedSink(stage, stage, place.uri, "", NO_TABLE, name=name, attempt=attempt)
    # A run may have been killed before it recorded the table that its function had created.
    before = [s.table_id for s in state.sinks if s.stage == stage and name and s.name == name]
    version = NO_TABLE if before and not any(before) else table.version
    return AttachedSink(stage, stage, table.uri, table.id, version, name=name, attempt=attempt)


@dataclass(frozen=True, slots=True)
class Uses:
    """The tables that a query reads and writes."""

    stage: StageId
    reads: frozenset[str]
    """Ids of the Delta tables that it reads as streams."""
    tables: tuple[str, ...]
    """URIs of the tables that it writes."""
    known_from: CheckpointId | None = None
    """The checkpoint that it is known from, if it does not run."""

    @classmethod
    def of_part(cls, part: StageSnapshot) -> Uses:
        """Return the tables of a query as a checkpoint records them."""
        lines = parse_offsets(part.offsets).lines if part.offsets else ()
        tables = tuple(output.table for output in part.outputs if output.kind == "table")
        return cls(part.stage, tables_read(lines), tables, part.carried)


def refuse_together(one: Uses, others: Iterable[Uses], storage: Storage) -> None:
    """Refuse a query that cannot share a root with the others.

    If two queries write one table, no version of it has the rows of both at their cuts. If a query reads a
    table that it writes itself, or in a circle with others, there are always rows that it has yet to read.

    Raises:
        GraphError: names the queries, and the table by its path.
    """
    queries = [one, *(other for other in others if other.stage != one.stage)]
    for other in queries[1:]:
        _refuse_shared(one, other, storage)
    circle = _circle(one, queries, storage)
    if circle:
        reader, writer, uri = circle[0]
        who = "itself" if reader is writer else f"query {writer.stage!r} of the same root"
        back = f", and {writer.stage!r} reads {circle[1][2]} in turn" if len(circle) > 1 else ""
        raise GraphError(
            f"query {reader.stage!r} reads {uri}, which {who} writes{back}: there are always rows that are "
            "yet to be read, so no checkpoint is consistent; declare a Job with a feedback edge"
            f"{_gone(*(edge[0] for edge in circle))}"
        )


def _circle(one: Uses, queries: Sequence[Uses], storage: Storage) -> list[tuple[Uses, Uses, str]]:
    """Return the edges of a circle through a query, each as reader, writer and table; empty if none."""

    def back(reader: Uses, seen: frozenset[StageId]) -> list[tuple[Uses, Uses, str]]:
        for writer in queries:
            uri = next(_between(reader, writer, storage), None)
            if uri is None or writer.stage in seen:
                continue
            further = [] if writer is one else back(writer, seen | {writer.stage})
            if writer is one or further:
                return [(reader, writer, uri), *further]
        return []

    return back(one, frozenset())


def _between(reader: Uses, writer: Uses, storage: Storage) -> Iterator[str]:
    """Iterate the tables that one query writes and the other reads as a stream."""
    tables = writer.tables if reader.reads else ()
    return (uri for uri in tables if refer(storage, uri).id in reader.reads)


def read_apart(reader: Uses, writer: Uses, root: Root) -> tuple[str, ...]:
    """Say which tables of a query a query of another root reads: no restore takes both back.

    Args:
        reader: the query that reads.
        writer: the query that writes.
        root: the root of the writer.
    """
    return tuple(
        f"query {reader.stage!r} reads {uri}, which query {writer.stage!r} of the root {root.uri} writes: a "
        "restore of that root takes back rows that the stream has read; it then fails at the commit of the "
        "restore. Give both queries one root, whose restore takes them back together"
        for uri in _between(reader, writer, root.storage)
    )


def _refuse_shared(one: Uses, other: Uses, storage: Storage) -> None:
    taken = [refer(storage, uri) for uri in other.tables] if one.tables else []
    for table in (refer(storage, uri) for uri in one.tables):
        for same in taken:
            if table.is_same(same):
                where = table.uri if table.uri == same.uri else f"{table.uri} ({same.uri} is the same)"
                raise GraphError(
                    f"query {one.stage!r} writes {where}, and so does query {other.stage!r} of the same "
                    "root: no restore could bring back the rows of both; give each a table of its own, or "
                    f"declare both as stages of a Job and write the table from one{_gone(one, other)}"
                )


def _gone(*queries: Uses) -> str:
    """Return how to forget the queries that do not run, if they are gone for good."""
    return "".join(
        f". Query {q.stage!r} does not run, it is known from checkpoint {q.known_from}: if it is gone for "
        f"good, run `spark-abs forget ROOT {q.stage}`"
        for q in queries
        if q.known_from is not None
    )


def refuse_older(manifest: Manifest | None, stage: StageId, state: ControlState, storage: Storage) -> None:
    """Refuse a query if one of its tables is older than at the newest checkpoint of its attempt.

    An older version of the same table means that a backup was put back: rows would be missing for good. The
    function may also have replaced or dropped a table; that is only logged.

    Raises:
        TableChanged: names both versions, and the ways on.
    """
    part = manifest.stage(stage) if manifest is not None and manifest.attempt == state.attempt.id else None
    if part is None or part.carried is not None:
        return
    for output in part.outputs:
        if output.kind != "table" or output.version is None:
            continue
        table = Table.find(storage.place(output.table))
        if table is None:
            log.warning("table %s of query %s is gone since its newest checkpoint", output.table, stage)
            continue
        if table.id != output.table_id:
            said = "table %s of query %s was replaced since its newest checkpoint: its id is %s, and was %s"
            log.warning(said, output.table, stage, table.id, output.table_id)
        elif table.version < output.version:
            raise TableChanged(
                f"query {stage!r}: table {output.table} is at version {table.version}, and was at "
                f"{output.version} at the newest checkpoint, so an older copy was put back: rows that the "
                "query has written are missing, and would not be written again. Bring the newer table back, "
                "or restore a checkpoint that is not newer than the copy"
            )
