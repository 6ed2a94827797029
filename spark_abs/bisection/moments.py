"""The moments of a bisection, and its result: the first bad one, and what came in before it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from spark_abs.bisection.condition import CannotAsk, Condition
from spark_abs.bisection.search import first_change
from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.model import NO_TABLE, Version
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.sinks.delta.rollback import missing
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

BEGINNING = "the beginning"
"""In place of the position of a source that was not read yet."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A consistent cut."""

    said: str
    """Its name in a sentence."""
    at_ms: int
    """When it was made."""
    id: int | None = None
    """The checkpoint's; None for a cut of plain queries."""
    name: str | None = None
    """The savepoint's."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A version of a table at a moment."""

    place: Place
    version: Version


@dataclass(frozen=True, slots=True)
class Input:
    """What a query has read from one source between two moments."""

    source: str
    since: str
    """The position at the earlier moment, for a person."""
    until: str
    files: tuple[str, ...] = ()
    """The input files, if the source reads files and its log still has them."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The batches of a stage or query between two moments."""

    name: str
    since: int
    """Its last batch at the earlier moment."""
    until: int
    inputs: tuple[Input, ...] = ()


@dataclass(frozen=True, slots=True)
class Began:
    """A start of the job between two moments: perhaps with another release."""

    run: int
    attempt: int
    started_ms: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Between:
    """What happened between two moments."""

    ran: tuple[Ran, ...]
    began: tuple[Began, ...] = ()
    declared: tuple[str, ...] = ()
    """Stages that were added, removed, or declared with other sources, state, outputs or tables."""


class Moments(Protocol):
    """The moments of a job, or of plain queries, by number from 0, oldest first."""

    @property
    def count(self) -> int:
        """How many there are."""

    def names(self) -> Collection[str]:
        """Return the names of the tables."""

    def moment(self, at: int) -> Moment:
        """Return one moment."""

    def table(self, at: int, name: str) -> TableVersion:
        """Return the version of a table at a moment.

        Raises:
            UsageError: it had no such table.
            CannotAsk: it had several tables of this name.
            Refused: the table was replaced or is gone.
            DamageError: what was stored of the moment cannot be read.
        """

    def between(self, good: int, bad: int) -> Between:
        """Return what happened between two moments."""

    def command(self, at: int) -> str:
        """Return the command that goes back to a moment."""

    def notes(self, good: int, bad: int) -> tuple[str, ...]:
        """Return what is not consistent in the tables of two moments."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A moment that was not asked, since it cannot be read."""

    moment: Moment
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The first bad moment, the last good one, and what came in between."""

    good: Moment
    bad: Moment
    between: Between
    back: str
    """The command that goes back to the good one."""
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    reads: int
    """How often tables were read."""
    moments: int


@dataclass(slots=True)
class _Search:
    """One bisection: opens tables, and remembers why a moment cannot be read and what was answered."""

    moments: Moments
    condition: Condition
    names: tuple[str, ...]
    progress: Progress
    reads: int = 0
    skipped: dict[int, str] = field(default_factory=dict)
    _newest: dict[str, Table] = field(default_factory=dict)
    """URI to the table as it is now: a name may have another place at another moment."""
    _tables: dict[int, Mapping[str, DeltaTable]] = field(default_factory=dict)
    _answers: dict[tuple[tuple[str, int], ...], bool] = field(default_factory=dict)
    _checked: bool = False

    def is_readable(self, at: int) -> bool:
        """Say whether all files of the tables of a moment are there, and the condition fits them.

        Raises:
            UsageError: the condition does not fit the newest moment that can be read.
        """
        try:
            versions = {name: self.moments.table(at, name) for name in self.names}
            tables = {name: self._open(name, version) for name, version in versions.items()}
            self.condition.check(tables)
        except CannotAsk as error:
            if not self._checked:
                raise UsageError(f"the condition cannot be asked: {error}") from error
            self.skipped[at] = f"the condition cannot be asked there: {error}"
            return False
        except (UsageError, Refused, DamageError) as error:
            self.skipped[at] = str(error)
            return False
        self._checked = True
        self._tables[at] = tables
        return True

    def is_bad(self, at: int) -> bool:
        """Ask the condition at a moment; the same versions of the same tables are read once."""
        tables = self._tables.pop(at)
        versions = tuple((table.table_uri, table.version()) for table in tables.values())
        if versions not in self._answers:
            self.reads += 1
            self.progress.say(f"reading the tables of {self.moments.moment(at).said}")
            self._answers[versions] = self.condition.is_true(tables)
        return self._answers[versions]

    def _open(self, name: str, at: TableVersion) -> DeltaTable:
        if at.version == NO_TABLE:
            raise Refused(f"table {name} did not exist yet")
        uri = at.place.uri
        if uri not in self._newest:
            try:
                self._newest[uri] = Table.open(at.place)
            except FileNotFoundError as error:
                raise Refused(str(error)) from error
        if gone := missing(self._newest[uri], at.version):
            raise Refused(f"table {name}: {gone}")
        try:
            return DeltaTable(uri, version=int(at.version), storage_options=at.place.options)
        except DeltaError as error:
            raise Refused(f"table {name}: {error}") from error


def bisect(moments: Moments, text: str, progress: Progress = SILENT) -> Found:
    """Find the first moment at which a condition is true, and the one before at which it is not.

    Args:
        moments: where to search.
        text: the condition, a boolean expression or a query in SQL over the tables by their names.
        progress: called before tables are read.

    Raises:
        UsageError: the condition cannot be asked.
        Refused: the condition is true at all moments or at none, or tables cannot be read.
    """
    condition = Condition(text)
    if not moments.count:
        raise Refused("there is no checkpoint to look at yet")
    search = _Search(moments, condition, condition.names_in(moments.names()), progress)
    change = first_change(moments.count, search.is_readable, search.is_bad)
    if change.bad is None or change.good is None:
        raise Refused(_nothing(search, change.good, change.bad))
    between = range(change.good + 1, change.bad)
    return Found(
        good=moments.moment(change.good),
        bad=moments.moment(change.bad),
        between=moments.between(change.good, change.bad),
        back=moments.command(change.good),
        skipped=tuple(Skipped(moments.moment(at), search.skipped[at]) for at in between),
        notes=moments.notes(change.good, change.bad),
        reads=search.reads,
        moments=moments.count,
    )


def _nothing(search: _Search, good: int | None, bad: int | None) -> str:
    """Say why there is no change to show."""
    moments = search.moments
    if good is not None:
        said = f"the condition is not true at {moments.moment(good).said}, the newest that can be read"
        return f"{said}: so nothing is bad by it now"
    newest = moments.count - 1
    if bad is None:
        return f"no moment can be read; {moments.moment(newest).said}: {search.skipped[newest]}"
    said = f"the condition is true already at {moments.moment(bad).said}, the oldest that can be read"
    if bad in (0, newest) or bad - 1 not in search.skipped:
        hint = (
            "the data became bad before it, or the condition is always true, as a SELECT count(*) is, which "
        )
        return f"{said}: {hint}returns a row for any data"
    before = f"{moments.moment(bad - 1).said} cannot be read: {search.skipped[bad - 1]}"
    return f"{said}; {before}"
