"""A Delta table with exact commits: read, decide, commit at the next version, or decide again.

deltalake rebases a commit that lost a race. Here each decision depends on the loaded version, so retries are
off: a commit becomes the next version or raises `CommitConflict`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, Transaction, create_table_with_add_actions
from pyarrow import fs

from spark_abs.codec import from_json
from spark_abs.errors import CommitConflict, CommitStateUnknown, DamageError, Fenced, UsageError
from spark_abs.model import FENCED, Version
from spark_abs.store.clock import now_ms
from spark_abs.store.log import LogCommit, log_file, log_files_before, read_commit
from spark_abs.store.storage import Place

_CLEANUP = "delta.enableExpiredLogCleanup"
_REMOVALS = "delta.deletedFileRetentionDuration"
LOG_PROPERTIES: Mapping[str, str] = {
    _CLEANUP: "false",
    "delta.checkpointInterval": "10",
}
"""Only this package's clean-up removes log files, so a missing one is damage."""

_STORES = ("AWS Error", "Azure Error", "google::cloud::Status")
"""How Arrow's errors name an object store that does not answer; they have no errno."""


@dataclass(frozen=True, slots=True)
class AddFile:
    """A Parquet file to commit; `path` relative to the table, `stats` as Delta's JSON."""

    path: str
    size: int
    stats: str


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit holds."""

    adds: Sequence[AddFile] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    metadata: str | None = None
    replace: bool = False
    """Whether to remove all files of the table."""
    removes: Sequence[str] = ()
    """Paths of files to remove, as the log names them; not together with `replace`."""


@dataclass(frozen=True, slots=True)
class _LastCheckpoint:
    """What the log names as its newest checkpoint."""

    version: int


class Table:
    """A long-lived handle on one Delta table. Not thread-safe: use one handle per thread."""

    def __init__(self, place: Place, table: DeltaTable) -> None:
        self.place = place
        self._table = table
        self._transactions: dict[str, int | None] = {}
        kept = table.metadata().configuration.get(_CLEANUP) == LOG_PROPERTIES[_CLEANUP]
        self._looks_first = kept and place.local
        """Whether a look at two files tells that there is no newer commit."""
        self._followed = self._defined = table.version()

    @classmethod
    def open(cls, place: Place) -> Table:
        """Open an existing table.

        Raises:
            FileNotFoundError: there is none.
            DamageError: its log is damaged.
            OSError: the store cannot be read now, which is not damage.
        """
        try:
            return cls(place, DeltaTable(place.uri, storage_options=place.options))
        except TableNotFoundError:
            raise FileNotFoundError(f"no Delta table at {place}") from None
        except (DeltaError, FileNotFoundError, ValueError) as error:
            raise DamageError(f"the Delta log at {place} cannot be read: {error}") from error

    @classmethod
    def find(cls, place: Place) -> Table | None:
        """Open a table; None if there is none. Other errors as for `open`."""
        try:
            return cls.open(place)
        except FileNotFoundError:
            return None

    @classmethod
    def ensure(
        cls, place: Place, schema: pa.Schema, configuration: Mapping[str, str] = LOG_PROPERTIES
    ) -> Table:
        """Open the table, creating it empty if there is none. Two creators end with one table.

        Raises:
            OSError: it cannot be created, as where the store may not be written.
        """
        try:
            return cls.open(place)
        except FileNotFoundError:
            pass
        try:
            create_table_with_add_actions(
                place.uri,
                Schema.from_arrow(schema),
                [],
                mode="error",
                configuration=dict(configuration),
                storage_options=place.options,
            )
        except (DeltaError, OSError) as error:
            try:
                return cls.open(place)
            except FileNotFoundError:
                raise OSError(f"no table can be created at {place}: {error}") from error
        return cls.open(place)

    @property
    def uri(self) -> str:
        return self.place.uri

    @property
    def version(self) -> Version:
        """The version that this handle has loaded."""
        return Version(self._table.version())

    @property
    def id(self) -> str:
        """The table's own id; a clone has another."""
        return str(self._table.metadata().id)

    @property
    def defined(self) -> Version:
        """A version since which columns, properties and protocol have not changed."""
        self._follow()
        return Version(self._defined)

    def was(self, table_id: str, version: int) -> bool:
        """Say whether the table had an id at a version: `CREATE OR REPLACE` gives a table a new id."""
        try:
            then = DeltaTable(self.uri, version=max(version, 0), storage_options=self.place.options)
        except DeltaError:
            return False
        return bool(table_id) and str(then.metadata().id) == table_id

    @property
    def delta(self) -> DeltaTable:
        """The deltalake handle, for reading."""
        return self._table

    @property
    def schema(self) -> pa.Schema:
        """The table's schema."""
        return pa.schema(self._table.schema().to_arrow())

    def read(
        self, columns: Sequence[str] | None = None, filters: Sequence[tuple[str, str, object]] | None = None
    ) -> pa.Table:
        """Return the rows as of the loaded version.

        Raises:
            DamageError: a data file is missing or damaged.
            OSError: the store cannot be read now.
        """
        # deltalake's own file system is a Python object: Arrow's threads that still use it when the
        # interpreter ends abort the process.
        native = fs.SubTreeFileSystem(self.place.path, self.place.fs)
        try:
            return self._table.to_pyarrow_table(
                columns=None if columns is None else list(columns),
                filters=None if filters is None else list(filters),
                filesystem=native,
            )
        except (pa.ArrowException, OSError) as error:
            if _is_of_store(error):
                raise
            raise DamageError(f"{self.uri} cannot be read: {error}") from error

    def refresh(self) -> None:
        """Load the commits since the loaded version; costs only new ones."""
        if not self._is_newest():
            self._table.update_incremental()
        self._follow()

    def _is_newest(self) -> bool:
        """Say whether the loaded version is surely the newest, without a listing of the log.

        `trim_log`, which alone deletes files of this package's logs, deletes the oldest first: if the file
        of the version before the loaded one is there after that of the next was not, the next was never
        written. That of the loaded one proves less: this process may have written it so late that the log
        was trimmed beyond it.
        """
        return (
            self._looks_first
            and self.version > 0
            and not self.written(Version(self.version + 1))
            and bool(self.written(Version(self.version - 1)))
        )

    def written(self, version: Version) -> tuple[int, ...]:
        """Return a fingerprint of a commit's file, nothing if the file does not exist."""
        found = self.place.fs.get_file_info(f"{self.place.path}/{log_file(version)}")
        return (found.mtime_ns or 0, found.size) if found.type is fs.FileType.File else ()

    def transaction(self, app: str) -> int | None:
        """Return the version last committed under an application id, as of the loaded version.

        It is looked up once and then followed from commit to commit: deltalake would read all log files that
        the handle was opened with, and a clean-up may have deleted them since.
        """
        self._follow()
        if app not in self._transactions:
            try:
                self._transactions[app] = self._look_up(app)
            except DeltaError as error:
                raise DamageError(f"the Delta log at {self.uri} cannot be read: {error}") from error
        return self._transactions[app]

    def _follow(self) -> None:
        """Read the application ids of later commits, those of this handle included."""
        for version in range(self._followed + 1, self.version + 1):
            commit = self.read_commit(version)
            if commit is None:  # cleaned up after a checkpoint
                self._transactions.clear()
                self._defined = self.version
                break
            if commit.redefines:
                self._defined = version
            self._take(commit.transactions)
        self._followed = self.version

    def _take(self, transactions: Mapping[str, int]) -> None:
        known = transactions.keys() & self._transactions.keys()
        self._transactions |= {app: transactions[app] for app in known}

    def _look_up(self, app: str) -> int | None:
        try:
            version: int | None = self._table.transaction_version(app)
        except DeltaError:
            self._table = DeltaTable(self.uri, version=self.version, storage_options=self.place.options)
            version = self._table.transaction_version(app)
        return version

    def require_unfenced(self, app: str) -> None:
        """Raise Fenced if the application id was fenced, as of the loaded version."""
        if (self.transaction(app) or 0) >= FENCED:
            raise Fenced(f"{app} was fenced on {self.uri}: a newer attempt has taken over")

    def read_commit(self, version: int) -> LogCommit | None:
        """Read one commit file."""
        return read_commit(self.place.fs, self.place.path, version)

    def backwards(self) -> Iterator[LogCommit]:
        """Iterate the commits backwards from the loaded version, as far as the log goes."""
        for version in range(self.version, -1, -1):
            commit = self.read_commit(version)
            if commit is None:
                return
            yield commit

    def commit_next(self, commit: Commit) -> Version:
        """Commit at exactly the version after the loaded one, and return it.

        Raises:
            CommitConflict: another writer took that version; nothing of this commit is in the table.
            CommitStateUnknown: the store failed, and the outcome or the new log cannot be read.
        """
        self._follow()
        token, target = uuid.uuid4().hex, Version(self.version + 1)
        now = now_ms()
        custom = {"absToken": token}
        if commit.metadata is not None:
            custom["userMetadata"] = commit.metadata
        actions: list[AddAction | RemoveAction] = [RemoveAction(path, True, now) for path in commit.removes]
        actions += [AddAction(add.path, add.size, {}, now, True, add.stats) for add in commit.adds]
        try:
            self._table.create_write_transaction(
                actions,
                "overwrite" if commit.replace else "append",
                self._table.schema(),
                commit_properties=CommitProperties(
                    custom_metadata=custom,
                    max_commit_retries=0,
                    app_transactions=[Transaction(app, v) for app, v in commit.transactions.items()],
                ),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except (DeltaError, OSError) as error:
            self._read_back(target, token, error)
        self._take(commit.transactions)
        self._followed = target  # it need not be read to know what is in it
        try:
            self.refresh()
        except (DeltaError, OSError, DamageError) as error:  # it stands; what else does is not known
            raise CommitStateUnknown(
                f"version {target} of {self.uri} was committed, but its log cannot be read: {error}"
            ) from error
        return target

    def restore(self, version: Version, commit: Commit) -> None:
        """Restore the rows of a version, in one commit with ids and metadata.

        Raises:
            CommitConflict: somebody else took the next version.
            DamageError: the version or a file of it no longer exists.
        """
        before = self.version
        try:
            self._table.restore(
                int(version),
                commit_properties=CommitProperties(
                    custom_metadata={} if commit.metadata is None else {"userMetadata": commit.metadata},
                    max_commit_retries=0,
                    app_transactions=[Transaction(app, v) for app, v in commit.transactions.items()],
                ),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except (DeltaError, OSError) as error:
            self._refuse_second(before, error)
            raise DamageError(f"{self.uri} cannot be restored to version {version}: {error}") from error

    def commit(self, decide: Callable[[Table], Commit | None]) -> Version | None:
        """Refresh, call `decide`, commit exactly. Repeat until that succeeds or `decide` returns None."""
        while True:
            self.refresh()
            commit = decide(self)
            if commit is None:
                return None
            try:
                return self.commit_next(commit)
            except CommitConflict:
                continue

    def add_columns(self, schema: pa.Schema) -> None:
        """Add columns, which are null in existing rows.

        Raises:
            UsageError: the table refuses the columns.
            CommitConflict: somebody else took the next version.
        """
        before = self.version
        try:
            self._table.alter.add_columns(
                Schema.from_arrow(schema).fields,
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except DeltaError as error:
            self._refuse_second(before, error)
            raise UsageError(
                f"{self.uri} cannot take the columns {', '.join(schema.names)}: {error}"
            ) from error
        self.refresh()

    def sweep(self, hours: int, most: int, kept: int) -> None:
        """Delete data files that were removed from the table: after some hours, or sooner if there are many.

        Only removals in the log count, so files without a commit stay, and the result does not depend on the
        caller or the time of the call. Commits nothing; costs a listing, and a read of the log if there are
        files that the table does not name. It can be repeated after a kill.

        Args:
            hours: removed files older than this are deleted in any case.
            most: how many younger removed files may stay.
            kept: if there are more, the files of this many versions before the newest stay.
        """
        selector = fs.FileSelector(self.place.path)
        there = {str(info.base_name) for info in self.place.fs.get_file_info(selector)}
        doomed = (self._left(hours, []) | self._forgotten(hours, there)) & there
        young = self._left(0, list(range(max(0, self.version - kept), self.version + 1))) & there
        if len(young) > most:
            doomed |= young
        for name in sorted(doomed):
            with suppress(FileNotFoundError):
                self.place.fs.delete_file(f"{self.place.path}/{name}")

    def _forgotten(self, hours: int, there: Collection[str]) -> set[str]:
        """Return the files whose removal, some hours ago, only its own commit names any more.

        While nothing sweeps, as over a night in which the job is stopped, removals get too old for the
        checkpoints of the log. `trim_log` comes after each sweep, so their commits are still there.
        """
        adds = pa.table(self._table.get_add_actions())
        unnamed = {name for name in there if name.endswith(".parquet")}
        unnamed -= set(adds["path"].to_pylist()) | self._left(0, [])
        until_ms = now_ms() - hours * 3_600_000
        commits = (commit for commit in (self.backwards() if unnamed else ()) if commit.at_ms <= until_ms)
        return unnamed & {path for commit in commits for path in commit.removed}

    def forget_removals(self, hours: int, most: int) -> None:
        """Let the log forget removed files after some hours, once it holds more than `most` of them.

        By default it names them for a week, and each checkpoint of the log names them all: with a few commits
        a second that is a million. `sweep` deletes only files that the log still names.

        Raises:
            CommitConflict: somebody else took the next version; the next call tries again.
        """
        self.refresh()
        if self._table.metadata().configuration.get(_REMOVALS) or len(self._left(0, [])) <= most:
            return
        before = self.version
        try:
            self._table.alter.set_table_properties(
                {_REMOVALS: f"interval {hours} hours"},
                commit_properties=CommitProperties(max_commit_retries=0),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except DeltaError as error:
            self._refuse_second(before, error)
            raise
        self.refresh()

    def _refuse_second(self, before: Version, error: Exception) -> None:
        """Refresh after a commit that failed; raise CommitConflict if somebody else took its version."""
        self.refresh()
        if self.version != before:
            raise CommitConflict(f"{self.uri} has a newer version than {before}") from error

    def _left(self, hours: int, kept: list[int]) -> set[str]:
        """Return the files that were removed long enough ago and are in none of the kept versions."""
        return set(
            self._table.vacuum(
                retention_hours=hours, dry_run=True, enforce_retention_duration=False, keep_versions=kept
            )
        )

    def trim_log(self, kept: int) -> None:
        """Delete log files older by more than `kept` versions than the log's newest checkpoint, oldest first.

        Costs a listing. The remaining log always begins before a checkpoint, so the table can be read even
        after a kill. A handle at an older version must be opened again.

        If `_last_checkpoint` is damaged, nothing is deleted: deltalake reads the log without it, and writes
        it anew with the next checkpoint.
        """
        last = self.place.read("_delta_log/_last_checkpoint")
        if last is None:
            return
        try:
            newest = from_json(_LastCheckpoint, last).version
        except DamageError:
            return
        for _, path in log_files_before(self.place.fs, self.place.path, newest - kept):
            with suppress(FileNotFoundError):
                self.place.fs.delete_file(path)

    def _read_back(self, target: Version, token: str, error: Exception) -> None:
        """Return if the commit was made after all; raise what is known otherwise."""
        try:
            found = self.read_commit(target)
        except (OSError, DamageError):
            found = None
        if found is None:
            raise CommitStateUnknown(
                f"the store did not confirm version {target} of {self.uri}: {error}"
            ) from error
        if found.token != token:
            raise CommitConflict(f"another writer took version {target} of {self.uri}") from error


def _is_of_store(error: Exception) -> bool:
    """Say whether an Arrow error means that a store does not answer; errors about bytes name no store."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return False
    return error.errno is not None or any(named in str(error) for named in _STORES)
