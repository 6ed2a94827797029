"""The aligned cuts of plain queries as the moments of a bisection."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pyarrow import fs

from spark_abs.bisection.files import files_between
from spark_abs.bisection.moments import BEGINNING, Between, Input, Moment, Ran, TableVersion
from spark_abs.cuts.cut import cuts
from spark_abs.errors import DamageError, UsageError
from spark_abs.model import Version
from spark_abs.observe.sources import readable
from spark_abs.rewind.plan import plan_rewind
from spark_abs.rewind.query import QueryFacts
from spark_abs.rewind.survey import Survey, survey
from spark_abs.rewind.table import TableFacts
from spark_abs.snapshots.layout import file_source_offset
from spark_abs.store.storage import Place, names_of


@dataclass(slots=True)
class QueryMoments:
    """The aligned cuts of queries that take no barriers."""

    found: Survey
    cuts: tuple[Mapping[str, int], ...]
    """Query to the place of its batch, oldest first."""
    given: str
    """The options that name directories and tables, for the command that goes back."""
    _versions: dict[int, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoints: Sequence[Place], tables: Sequence[Place]) -> QueryMoments:
        """Read checkpoint directories and tables, and find their cuts; errors as of `survey`."""
        found = survey(checkpoints, tables)
        places = tuple(cuts(found.pipeline, found.pipeline.newest()))
        options = zip(("--checkpoints", "--tables"), (checkpoints, tables), strict=True)
        given = " ".join(shlex.join([option, *(place.uri for place in some)]) for option, some in options)
        return cls(found, places[::-1], given)

    @property
    def count(self) -> int:
        """See `Moments`."""
        return len(self.cuts)

    def names(self) -> frozenset[str]:
        """See `Moments`: the last part of each path; the whole one where several end alike."""
        return frozenset(self._tables)

    @property
    def _tables(self) -> dict[str, TableFacts]:
        tables = self.found.tables
        return dict(zip(names_of([table.uri for table in tables]), tables, strict=True))

    def moment(self, at: int) -> Moment:
        """See `Moments`."""
        batches = ", ".join(f"{name}={batch}" for name, batch in self._batches(at).items())
        return Moment(f"the moment {batches}", self.found.pipeline.ended_ms(self.cuts[at]))

    def table(self, at: int, name: str) -> TableVersion:
        """See `Moments`: the version that a rewind to the moment would restore."""
        if at not in self._versions:
            plan = plan_rewind(
                self.found, self.cuts[at], rewind="", now_ms=0, undo_others=True, others_stay=True
            )
            self._versions[at] = {goal.uri: goal.version for goal in plan.journal.tables}
        table = self._tables.get(name)
        if table is None:
            raise UsageError(f"no table {name!r} was given")
        version = self._versions[at].get(table.uri, table.version)
        return TableVersion(table.place, Version(version))

    def between(self, good: int, bad: int) -> Between:
        """See `Moments`. Where a query began anew from is not in its checkpoint."""
        return Between(tuple(self._ran(query, good, bad) for query in self.found.queries))

    def command(self, at: int) -> str:
        """See `Moments`."""
        batches = " ".join(shlex.join(["--at", f"{n}={b}"]) for n, b in self._batches(at).items())
        return f"spark-abs rewind {batches} {self.given}"

    def notes(self, good: int, bad: int) -> tuple[str, ...]:  # noqa: ARG002 - the protocol's
        """See `Moments`: what a rewind cannot bring back."""
        return self.found.notes

    def _batches(self, at: int) -> dict[str, int]:
        batches = self.found.pipeline.batches
        return {name: batches[name][place].number for name, place in self.cuts[at].items()}

    def _ran(self, query: QueryFacts, good: int, bad: int) -> Ran:
        since, until = self._batches(good)[query.name], self._batches(bad)[query.name]
        return Ran(query.name, since, until, tuple(_inputs(query, since, until)) if since < until else ())


def _inputs(query: QueryFacts, since: int, until: int) -> Iterator[Input]:
    was, now = query.offsets[since].offsets, query.offsets[until].offsets
    for source, offset in now.items():
        if was.get(source) == offset:
            continue
        last, first = file_source_offset(offset), file_source_offset(was.get(source))
        files = () if last is None else _files(query.place, source, -1 if first is None else first, last)
        yield Input(source, readable(was[source]) if source in was else BEGINNING, readable(offset), files)


def _files(place: Place, source: str, after: int, until: int) -> tuple[str, ...]:
    below = f"sources/{source}"
    infos = place.fs.get_file_info(fs.FileSelector(f"{place.path}/{below}", allow_not_found=True))

    def read(name: str) -> str:
        text = place.read_text(f"{below}/{name}")
        if text is None:
            raise DamageError(f"{place}/{below}/{name} was deleted while it was read: try again")
        return text

    return files_between([info.base_name for info in infos], after, until, read)
