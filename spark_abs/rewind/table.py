"""What the log of a Delta table says of the queries that write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from uuid import UUID

from spark_abs.cuts.cut import NEVER, NOTHING, Written
from spark_abs.cuts.lineage import batches_by_time, first_versions, writer_of, written_by
from spark_abs.errors import UsageError
from spark_abs.model import Version
from spark_abs.rewind.journal import mark_of
from spark_abs.rewind.query import CLOCKS_MS, QueryFacts
from spark_abs.snapshots.parallel import THREADS, in_threads
from spark_abs.store.log import LogCommit
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

_PIECE = 8 * THREADS


@dataclass(frozen=True)
class TableFacts:
    """A Delta table, and those commits that say what the known batches wrote."""

    place: Place
    id: str
    version: int
    commits: tuple[LogCommit, ...]
    """Up to the version, oldest first, without a gap."""
    writers: Mapping[str, str]
    """Application id to the query that writes under it."""
    latest: Mapping[str, int]
    """Id of a query to the batch that it committed last, also where the commit itself is gone."""
    doubtful: Mapping[str, tuple[str, ...]]
    """Application id to the queries of which several, or none, can have written under it."""
    timed: str = ""
    """Why times do not tell the queries of commits that name no batch; empty if they do, or all name one."""

    @property
    def uri(self) -> str:
        """Where it is."""
        return self.place.uri

    @cached_property
    def path(self) -> tuple[LogCommit, ...]:
        """The commits whose rows the table has: without those that a rewind has undone, oldest first."""
        at = {commit.version: commit for commit in self.commits}
        found, version = [], self.version
        while (commit := at.get(Version(version))) is not None:
            found.append(commit)
            mark = mark_of(commit.metadata)
            version = version - 1 if mark is None or mark.version is None else mark.version
        return tuple(reversed(found))

    def is_last(self, version: int, index: int) -> bool:
        """Say whether a version has no file left to read after an index; False if its commit is not known."""
        place = version - self.commits[0].version if self.commits else -1
        return 0 <= place < len(self.commits) and self.commits[place].is_last(index)

    def batches_of(self, app: str) -> Iterator[tuple[int, int]]:
        """Iterate versions and batches under an application id."""
        own = (c for c in self.path if app in c.transactions and mark_of(c.metadata) is None)
        return ((commit.version, commit.transactions[app]) for commit in own)

    def before(self, version: int) -> int:
        """Return the newest version before another whose rows the table has had, `NOTHING` if none."""
        return max((commit.version for commit in self.path if commit.version < version), default=NOTHING)

    def newest(self, app: str) -> int:
        """Return the batch last committed under an application id, -1 if none is known."""
        return next((c.transactions[app] for c in reversed(self.commits) if app in c.transactions), -1)

    def apps_of(self, query: str) -> list[str]:
        """Return the application ids under which a query writes the table."""
        return [app for app, writer in self.writers.items() if writer == query]

    def is_own(self, commit: LogCommit) -> bool:
        """Say whether a query that was given, or a rewind, made a commit."""
        return not self.writers.keys().isdisjoint(commit.transactions) or mark_of(commit.metadata) is not None

    def strangers(self, after: int) -> tuple[LogCommit, ...]:
        """Return the commits after a version that changed rows or columns, and that no known writer made."""
        return tuple(
            c
            for c in self.path
            if c.version > after and (c.data_change or c.redefines) and not self.is_own(c)
        )

    def since(self, moment_ms: int) -> tuple[LogCommit, ...]:
        """Return the commits from a moment on, oldest first; one without a time counts as its successor."""
        found, at_ms = list[LogCommit](), NEVER
        for commit in reversed(self.path):
            at_ms = commit.at_ms or at_ms
            if at_ms >= moment_ms:
                found.append(commit)
        return tuple(reversed(found))

    def written(self, query: QueryFacts) -> tuple[Written, ...]:
        """Return what a query has written to the table, under each of its application ids."""
        return tuple(
            written_by(self.batches_of(app), query.name, self.uri, query.batches)
            for app in self.apps_of(query.name)
        )

    def unknown_before(self, query: QueryFacts) -> int:
        """Return the first batch of a query of which the log still says what it wrote; 0: of all."""
        timed = [b for app in self.apps_of(query.name) if is_timed(app) for _, b in self.batches_of(app)]
        if timed:  # what earlier batches wrote is not told
            return min(timed)
        if not self.commits or self.commits[0].version == 0:
            return 0
        of_apps = {app: first_versions(self.batches_of(app)) for app in self.apps_of(query.name)}
        return max((min(found, default=self.latest.get(app, 0)) for app, found in of_apps.items()), default=0)


def read_table(place: Place, queries: Sequence[QueryFacts], until: int | None = None) -> TableFacts:
    """Read the log of a table back to the oldest batch of its writers.

    Args:
        place: the table.
        queries: those that may write it.
        until: the newest version that counts; None: the table's.

    Raises:
        UsageError: there is no table.
        DamageError: its log is damaged.
    """
    table = Table.find(place)
    if table is None:
        raise UsageError(f"there is no Delta table at {place}")
    version = table.version if until is None else until
    transactions = {query.id: table.transaction(query.id) for query in queries}
    latest = {query: batch for query, batch in transactions.items() if batch is not None}
    oldest = {query.id: query.batches[0].number for query in queries if query.batches and query.id in latest}
    since = min((min(a.begun_ms for a in q.times.values()) for q in queries if q.times), default=0)
    commits: list[LogCommit] = []
    numbers = iter(range(version, -1, -1))
    while piece := list(islice(numbers, _PIECE)):
        found = in_threads(table.read_commit, piece)
        for commit in found:
            if commit is None:
                break
            commits.append(commit)
            for app in [a for a, batch in commit.transactions.items() if batch <= oldest.get(a, -1)]:
                del oldest[app]
        if None in found or (not oldest and 0 < commits[-1].at_ms < since - CLOCKS_MS):
            break
    commits.reverse()
    return TableFacts(
        place,
        table.id,
        int(version),
        commits=tuple(commits),
        writers={query.id: query.name for query in queries if query.id in latest},
        latest=latest,
        doubtful={},
    )


_TIMED = "by its time: "
"""Stands before the name of a query, in place of an application id, for commits told by their times."""


def is_timed(app: str) -> bool:
    """Say whether an application id is none: its commits were told by their times."""
    return app.startswith(_TIMED)


def told_by_time(table: TableFacts, candidates: Sequence[QueryFacts]) -> TableFacts:
    """Tell which batches made the commits that name none, if times leave one possibility.

    Args:
        table: with the writers of all commits that name a batch.
        candidates: the queries that name their batches nowhere: these may call functions that do not.
    """
    times = {query.name: query.times for query in candidates if query.times}
    since = min((a.begun_ms for of in times.values() for a in of.values()), default=NEVER)
    commits = {int(c.version): c.at_ms for c in table.since(since - CLOCKS_MS) if _is_untold(c)}
    if not times or not commits:
        return table
    if timeless := [version for version, at_ms in commits.items() if not at_ms]:
        return replace(table, timed=f"version {timeless[0]} was recorded without one")
    told = batches_by_time(commits, times, CLOCKS_MS)
    if isinstance(told, str):
        return replace(table, timed=told)

    def named(commit: LogCommit) -> LogCommit:
        if commit.version not in told:
            return commit
        query, batch = told[commit.version]
        return replace(commit, transactions={f"{_TIMED}{query}": batch})

    writers = {f"{_TIMED}{query}": query for query, _ in told.values()}
    return replace(table, commits=tuple(map(named, table.commits)), writers={**table.writers, **writers})


_WRITES = frozenset(("WRITE", "MERGE", "DELETE", "UPDATE"))


def _is_untold(commit: LogCommit) -> bool:
    """Say whether a function may have made a commit: without rows, too, as a batch without rows does."""
    writes = commit.data_change or commit.operation in _WRITES
    return writes and not commit.transactions and mark_of(commit.metadata) is None


def _is_query_id(app: str) -> bool:
    """Say whether an application id is that of a query: Delta's sink of one that was not given wrote it."""
    try:
        return str(UUID(app)) == app
    except ValueError:
        return False


def attributed(
    table: TableFacts, functions: Sequence[QueryFacts], queries: Sequence[QueryFacts]
) -> TableFacts:
    """Tell which query writes under an application id that is no query's: the only one whose batches fit.

    Args:
        table: with the writers under their own ids.
        functions: the queries that write nothing under their own ids: they call functions. They come first.
        queries: all.
    """
    times, of_all = ({query.name: query.times for query in some} for some in (functions, queries))
    found: dict[str, dict[int, int]] = {}
    for commit in (c for c in table.path if mark_of(c.metadata) is None):
        for app, batch in commit.transactions.items():
            if app not in table.writers and not _is_query_id(app):
                found.setdefault(app, {})[batch] = commit.at_ms
    fits = {
        app: writer_of(made, times, CLOCKS_MS) or writer_of(made, of_all, CLOCKS_MS)
        for app, made in found.items()
    }
    writers = {app: queries[0] for app, queries in fits.items() if len(queries) == 1}
    doubtful = {app: queries for app, queries in fits.items() if len(queries) != 1}
    return replace(table, writers={**table.writers, **writers}, doubtful=doubtful)
