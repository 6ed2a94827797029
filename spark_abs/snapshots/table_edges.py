"""Queries of one root of which one reads the table of another as a stream: whether their cuts fit together.

Such a table is the channel between the two. A checkpoint of both is consistent if the reader has read exactly
the rows that the table had at the cut of the writer; a restore then puts the reader behind its own commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from spark_abs.cuts.edge import ReadUntil, Stand, compare, together
from spark_abs.manifest import OutputVersion, StageSnapshot
from spark_abs.model import NO_TABLE, BatchId, StageId
from spark_abs.snapshots.delta_offsets import DeltaOffset, delta_offset
from spark_abs.snapshots.layout import OffsetFile, parse_offsets
from spark_abs.store.log import LogCommit, read_commit
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table

Commits = Callable[[int], LogCommit | None]
"""Returns a commit of a table, None if its log no longer has it."""

_FIRST_BATCH = BatchId(0)
_KEPT = 64
"""So many commits of a table are in memory."""


def delta_sources(offsets: OffsetFile, table_id: str) -> dict[str, DeltaOffset]:
    """Return the sources that read a table, with their offsets."""
    found = ((source, delta_offset(text)) for source, text in offsets.offsets.items())
    return {source: at for source, at in found if at is not None and at.table_id == table_id}


def tables_of(offsets: OffsetFile) -> frozenset[str]:
    """Return the ids of the Delta tables that offsets name."""
    return frozenset(at.table_id for text in offsets.offsets.values() if (at := delta_offset(text)))


def _until(at: DeltaOffset, commits: Commits, feed: bool) -> ReadUntil:
    unread = at.unread(lambda v, index: (one := commits(v)) is not None and one.is_last(index, feed))
    return ReadUntil(at.version, in_part=True) if unread is None else ReadUntil(unread)


@dataclass(frozen=True, slots=True)
class Edge:
    """A query that reads the table of another, and how far."""

    reader: StageId
    batch: BatchId
    """The last batch that it has ended, or will have."""
    offsets: OffsetFile
    writer: StageId
    table: str
    """Its URI."""
    table_id: str
    version: int
    """At the cut of the writer; -1 if there was no table."""
    feed: bool = False
    """Whether it is known that the reader reads the change feed of the table alone."""

    def stand(self, commits: Commits) -> Stand:
        """Compare how far the reader has read the table, of this log, with the cut of the writer."""

        def changes(number: int) -> bool:
            commit = commits(number)
            return commit is None or commit.data_change

        sources = delta_sources(self.offsets, self.table_id).values()
        return together(compare(_until(at, commits, self.feed), self.version, changes) for at in sources)

    @property
    def planned_from_the_beginning(self) -> bool:
        """Whether Spark plans the reader's last batch again from the beginning of the table at a start.

        It plans the last batch from the offsets of the batch before: the first one has none. That plan would
        hold the commit of a restore, at which it may fail.
        """
        return self.batch <= _FIRST_BATCH

    def said(self) -> str:
        """Name both queries, the table, and how far each is."""
        until = max(at.version for at in delta_sources(self.offsets, self.table_id).values())
        had = f"was at version {self.version}" if self.version >= 0 else "was not there"
        return (
            f"query {self.reader!r} has read {self.table} until the beginning of version {until}, and the "
            f"table {had} at the cut of query {self.writer!r}, which writes it"
        )


def edge_between(
    reader: StageId,
    batch: BatchId,
    offsets: OffsetFile,
    *,
    feeds: Collection[str],
    writer: StageId,
    output: OutputVersion,
    storage: Storage,
) -> Edge | None:
    """Return the edge from a table of a writer to a reader; None if the reader has not read it.

    Args:
        reader: the query that may read it.
        batch: a batch of the reader.
        offsets: those of the batch.
        feeds: as `StageSnapshot.feeds`.
        writer: the query that writes it.
        output: the table at the cut of the writer.
        storage: how it is reached.
    """
    table_id = output.table_id
    if not table_id and tables_of(offsets):  # there was no table at the cut
        table = Table.find(storage.place(output.table))
        table_id = "" if table is None else table.id
    if not table_id or not delta_sources(offsets, table_id):
        return None
    version = NO_TABLE if output.version is None else output.version
    return Edge(
        reader,
        batch,
        offsets,
        writer=writer,
        table=output.table,
        table_id=table_id,
        version=int(version),
        feed=table_id in feeds,
    )


def edges_of(parts: Sequence[StageSnapshot], storage: Storage) -> Iterator[Edge]:
    """Iterate the edges between the parts of one checkpoint."""
    read = [(part, parse_offsets(part.offsets)) for part in parts if part.offsets]
    for writer in parts:
        for output in (output for output in writer.outputs if output.kind == "table"):
            for part, offsets in read:
                if part.stage == writer.stage:
                    continue
                edge = edge_between(
                    part.stage,
                    part.cut_batch,
                    offsets,
                    feeds=part.feeds,
                    writer=writer.stage,
                    output=output,
                    storage=storage,
                )
                if edge is not None:
                    yield edge


def misaligned(parts: Sequence[StageSnapshot], storage: Storage) -> str:
    """Say which parts of a checkpoint do not fit together, empty if all do: the edge and both versions."""
    for edge in edges_of(parts, storage):
        if why := why_not_aligned(edge, commits_at(storage, edge.table)):
            return why
    return ""


def why_not_aligned(edge: Edge, commits: Commits) -> str:
    """Say why no restore can take both ends of an edge back together, empty if it can."""
    if edge.planned_from_the_beginning:
        return (
            f"{edge.said()}; the reader has ended its first batch only, which Spark plans again from the "
            "beginning of the table at a start"
        )
    return "" if edge.stand(commits) is Stand.ALIGNED else edge.said()


def commits_at(storage: Storage, uri: str) -> Commits:
    """Return the log of a table; each commit is read once."""
    place = storage.place(uri)
    return lru_cache(_KEPT)(lambda number: read_commit(place.fs, place.path, number) if number >= 0 else None)
