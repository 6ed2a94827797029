"""The newest aligned cut of several queries (a rollback line): pure code.

Every committed batch of a query is an uncoordinated checkpoint. A cut chooses a batch of each query. It is
aligned if each reader of a table has read exactly the commits that the writers of the table had made at their
chosen batches. Of two aligned cuts the later batch of each query makes an aligned cut, too: they are a
lattice, and below any bound there is one newest.

It is found by lowering: from the bound down, one query whose batch does not fit is set back to an earlier
batch, until all fit. Batches that were left never fit later, so each is looked at once for each table.

Background: Elnozahy, Alvisi, Wang and Johnson, A Survey of Rollback-Recovery Protocols in Message-Passing
Systems, ACM Computing Surveys 34(3), 2002, section 4.1 (uncoordinated checkpoints and the rollback line).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.errors import AbsError

NOTHING = -1
"""In place of a version: no commit."""
NEVER = 2**62
"""In place of a version: after all commits."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A committed batch from which its query can be resumed."""

    number: int
    ended_ms: int
    """When it was committed."""


@dataclass(frozen=True, slots=True)
class Written:
    """The commits of a query to a table. Parallel to the batches of the query; neither tuple decreases."""

    query: str
    table: str
    last: tuple[int, ...]
    """The newest version that the batch or an earlier one made; `NOTHING` if none did."""
    next: tuple[int, ...]
    """The first version that a later batch made; `NEVER` if none did."""


@dataclass(frozen=True, slots=True)
class Read:
    """How far a query has read a table. Parallel to the batches of the query; does not decrease."""

    query: str
    table: str
    until: tuple[int | None, ...]
    """The first version that is not read after the batch; None if a version is read in part."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Queries, and the tables between them."""

    batches: Mapping[str, tuple[Batch, ...]]
    """Query to its batches, oldest first."""
    written: tuple[Written, ...] = ()
    read: tuple[Read, ...] = ()

    def before(self, moment_ms: int) -> dict[str, int]:
        """Return for each query the place of its newest batch that had ended at a moment, -1 if none."""
        return {
            query: max((at for at, batch in enumerate(batches) if batch.ended_ms <= moment_ms), default=-1)
            for query, batches in self.batches.items()
        }

    def newest(self) -> dict[str, int]:
        """Return the place of the newest batch of each query, -1 if it has none."""
        return {query: len(batches) - 1 for query, batches in self.batches.items()}

    def ended_ms(self, cut: Mapping[str, int]) -> int:
        """Return when the last batch of a cut had ended."""
        return max(self.batches[query][at].ended_ms for query, at in cut.items())


class NoAlignedCut(AbsError):
    """No batches of the queries fit together."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Two queries at a table: a writer with a reader of it, or with another writer."""

    writer: Written
    other: Read | Written

    def misfit(self, places: Mapping[str, int]) -> str | None:
        """Return the query whose batch is too late for the other's; None if they fit."""
        at, other = places[self.writer.query], self.other
        last, following = self.writer.last[at], self.writer.next[at]
        there = places[other.query]
        if isinstance(other, Written):
            if last > other.next[there]:
                return self.writer.query
            return other.query if other.last[there] > following else None
        until = other.until[there]
        if until is None or until > following:
            return other.query
        return self.writer.query if until <= last else None

    def said(self, places: Mapping[str, int], batches: Mapping[str, Sequence[Batch]]) -> str:
        """Describe two batches that do not fit."""
        writer, other = self.writer, self.other
        at, there = places[writer.query], places[other.query]
        one, two = batches[writer.query][at].number, batches[other.query][there].number
        wrote = f"query {writer.query!r} had written it up to version {writer.last[at]} with batch {one}"
        if writer.last[at] == NOTHING:
            wrote = f"query {writer.query!r} had not written it with batch {one}"
        if isinstance(other, Written):
            also = f"query {other.query!r} up to version {other.last[there]} with batch {two}"
            return f"table {writer.table}: {wrote}, and {also}"
        until = other.until[there]
        if until is None:
            read = f"batch {two} of query {other.query!r} ends within a version"
        else:
            read = f"query {other.query!r} had read it up to version {until - 1} with batch {two}"
        return f"table {writer.table}: {read}, and {wrote}"


def newest_cut(pipeline: Pipeline, bound: Mapping[str, int]) -> dict[str, int]:
    """Return the newest aligned cut: for each query the place of its batch, none above the bound.

    Linear in the number of batches, for each table between two queries.

    Args:
        pipeline: the queries.
        bound: query to the place of the newest batch that may be chosen.

    Raises:
        NoAlignedCut: there is none; the message names the table and the last batches that were compared.
    """
    places = dict(bound)
    for query, at in places.items():
        if at < 0:
            raise NoAlignedCut(f"query {query!r} has no batch that can be resumed so far back")
    meetings = list(_meetings(pipeline))
    of_query: dict[str, list[int]] = {query: [] for query in places}
    for number, meeting in enumerate(meetings):
        for query in {meeting.writer.query, meeting.other.query}:
            of_query[query].append(number)
    waiting, queued = deque(range(len(meetings))), [True] * len(meetings)
    while waiting:
        number = waiting.popleft()
        queued[number] = False
        lowered = set()
        while (late := meetings[number].misfit(places)) is not None:
            if places[late] == 0:
                said = meetings[number].said(places, pipeline.batches)
                raise NoAlignedCut(f"{said}; query {late!r} has no earlier batch that can be resumed")
            places[late] -= 1
            lowered.add(late)
        for again in (n for query in lowered for n in of_query[query]):
            if not queued[again]:
                queued[again] = True
                waiting.append(again)
    return places


def misfits(pipeline: Pipeline, places: Mapping[str, int]) -> tuple[str, ...]:
    """Say which batches do not fit together, with their table and its versions; nothing if they are a cut.

    Args:
        pipeline: the queries.
        places: query to the place of a batch.
    """
    return tuple(
        meeting.said(places, pipeline.batches)
        for meeting in _meetings(pipeline)
        if meeting.misfit(places) is not None
    )


def cuts(pipeline: Pipeline, bound: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Iterate the newest aligned cut below a bound, then the newest one that had ended before it, and so on.

    Every aligned cut that is the newest before some moment is among them.
    """
    while True:
        try:
            cut = newest_cut(pipeline, bound)
        except NoAlignedCut:
            return
        yield cut
        ended_ms = pipeline.ended_ms(cut)
        bound = {query: _before(pipeline.batches[query], at, ended_ms) for query, at in cut.items()}


def _before(batches: Sequence[Batch], at: int, moment_ms: int) -> int:
    """Return the place of the newest batch up to a place that had ended before a moment, -1 if none.

    A clock that was set back gives a later batch an earlier end: the places go down in any case.
    """
    while at >= 0 and batches[at].ended_ms >= moment_ms:
        at -= 1
    return at


def _meetings(pipeline: Pipeline) -> Iterator[_Meeting]:
    writers: dict[str, list[Written]] = {}
    for written in pipeline.written:
        for earlier in writers.setdefault(written.table, []):
            yield _Meeting(written, earlier)
        writers[written.table].append(written)
    for read in pipeline.read:
        for written in writers.get(read.table, ()):
            yield _Meeting(written, read)
