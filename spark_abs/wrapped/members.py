"""The queries that share a root: their parts in the newest checkpoint, and which cannot be combined."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from spark_abs.errors import GraphError, TableChanged
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.checkpoints import Checkpoints
from spark_abs.model import CheckpointId, StageId
from spark_abs.plan.tables import refer
from spark_abs.protocol.control import ControlState, forgotten
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.stages.native import tables_read
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table

log = logging.getLogger(__name__)


def recorded_parts(checkpoints: Checkpoints, state: ControlState) -> tuple[StageSnapshot, ...]:
    """Return the part that the newest checkpoint of the path has of each query, `carried` set.

    Queries that were forgotten are left out.
    """
    manifest, gone = checkpoints.newest_on(state.attempt), forgotten(state)
    if manifest is None:
        return ()
    parts = (part for part in manifest.stages if part.stage not in gone)
    return tuple(replace(part, carried=part.carried or manifest.id) for part in parts)


@dataclass(frozen=True, slots=True)
class Uses:
    """The tables that a query reads and writes."""

    stage: StageId
    reads: frozenset[str]
    """Ids of the Delta tables that it reads as streams."""
    tables: tuple[str, ...]
    """URIs of those that it writes."""
    known_from: CheckpointId | None = None
    """The checkpoint that tells of it, if it does not run."""

    @classmethod
    def of_part(cls, part: StageSnapshot) -> Uses:
        """Return what a checkpoint says of a query."""
        lines = parse_offsets(part.offsets).lines if part.offsets else ()
        tables = tuple(output.table for output in part.outputs if output.kind == "table")
        return cls(part.stage, tables_read(lines), tables, part.carried)


def refuse_together(one: Uses, others: Iterable[Uses], storage: Storage) -> None:
    """Refuse a query that cannot share a root with the others.

    Two that write one table would each record a version of it: no version has the rows of both as of their
    cuts. One that reads what another one writes, or itself, has no barriers on its way.

    Raises:
        GraphError: names the queries, and the table by its path.
    """
    _refuse_chain(one, one, storage)
    for other in others:
        if other.stage != one.stage:
            _refuse_chain(one, other, storage)
            _refuse_chain(other, one, storage)
            _refuse_shared(one, other, storage)


def _refuse_chain(reader: Uses, writer: Uses, storage: Storage) -> None:
    for uri in writer.tables if reader.reads else ():
        if refer(storage, uri).id in reader.reads:
            who = "itself" if reader is writer else f"query {writer.stage!r} of the same root"
            raise GraphError(
                f"query {reader.stage!r} reads {uri}, which {who} writes: without barriers between them no "
                f"checkpoint of both is consistent; declare both as stages of a Job{_gone(reader, writer)}"
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
    """Say what to do if a query that does not run will never run again."""
    return "".join(
        f". Query {q.stage!r} does not run, it is known from checkpoint {q.known_from}: if it is gone for "
        f"good, say so with `spark-abs forget ROOT {q.stage}`"
        for q in queries
        if q.known_from is not None
    )


def refuse_older(manifest: Manifest | None, stage: StageId, state: ControlState, storage: Storage) -> None:
    """Refuse a query whose tables are not as new as the newest checkpoint of its attempt found them.

    The function writes them by itself and may well replace or drop one: that is only said. An older version
    of the same table is what a backup leaves that was put back: its rows would be missing for good.

    Raises:
        TableChanged: names both versions, and the ways on.
    """
    part = manifest.stage(stage) if manifest is not None and manifest.attempt == state.attempt.id else None
    if part is None or part.carried is not None:
        return
    for output in part.outputs:
        if output.kind != "table" or output.version is None:
            continue
        try:
            table = Table.open(storage.place(output.table))
        except FileNotFoundError:
            log.warning("table %s of query %s is gone since its newest checkpoint", output.table, stage)
            continue
        if table.id != output.table_id:
            said = "table %s of query %s was replaced since its newest checkpoint: its id is %s, and was %s"
            log.warning(said, output.table, stage, table.id, output.table_id)
        elif table.version < output.version:
            raise TableChanged(
                f"query {stage!r}: table {output.table} is at version {table.version}, and was at "
                f"{output.version} at the newest checkpoint, as where a backup was put back: rows that the "
                "query has written are missing from it, and would not come again. Bring the table back, or "
                "restore a checkpoint that is not newer than it"
            )
