"""What lies after the newest kept cut: the next cut, or which batches do not fit. Reading only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_abs.cuts.cut import NoAlignedCut, Pipeline, misfits, newest_cut
from spark_abs.errors import AbsError, CheckpointNotFound, DamageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.find import open_existing
from spark_abs.model import CheckpointId
from spark_abs.observe.status import JobStatus
from spark_abs.protocol.control import WATCHED_JOB
from spark_abs.protocol.watch import Watch
from spark_abs.quantities import duration_said
from spark_abs.rewind.query import QueryFacts
from spark_abs.rewind.survey import Survey, survey
from spark_abs.snapshots.identity import identity, of_text
from spark_abs.store.root import Root
from spark_abs.store.storage import Place, told
from spark_abs.watch.taking import candidates


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches after the newest kept cut of which Spark has deleted the files."""

    query: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is in storage after the newest kept cut, of the queries and tables that are watched."""

    unread: str = ""
    """Why it cannot be said from this machine."""
    ready_ms: int | None = None
    """When the last batch of a newer cut had ended; None: there is no newer cut."""
    waits: tuple[str, ...] = ()
    """Which of the newest batches do not fit; empty if there is a newer cut, or if nothing was done."""
    since_ms: int | None = None
    """When the oldest batch had ended that came after the kept cut and is there; None: there is none."""
    lost: tuple[Lost, ...] = ()
    found: Survey | None = None

    def said(self, now_ms: int) -> tuple[str, ...]:
        """Say what the next kept cut waits for."""
        if self.unread:
            return (f"cannot be seen from here: {self.unread}",)
        if self.ready_ms is not None:
            return (f"of {duration_said(now_ms - self.ready_ms)} ago, for the next look",)
        if self.waits:
            return tuple(f"waits: {each}" for each in self.waits)
        return ("nothing was done since the newest",)


def look_ahead(root: Root, watch: Watch | None, kept: Manifest | None) -> Ahead:
    """Look at what came after the newest kept cut, as the watcher does.

    Args:
        root: of a watcher.
        watch: what the watcher was given; None if an earlier version watched.
        kept: the manifest of its newest cut; None if none is kept.
    """
    try:
        return _ahead(survey(*places_of(root, watch, kept)), kept)
    except AbsError as error:
        return Ahead(unread=str(error))
    except OSError as error:
        return Ahead(unread=told(error))


class NextCut:
    """What the next kept cut of a root waits for. It looks again only if anything was done since."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._seen: tuple[object, ...] | None = None
        self._ahead = Ahead()

    def said(self, status: JobStatus, now_ms: int) -> tuple[str, ...]:
        """Say it in sentences; nothing if no cut can be read.

        Raises:
            DamageError: the newest kept cut cannot be read.
        """
        kept = None if status.moment_ms is None or status.last is None else status.last.id
        if kept is None and status.watch is None:
            return ()
        seen = kept, status.watch, *((stage.planned, stage.finished) for stage in status.stages)
        if seen != self._seen or kept is None or self._ahead.unread:
            self._seen, self._ahead = seen, self._look(status.watch, kept)
        return self._ahead.said(now_ms)

    def _look(self, watch: Watch | None, kept: CheckpointId | None) -> Ahead:
        checkpoints = None if kept is None else open_existing(self._root, WATCHED_JOB)
        try:
            newest = None if checkpoints is None or kept is None else checkpoints.load(kept)
        except (DamageError, CheckpointNotFound) as error:
            return Ahead(unread=str(error))
        return look_ahead(self._root, watch, newest)


def places_of(
    root: Root, watch: Watch | None, kept: Manifest | None
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return the checkpoint directories and the tables that are watched.

    Raises:
        AbsError: they are not recorded, or storage does not know the form of a location.
    """
    place = root.storage.place
    if watch is not None:
        return tuple(map(place, watch.checkpoints)), tuple(map(place, watch.tables))
    if kept is None or not all(part.directory for part in kept.stages):
        raise AbsError("an earlier version watched, which did not record where the queries are")
    tables = dict.fromkeys(output.table for part in kept.stages for output in part.outputs)
    return tuple(place(part.directory) for part in kept.stages), tuple(map(place, tables))


def has_older_cut(ahead: Ahead, kept: Manifest | None, moment_ms: int) -> bool:
    """Say whether there is a cut after the kept one that had ended by a moment: a look finds it since."""
    if ahead.found is None:
        return False
    pipeline = ahead.found.pipeline
    try:
        cut = newest_cut(pipeline, pipeline.before(moment_ms))
    except NoAlignedCut:
        return False
    at = {query: pipeline.batches[query][place].number for query, place in cut.items()}
    return any(at[query.name] > batch for query, batch in _kept_batches(ahead.found, kept))


def _ahead(found: Survey, kept: Manifest | None) -> Ahead:
    cut = next(candidates(found, kept), None)
    later = [
        batch
        for query, number in _kept_batches(found, kept)
        for batch in found.pipeline.batches[query.name]
        if batch.number > number
    ]
    since = min((batch.ended_ms for batch in later), default=None)
    return Ahead(
        ready_ms=None if cut is None else found.pipeline.ended_ms(cut),
        waits=_waits(found.pipeline) if cut is None else (),
        since_ms=since,
        lost=tuple(_lost(found, kept)),
        found=found,
    )


def _kept_batches(found: Survey, kept: Manifest | None) -> Iterator[tuple[QueryFacts, int]]:
    """Iterate the queries with their batch in a kept cut, -1 of one that is not in it or was begun anew."""
    batches = {} if kept is None else {identity(part): int(part.cut_batch) for part in kept.stages}
    return ((query, batches.get(of_text(query.metadata), -1)) for query in found.queries)


def _waits(pipeline: Pipeline) -> tuple[str, ...]:
    """Say which of the newest batches do not fit; nothing if they do, or if an older cut is the newest."""
    newest = pipeline.newest()
    empty = [query for query, at in newest.items() if at < 0]
    said = tuple(f"query {query!r} has no batch that can be resumed" for query in empty)
    return said or misfits(pipeline, newest)


def _lost(found: Survey, kept: Manifest | None) -> Iterator[Lost]:
    for query, number in _kept_batches(found, kept):
        oldest = min(query.offsets, default=0)
        if 0 <= number < oldest:  # the oldest has no batch before it, and so cannot be resumed
            yield Lost(query.name, number + 1, oldest)
