"""Queries and tables together: who writes and reads which table, and the cuts that this allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from spark_abs.cuts.cut import Batch, Pipeline
from spark_abs.errors import Refused, UsageError
from spark_abs.rewind.query import CLOCKS_MS, KeptBatch, QueryFacts, read_queries, with_kept
from spark_abs.rewind.table import TableFacts, attributed, is_timed, read_table, told_by_time
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found in storage."""

    queries: tuple[QueryFacts, ...]
    tables: tuple[TableFacts, ...]
    pipeline: Pipeline
    notes: tuple[str, ...]
    """Sentences about what a rewind cannot bring back."""


def survey(
    checkpoints: Sequence[Place],
    tables: Sequence[Place],
    until: Mapping[str, int] | None = None,
    fenced_by: str = "",
    kept: Mapping[str, KeptBatch] = MappingProxyType({}),
) -> Survey:
    """Read checkpoint directories and tables.

    Args:
        checkpoints: of the queries.
        tables: those that the queries write.
        until: table to the newest version that counts; others as they are.
        fenced_by: the id of the rewind whose fences are no obstacle.
        kept: checkpoint directory to a batch whose files are kept elsewhere.

    Raises:
        UsageError: one is not what it should be, or is given twice.
        Refused: a rewind is unfinished, or a table between two queries was not given.
        DamageError: a file is not as Spark or Delta writes it.
    """
    queries = tuple(
        query if (batch := kept.get(query.place.uri)) is None else with_kept(query, batch)
        for query in read_queries(checkpoints, fenced_by)
    )
    at = until or {}
    found = tuple(read_table(place, queries, at.get(place.uri)) for place in tables)
    functions = [query for query in queries if not _outputs(query, found)]
    found = tuple(attributed(table, functions, queries) for table in found)
    silent = [query for query in queries if not _outputs(query, found)]
    found = tuple(told_by_time(table, silent) for table in found)
    ids = [table.id for table in found]
    if twice := sorted({table.uri for table in found if ids.count(table.id) > 1}):
        raise UsageError(f"tables {' and '.join(twice)} are the same table: give it once")
    queries = tuple(_known(query, found) for query in queries)
    _refuse_missing(queries, found)
    pipeline = Pipeline(
        {query.name: query.batches for query in queries},
        tuple(w for table in found for query in queries for w in table.written(query)),
        tuple(
            read
            for table in found
            for query in queries
            if (read := query.read(table.id, table.uri, table.is_last)) is not None
        ),
    )
    return Survey(queries, found, pipeline, tuple(_notes(queries, found)))


def _known(query: QueryFacts, tables: Sequence[TableFacts]) -> QueryFacts:
    """Leave out the batches of which a shortened log does not say any more what they wrote."""
    first = max((table.unknown_before(query) for table in tables), default=0)
    kept: tuple[Batch, ...] = tuple(batch for batch in query.batches if batch.number >= first)
    return replace(query, batches=kept)


def _outputs(query: QueryFacts, tables: Sequence[TableFacts]) -> list[TableFacts]:
    return [table for table in tables if table.apps_of(query.name)]


def _refuse_missing(queries: Sequence[QueryFacts], tables: Sequence[TableFacts]) -> None:
    """Refuse a table that is read and not given while a query writes to no table that is given.

    It may be the table between them; rows would then be lost or come twice.
    """
    ids = {table.id for table in tables}
    unknown = [(q.name, at.table_id) for q in queries for _, at in q.sources if at.table_id not in ids]
    silent = [query.name for query in queries if not _outputs(query, tables)]
    if unknown and silent:
        reader, table = unknown[0]
        raise Refused(
            f"query {reader!r} reads the Delta table with id {table}, which was not given, and the log of no "
            f"given table names {' or '.join(map(repr, silent))} as its writer: if that is the table between "
            "them, rows would be lost or come twice. Give all tables that the queries write with --tables"
        )


def _notes(queries: Sequence[QueryFacts], tables: Sequence[TableFacts]) -> list[str]:
    ids = {table.id for table in tables}
    said = []
    for query in queries:
        said += [
            f"query {query.name!r} reads the Delta table with id {at.table_id}, which was not given: it is "
            "taken as a source and stays as it is, and its files are not looked at: some that are read again "
            "may be gone"
            for _, at in query.sources
            if at.table_id not in ids
        ]
        if query.others:
            said.append(
                f"query {query.name!r} has {', '.join(query.others)} in its checkpoint, which Spark does not "
                "write by itself: it stays as it is"
            )
        if not _outputs(query, tables):
            said.append(
                f"query {query.name!r} has written to none of the given tables: what it wrote elsewhere "
                "(Kafka, JDBC, files, a table without txnAppId) stays and is written again"
            )
        if any(app != query.id for table in tables for app in table.apps_of(query.name)):
            said.append(
                f"query {query.name!r} writes through a function: what it writes elsewhere (tables that were "
                "not given, Kafka, JDBC, files) stays and is written again"
            )
    for table in tables:
        said += [
            f"table {table.uri}: commits that name no batch were made by query {query!r}: this was concluded "
            "from their times, each within one batch of it and near none of another query (clocks may differ "
            f"by {CLOCKS_MS // 1000} s)"
            for app, query in table.writers.items()
            if is_timed(app)
        ]
        if not table.writers:
            said.append(f"none of the queries has written to table {table.uri}: it stays as it is")
        said += [
            f"table {table.uri}: commits under application id {app!r} are taken as those of others, since "
            + (f"queries {', '.join(map(repr, fits))} can have made them" if fits else "no query fits them")
            for app, fits in table.doubtful.items()
        ]
    return said
