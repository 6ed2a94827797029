"""A channel or a sink of the simulated cluster. Every method is one atomic commit, as a Delta commit is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spark_abs.errors import CommitConflict, DamageError, Fenced
from spark_abs.model import (
    FENCED,
    NO_BATCH,
    NO_EPOCH,
    AttemptId,
    Barrier,
    BatchId,
    Branch,
    ChannelId,
    CheckpointId,
    DataFile,
    Entry,
    Position,
    RunId,
    Version,
    counts,
    run_app_id,
)
from spark_abs.snapshots.retention import Needed
from tests.invariants import Logged

JOB = "sim"
ROW_BYTES = 10

Row = tuple[int, str]  # a key, and where the row came from


@dataclass(frozen=True, slots=True)
class Planned:
    """A file of the offset log."""

    positions: tuple[Position, ...]
    native: int


class Table:
    """A channel or a sink: a log of entries with the rows of each, and transaction ids as Delta has them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: list[Entry | None] = [Entry(Version(0))]
        self.rows: list[tuple[Row, ...]] = [()]
        self.transactions: dict[str, int] = {}
        self.log: list[Logged] = []
        self.plans: dict[tuple[AttemptId, BatchId], Planned] = {}  # what commits say of their batches
        self.writers: list[str] = [""]
        """The application id under which each version was committed; empty for what is no work."""
        self.visible: list[tuple[int, ...]] = [()]
        """For a sink: the versions whose rows are visible at each version."""
        self.without_rows: set[Version] = set()
        """Entries of which clean-up has removed the rows."""

    @property
    def channel(self) -> ChannelId:
        """The channel that the table is."""
        return ChannelId(self.name)

    @property
    def version(self) -> Version:
        """The newest version."""
        return Version(len(self.entries) - 1)

    @property
    def next(self) -> Version:
        """The version that the next commit takes."""
        return Version(len(self.entries))

    def require_alive(self, app: str, run: RunId, owner: str = JOB) -> None:
        """Raise Fenced if the attempt was burnt or a newer run has begun."""
        if self.transactions.get(app, 0) >= FENCED or self.transactions.get(run_app_id(owner), 0) > run:
            raise Fenced(f"{app}, run {run}, was fenced on {self.name}")

    def commit(
        self,
        *,
        at: Version,
        attempt: AttemptId,
        run: RunId,
        transactions: dict[str, int],
        rows: tuple[Row, ...] = (),
        batch: BatchId = NO_BATCH,
        barrier: Barrier | None = None,
        cancel: CheckpointId | None = None,
        end: bool = False,
        plans: Mapping[BatchId, Planned] = MappingProxyType({}),
    ) -> Version:
        """Commit work at exactly `at`.

        Raises:
            CommitConflict: the version is taken.
        """
        if at != self.version + 1:
            raise CommitConflict(f"version {at} of {self.name}")
        files = (DataFile(f"{at}.parquet", len(rows) * ROW_BYTES, len(rows)),) if rows else ()
        self.entries.append(Entry(at, attempt, run, batch, barrier, cancel, end, None, files))
        self.rows.append(rows)
        self.writers.append(next(iter(transactions)))
        self.visible.append((*self.visible[-1], at))
        self.transactions.update(transactions)
        self.plans |= {(attempt, number): planned for number, planned in plans.items()}
        self.log.append(Logged(self.name, at, attempt, run))
        return at

    def commit_foreign(self) -> None:
        """Commit something that is none of the job's work, like OPTIMIZE."""
        self._commit_empty(Logged(self.name, self.next))

    def fence_runs(self, run: RunId, owner: str = JOB) -> None:
        """Refuse all runs of a job before `run` from now on."""
        if self.transactions.get(run_app_id(owner), 0) < run:
            self.transactions[run_app_id(owner)] = run
            self._commit_empty(Logged(self.name, self.next, fences_runs_below=run))

    def burn(self, app: str, attempt: AttemptId) -> None:
        """Refuse what an attempt commits under an id from now on."""
        if self.transactions.get(app, 0) < FENCED:
            self.transactions.update({app: FENCED, f"{app}/barrier": FENCED, f"{app}/end": FENCED})
            self._commit_empty(Logged(self.name, self.next, burns=frozenset((attempt,))))

    def restore(self, version: Version, owner: str = JOB) -> None:
        """Make visible what was visible at `version`, as Delta RESTORE does; the log and the ids stay.

        What other roots have written and taken back since stays as it is.
        """
        own = (f"{owner}/", f"{owner}@")
        mine = (v for v in self.visible[version] if self.writers[v].startswith(own))
        others = (v for v in self.visible[-1] if not self.writers[v].startswith(own))
        visible = (*mine, *others)
        self._commit_empty(Logged(self.name, self.next))
        self.visible[-1] = visible

    def version_at(self, app: str, batch: BatchId) -> Version:
        """Return the newest version without a later batch of a writer."""
        for version, entry in enumerate(self.entries):
            if entry is not None and self.writers[version] == app and entry.batch > batch:
                return Version(version - 1)
        return self.version

    def read(self, version: Version) -> tuple[Row, ...]:
        """Return the rows of a sink at a version."""
        return tuple(row for v in self.visible[version] for row in self.rows[v])

    def _commit_empty(self, logged: Logged) -> None:
        self.entries.append(Entry(logged.version))
        self.rows.append(())
        self.writers.append("")
        self.visible.append(self.visible[-1])
        self.log.append(logged)

    def after(self, version: Version, path: Sequence[Branch]) -> Iterator[Entry]:
        """Yield the entries after `version` that lie on the path.

        Raises:
            DamageError: clean-up has removed one of them.
        """
        for number in range(version + 1, len(self.entries)):
            entry = self.entries[number]
            if entry is None:
                raise DamageError(f"6: entry {number} of {self.name} is gone, a reader stands at {version}")
            if entry.attempt and counts(path, entry.attempt, entry.version):
                yield entry

    def newest_first(self, path: Sequence[Branch]) -> Iterator[Entry]:
        """Yield the entries on the path, newest first, as far back as they are kept."""
        for entry in reversed(self.entries):
            if entry is None:
                return
            if entry.attempt and counts(path, entry.attempt, entry.version):
                yield entry

    def trim_rows(self, needed: Needed) -> None:
        """Remove rows that are not needed; the entries stay."""
        for entry in self.entries[: needed.rows]:
            flies = entry is not None and any(a < entry.version <= u for a, u in needed.in_flight)
            if entry is not None and entry.files and not flies:
                self.without_rows.add(entry.version)

    def rows_of(self, entry: Entry) -> tuple[Row, ...]:
        """Return the rows of an entry.

        Raises:
            DamageError: clean-up has removed them.
        """
        if entry.version in self.without_rows:
            raise DamageError(f"6: the rows of entry {entry.version} of {self.name} are gone")
        return self.rows[entry.version]

    def marker(self, path: Sequence[Branch]) -> CheckpointId:
        """Return the newest barrier or cancel id on the path."""
        for entry in self.newest_first(path):
            if entry.barrier or entry.cancel is not None:
                return max(entry.barrier.id if entry.barrier else NO_EPOCH, entry.cancel or NO_EPOCH)
        return NO_EPOCH
