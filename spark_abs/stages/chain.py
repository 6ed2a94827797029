"""Chains of wrapped queries: of which one reads, as a Delta stream, a table that another writes.

The table is the channel between the two, and nobody can write a barrier into it. Instead the writer, once it
has made its cut, begins no batch before its readers have read what the table had at that cut. A reader makes
its cut with the first batch after which it has read exactly that. If it does not get there in time, the
checkpoint is aborted.

Nothing here decides that a checkpoint is consistent: `table_edges.misaligned` looks at all its parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from spark_abs.cuts.edge import Stand
from spark_abs.manifest import OutputVersion, StageSnapshot
from spark_abs.model import BatchId, CheckpointId, StageId
from spark_abs.snapshots.layout import OffsetFile, parse_offsets
from spark_abs.snapshots.table_edges import (
    Commits,
    Edge,
    commits_at,
    edge_between,
    tables_of,
    why_not_aligned,
)
from spark_abs.stages.watched import WATCHED
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table

_LOGS = 64


@dataclass(frozen=True, slots=True)
class Link:
    """A query of the root, as far as tables join it to others."""

    stage: StageId
    reads: frozenset[str]
    """Ids of the Delta tables that it reads as streams."""
    writes: tuple[str, ...]
    """URIs of the tables that it writes."""
    feeds: tuple[str, ...] = ()
    """As `StageSnapshot.feeds`."""
    part: StageSnapshot | None = None
    """Its recorded part, if it does not run: new checkpoints repeat it."""
    runs: Callable[[], bool] = lambda: True
    """Says whether it may still end a batch."""


@dataclass(slots=True)
class _Open:
    """An open checkpoint."""

    cuts: dict[StageId, tuple[OutputVersion, ...]] = field(default_factory=dict)
    """The outputs of the stages that have made their cuts."""
    waits: dict[StageId, str] = field(default_factory=dict)
    """What stages without a cut have yet to read."""
    missed: dict[StageId, str] = field(default_factory=dict)
    """Why stages will make no cut."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a writer still waits for its readers."""

    said: str
    hopeless: bool
    """Whether the reader does not run, so that waiting does not help."""


class Chain:
    """The queries of a root, the tables between them, and their cuts of open checkpoints. Any thread.

    Its memory may be lost with the process: a run aborts the open checkpoints of the run before.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._links: dict[StageId, Link] = {}
        self._open: dict[CheckpointId, _Open] = {}
        self._has: dict[tuple[str, str], bool] = {}
        """Whether the table at a URI had an id when a reader first named that id."""
        self._log: Callable[[str], Commits] = lru_cache(_LOGS)(lambda uri: commits_at(storage, uri))

    def put(self, link: Link) -> None:
        """Take a query, in place of its earlier self."""
        with self._lock:
            self._links[link.stage] = link

    def leave(self, stage: StageId) -> None:
        """Take a query out."""
        with self._lock:
            self._links.pop(stage, None)

    def opened(self, checkpoint: CheckpointId) -> None:
        """Take note of a claimed checkpoint. Repeatable."""
        with self._lock:
            self._open.setdefault(checkpoint, _Open())

    def settled(self, checkpoint: CheckpointId) -> None:
        """Forget a checkpoint that has its outcome; outcomes come in the order of ids. Repeatable."""
        with self._lock:
            self._open = {n: one for n, one in self._open.items() if n > checkpoint}

    def may_cut(self, stage: StageId, checkpoint: CheckpointId, batch: BatchId, offsets: OffsetFile) -> bool:
        """Say whether a stage may make its cut after a batch: what it has read fits the cuts of the writers.

        False, too, if no later batch of the stage will fit: see `missed`.
        """
        read = tables_of(offsets)
        with self._lock:
            self._reads_also(stage, read)
            mine = self._links.get(stage)
            others = [link for link in self._links.values() if link.stage != stage] if read else []
            one = self._open.get(checkpoint, _Open())
            cuts = dict(one.cuts)
        waits = missed = ""
        for link in others:
            outputs = cuts.get(link.stage, None if link.part is None else link.part.outputs)
            if outputs is None:
                if any(self._is_one_of(read, uri) for uri in link.writes):
                    waits = f"it reads a table of query {link.stage!r}, which has not made its cut"
                continue
            feeds = mine.feeds if mine is not None else ()
            edges = self._edges(stage, batch, offsets, feeds=feeds, writer=link.stage, outputs=outputs)
            for edge in edges:
                if edge.stand(self._log(edge.table)) is Stand.BEHIND:
                    waits = edge.said()
                elif why := why_not_aligned(edge, self._log(edge.table)):
                    missed = why if link.part is None else _absent(link.stage, why)
        with self._lock:
            one.waits[stage] = waits
            if missed:
                one.missed[stage] = missed
        return not waits and not missed

    def cut(self, stage: StageId, checkpoint: CheckpointId, outputs: tuple[OutputVersion, ...]) -> bool:
        """Take note of the cut of a stage; say whether it waits for readers, see `unread`."""
        with self._lock:
            one = self._open.setdefault(checkpoint, _Open())
            one.cuts.setdefault(stage, outputs)
            return any(link.stage not in one.cuts for link in self._readers(stage, outputs))

    def woke(self, stage: StageId, part: StageSnapshot, taken: CheckpointId) -> None:
        """Take note that a query runs that has answered checkpoints with its recorded part, up to an id."""
        with self._lock:
            for number, one in self._open.items():
                if number <= taken:
                    one.cuts.setdefault(stage, part.outputs)

    def unread(self, stage: StageId, checkpoint: CheckpointId) -> Unread | None:
        """Say which reader has not read what a stage had written at its cut; None if all have."""
        with self._lock:
            one = self._open.get(checkpoint, _Open())
            outputs, waits = one.cuts.get(stage, ()), dict[StageId, str]()
            for number in sorted(n for n in self._open if n <= checkpoint):  # a stage is asked for the oldest
                waits |= {reader: said for reader, said in self._open[number].waits.items() if said}
            late = [link for link in self._readers(stage, outputs) if link.stage not in one.cuts]
        for link in late:
            if link.part is None:
                said = waits.get(link.stage) or f"query {link.stage!r} has not ended its batch"
                runs = link.runs()
                return Unread(said if runs else _absent(link.stage, said), not runs)
            if not link.part.offsets:
                return Unread(_absent(link.stage, f"query {link.stage!r} has recorded no batch"), True)
            offsets, batch = parse_offsets(link.part.offsets), link.part.cut_batch
            edges = self._edges(
                link.stage, batch, offsets, feeds=link.part.feeds, writer=stage, outputs=outputs
            )
            for edge in edges:
                if why := why_not_aligned(edge, self._log(edge.table)):
                    return Unread(_absent(link.stage, why), True)
        return None

    def waits(self, stage: StageId, checkpoint: CheckpointId) -> str:
        """Say what a stage without a cut has yet to read; empty if nothing is known."""
        with self._lock:
            return self._open.get(checkpoint, _Open()).waits.get(stage, "")

    def missed(self, stage: StageId) -> dict[CheckpointId, str]:
        """Return the open checkpoints of which a stage can make no cut any more, each with the reason."""
        with self._lock:
            return {n: one.missed[stage] for n, one in self._open.items() if stage in one.missed}

    def _readers(self, writer: StageId, outputs: Iterable[OutputVersion]) -> list[Link]:
        ids = {output.table_id for output in outputs if output.table_id}
        return [k for k in self._links.values() if k.stage != writer and not ids.isdisjoint(k.reads)]

    def _reads_also(self, stage: StageId, read: frozenset[str]) -> None:
        """Take note of tables that a query reads, which its first batch of this run did not show."""
        link = self._links.get(stage)
        if link is not None and not read <= link.reads:
            self._links[stage] = replace(link, reads=link.reads | read)

    def _is_one_of(self, ids: frozenset[str], uri: str) -> bool:
        """Say whether readers that name these ids read the table at a URI.

        Its log is read only for an id that is new: `CREATE OR REPLACE` gives the table another one, which no
        reader names before.
        """
        new = [one for one in ids if (uri, one) not in self._has]
        if new:
            table = Table.find(self._storage.place(uri))
            self._has |= {(uri, one): table is not None and table.id == one for one in new}
        return any(self._has[uri, one] for one in ids)

    def _edges(
        self,
        reader: StageId,
        batch: BatchId,
        offsets: OffsetFile,
        *,
        feeds: tuple[str, ...],
        writer: StageId,
        outputs: Iterable[OutputVersion],
    ) -> Iterator[Edge]:
        for output in (output for output in outputs if output.kind == WATCHED):
            edge = edge_between(
                reader,
                batch,
                offsets,
                feeds=feeds,
                writer=writer,
                output=output,
                storage=self._storage,
            )
            if edge is not None:
                yield edge


def _absent(stage: StageId, why: str) -> str:
    """Say what helps if a query does not run; one that waits for its first batch is not known to run."""
    return (
        f"{why}; {stage!r} does not run, or has begun no batch yet: start it, or if it is gone for good, run "
        f"`spark-abs forget ROOT {stage}`"
    )
