"""A Delta table as a sink: every batch in it once, whatever is repeated, and back to any recorded version.

A plain table is committed to like a channel, at exactly the version behind what was read. Any other goes
through Delta's own writer, which skips a repeated batch by its transaction id; since it skips in silence,
the id is read back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from deltalake import CommitProperties, PostCommitHookProperties
from deltalake.exceptions import DeltaError
from deltalake.transaction import Transaction
from pyarrow import fs

from spark_abs.channels.fence import require_current
from spark_abs.channels.files import Written, directory_name, evaluation_of, write_parquet
from spark_abs.channels.schema import check_schema, delta_schema
from spark_abs.channels.writer import Standing
from spark_abs.codec import from_plain, to_json
from spark_abs.errors import CommitConflict, CommitStateUnknown, DamageError, Refused
from spark_abs.model import (
    FENCED,
    FORMAT,
    NO_BATCH,
    AttemptId,
    Barrier,
    BatchId,
    CheckpointId,
    Entry,
    RunId,
    StageId,
    Version,
    app_id,
    run_app_id,
)
from spark_abs.sinks import through_spark
from spark_abs.sinks.note import PlannedBatch, SinkNote
from spark_abs.sinks.plain import why_not_plain
from spark_abs.store.log import LogCommit
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def ensure_sink(place: Place, schema: StructType) -> str:
    """Create the table of a sink if there is none, and return its table id. Two creators end with one.

    A table that was there must have every column of the frame with the same type; columns that only the
    table has stay null.

    Raises:
        UsageError: the table cannot take the frame's rows; names every column that differs.
    """
    table = Table.ensure(place, delta_schema(schema), {})
    check_schema(f"table {place}", table.delta.schema().to_json(), schema, may_lack=True)
    return table.id


class DeltaSink:
    """Commits the batches of one sink to a Delta table, under one attempt and run.

    Not thread-safe, but `version_at` may be called from one other thread.
    """

    def __init__(
        self,
        root: Root,
        uri: str,
        job: str,
        stage: StageId,
        sink: str,
        attempt: AttemptId,
        run: RunId,
        session: Callable[[], SparkSession],
    ) -> None:
        """Open the table, which `ensure_sink` or somebody else has made.

        Args:
            root: The job's root; rows for a table that is not plain are staged below it.
            uri: The table.
            job: The job.
            stage: The stage that produces the rows.
            sink: Name of the sink.
            attempt: The attempt.
            run: The run.
            session: Called only when a table that is not plain is written to, fenced or restored.

        Raises:
            FileNotFoundError: there is no such table.
        """
        self._root, self._session = root, session
        self._job, self._attempt, self._run = job, attempt, run
        self._names = (job, str(stage), sink)
        self._sink = "/".join(self._names)
        self._app = app_id(*self._names, attempt)
        self._restore_app = f"{self._app}/restore"
        self._staging = f"staging/{stage}.{sink}"
        self._table = Table.open(root.storage.place(uri))
        self._view = Table.open(root.storage.place(uri))

    @property
    def table_id(self) -> str:
        """The id of the table."""
        return self._table.id

    @property
    def uri(self) -> str:
        """Where the table is."""
        return self._table.uri

    def begin(self) -> None:
        """Fence the table against older runs and clear what they staged; once, before the stage starts.

        Repeatable. The first time of an attempt it marks the version at which the attempt came.

        Raises:
            Fenced: a newer run or attempt has taken over.
        """
        self._sweep()
        fence = run_app_id(self._job)
        while True:
            self._table.refresh()
            require_current(self._table, self._job, self._run, self._app)
            if self._table.transaction(fence) == self._run:
                return
            ids = (self._app, self._restore_app)
            new = all(self._table.transaction(app) is None for app in ids)
            try:
                self._mark(fence, int(self._run), self._note(attached=new))
            except CommitConflict:
                continue

    def holds(self, batch: BatchId) -> bool:
        """Refresh, and say whether the rows of a batch, or of a later one, were committed."""
        self._table.refresh()
        last = self._table.transaction(self._app)
        return last is not None and last >= batch

    def write_files(self, frame: DataFrame, batch: BatchId) -> Written:
        """Evaluate the frame once and write its rows as files that nobody sees before `commit_batch`."""
        name = directory_name(self._attempt, self._run, batch)
        if why_not_plain(self._table.delta) is None:
            return write_parquet(frame, self._table.place, f"data/{name}")
        return write_parquet(frame, self._root.top, f"{self._staging}/{name}")

    def commit_batch(
        self,
        written: Written,
        batch: BatchId,
        *,
        barrier: Barrier | None = None,
        cancel: CheckpointId | None = None,
        plans: tuple[PlannedBatch, ...] = (),
    ) -> Standing | None:
        """Commit the rows of a batch; None, and no commit, if it has none and was not committed before.

        The steps are those of `ChannelWriter.commit_batch`, and so is what a crash between them leaves.

        Raises:
            Fenced: a newer run or attempt has taken over.
            CommitStateUnknown: the store did not say; repeat the call.
        """
        note = replace(self._note(batch=batch, barrier=barrier, cancel=cancel), plans=plans)
        while True:
            self._table.refresh()
            require_current(self._table, self._job, self._run, self._app)
            last = self._table.transaction(self._app)
            if last is not None and last >= batch:
                return self._standing(batch)
            if not written.files:
                return None
            staged = written.files[0].path.startswith(f"{self._staging}/")
            if staged or why_not_plain(self._table.delta) is not None:
                return self._append(written, note, staged)
            try:
                version = self._table.commit_next(
                    Commit(written.files, {self._app: int(batch)}, to_json(note))
                )
            except CommitConflict:
                continue
            return Standing(replace(_entry(version, note), files=written.entry_files), fresh=True)

    def last_batch(self) -> BatchId:
        """Return the newest batch that was committed, as of the version read; `NO_BATCH` if none was."""
        last = self._table.transaction(self._app)
        return NO_BATCH if last is None else BatchId(last)

    def plans(self, after: BatchId) -> dict[BatchId, str]:
        """Return what its commits say of batches behind `after`."""
        self._table.refresh()
        found: dict[BatchId, str] = {}
        for _, note in self._backwards(self._table):
            if note is not None and (_begins(note) or NO_BATCH < note.batch <= after):
                break
            found |= {p.batch: p.offsets for p in (note.plans if note else ()) if p.batch > after}
        return found

    def version_at(self, batch: BatchId) -> Version:
        """Refresh, and return the version at which the table holds this attempt's batches up to `batch`.

        That is the newest of its commits with a batch up to that one; before the first, the version to
        which the attempt was restored, or at which it came to the table. What others have committed up
        to that version is part of it.

        Raises:
            DamageError: commits of later batches are there, and the log ends before the one looked for.
        """
        self._view.refresh()
        found = self._view.version
        for found, note in self._backwards(self._view):
            if note is not None and (_begins(note) or NO_BATCH < note.batch <= batch):
                return found
        last = self._view.transaction(self._app)
        if last is not None and last > batch:
            raise DamageError(
                f"the log of {self.uri} begins at {found}, behind batch {batch} of {self._sink}"
            )
        return found

    def fence(self, attempt: AttemptId) -> None:
        """Burn the id under which another attempt commits to this table. Repeatable."""
        app = app_id(*self._names, attempt)
        while True:
            self._table.refresh()
            if self._table.transaction(app) == FENCED:
                return
            try:
                self._mark(app, FENCED, self._note())
            except CommitConflict:
                continue

    def restore_to(self, version: Version, force: bool = False) -> Version:
        """Bring the table back to `version` for this attempt, and return the version that does it.

        The commit names the attempt, so a repeat finds it and changes nothing. OPTIMIZE and other
        commits that change no data do not stand in the way.

        Raises:
            Refused: somebody else has changed data since, and not `force`; names the commits.
            DamageError: the version, or a file of it, is not there any more.
            CommitStateUnknown: the store did not say; repeat the call.
        """
        while True:
            self._table.refresh()
            self._table.require_unfenced(self._app)
            if self._table.transaction(self._restore_app) is not None:
                return next(
                    found
                    for found, note in self._backwards(self._table)
                    if note is not None and _begins(note)
                )
            changed = self._changes_since(version, force)
            note = self._note(restored=version)
            try:
                if why_not_plain(self._table.delta) is not None:
                    if changed:
                        through_spark.restore(self._session(), self._table.place, version, to_json(note))
                    self._mark(self._restore_app, int(version), note)
                elif changed:
                    self._restore_plain(version, note)
                else:
                    self._mark(self._restore_app, int(version), note)
            except CommitConflict:
                continue

    def _changes_since(self, version: Version, force: bool) -> bool:
        """Say whether rows have changed since `version`; refuse if somebody else did it."""
        changed, others = False, []
        for since in range(version + 1, self._table.version + 1):
            commit = self._table.read_commit(since)
            if commit is None:
                others.append(f"  version {since}: not in the log any more")
                changed = True
            elif commit.data_change:
                changed = True
                if self._note_of(commit) is None:
                    others.append(f"  version {since}: {commit.operation}")
        if others and not force:
            raise Refused(
                f"{self.uri} was changed by others since version {version}, which a restore would undo; "
                "use --force to do so:\n" + "\n".join(others)
            )
        return changed

    def _restore_plain(self, version: Version, note: SinkNote) -> None:
        before = self._table.version
        try:
            self._table.delta.restore(
                int(version),
                commit_properties=CommitProperties(
                    custom_metadata={"userMetadata": to_json(note)},
                    max_commit_retries=0,
                    app_transactions=[Transaction(self._restore_app, int(version))],
                ),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except (DeltaError, OSError) as error:
            self._table.refresh()
            if self._table.version != before:
                raise CommitConflict(f"{self.uri} has moved on from {before}") from error
            raise DamageError(f"{self.uri} cannot be brought back to version {version}: {error}") from error

    def _append(self, written: Written, note: SinkNote, staged: bool) -> Standing:
        """Append through Delta's writer; killed behind it, the repeat finds the batch in the log."""
        base = self._root.uri if staged else self.uri
        files = [f"{base}/{file.path}" for file in written.files]
        through_spark.append(self._session(), self.uri, files, self._app, int(note.batch), to_json(note))
        self._table.refresh()
        require_current(self._table, self._job, self._run, self._app)
        standing = self._standing(note.batch)
        if standing is None:
            raise CommitStateUnknown(f"batch {note.batch} was written to {self.uri} and is not in its log")
        if staged:
            self._root.fs.delete_dir(self._root.path(os.path.dirname(written.files[0].path)))
        return replace(standing, fresh=True)

    def _mark(self, app: str, number: int, note: SinkNote) -> None:
        """Commit an id and a note without rows; raises CommitConflict."""
        if why_not_plain(self._table.delta) is None:
            self._table.commit_next(Commit(transactions={app: number}, metadata=to_json(note)))
        else:
            through_spark.mark(self._session(), self._table, app, number, to_json(note))

    def _standing(self, batch: BatchId) -> Standing | None:
        """Return what stands for a batch as of the version read; None if it had no rows."""
        for version, note in self._backwards(self._table):
            if note is not None and note.batch == batch:
                return Standing(_entry(version, note), fresh=False)
            if note is not None and (_begins(note) or NO_BATCH < note.batch < batch):
                return None
        return None

    def _backwards(self, table: Table) -> Iterator[tuple[Version, SinkNote | None]]:
        """Iterate the log from the version read backwards, with the notes of this attempt."""
        for version in range(table.version, -1, -1):
            commit = table.read_commit(version)
            if commit is None:
                return
            note = self._note_of(commit)
            yield Version(version), note if note is not None and note.attempt == self._attempt else None

    def _note_of(self, commit: LogCommit) -> SinkNote | None:
        """Return the note of a commit of this sink, of whatever attempt; None for everybody else's."""
        try:
            plain = json.loads(commit.metadata or "null")
        except ValueError:
            return None
        if not isinstance(plain, dict) or plain.get("sink") != self._sink:
            return None
        note = from_plain(SinkNote, plain)
        if note.v > FORMAT:
            raise DamageError(
                f"version {commit.version} of {self.uri} has format {note.v}, newest known is {FORMAT}: "
                "upgrade spark_abs"
            )
        return note

    def _note(
        self,
        batch: BatchId = NO_BATCH,
        barrier: Barrier | None = None,
        cancel: CheckpointId | None = None,
        restored: Version | None = None,
        attached: bool = False,
    ) -> SinkNote:
        return SinkNote(self._sink, self._attempt, self._run, batch, barrier, cancel, restored, attached)

    def _sweep(self) -> None:
        """Delete what older runs have staged and not committed."""
        selector = fs.FileSelector(self._root.path(self._staging), allow_not_found=True)
        for info in self._root.fs.get_file_info(selector):
            staged = evaluation_of(info.base_name)
            if staged is not None and staged.run < self._run:
                self._root.fs.delete_dir(info.path)


def _begins(note: SinkNote) -> bool:
    """Say whether a commit is the one from which an attempt goes on."""
    return note.attached or note.restored is not None


def _entry(version: Version, note: SinkNote) -> Entry:
    return Entry(version, note.attempt, note.run, note.batch, note.barrier, note.cancel)
