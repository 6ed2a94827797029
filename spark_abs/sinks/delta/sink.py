"""A Delta table as a sink: each batch is in it once, and it can go back to any recorded version.

A plain table is committed to like a channel, at exactly the version after what was read. Any other goes
through Delta's own writer, which skips a repeated batch by its transaction id; since it skips silently, the
id is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from spark_abs.channels.files import directory_name, write_parquet
from spark_abs.channels.staged import Files, copy_files, staging_of
from spark_abs.channels.writer import Standing
from spark_abs.codec import to_json
from spark_abs.errors import CommitConflict, CommitStateUnknown, DamageError, TakenOver
from spark_abs.model import (
    FENCED,
    NO_BATCH,
    NO_TABLE,
    BatchId,
    Entry,
    LookupVersion,
    RunId,
    SinkWriter,
    Version,
    run_app_id,
)
from spark_abs.protocol.change_data import LAST_WINS, ChangeOptions
from spark_abs.protocol.evaluation import Staged
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.commit_metadata import PlannedBatch, SinkMetadata
from spark_abs.sinks.delta.fit import Fit, planned_for
from spark_abs.sinks.delta.marks import (
    Marked,
    commit_mark,
    commit_marks,
    is_mark_by_spark,
    notes_of_root,
    other_writers,
    refuse_epochs,
)
from spark_abs.sinks.delta.merge_changes import Merging, in_files, merge_changes
from spark_abs.sinks.delta.native_writable import why_not_native
from spark_abs.sinks.delta.others import refuse_others, rows_there
from spark_abs.sinks.delta.rollback import ahead, bring_back
from spark_abs.sinks.delta.sink_log import NOTHING_PASSED, Passed, SinkLog
from spark_abs.sinks.delta.spark_writer import Stamp
from spark_abs.sinks.delta.tombstones import said_at
from spark_abs.store.fence import is_fenced_for, require_current
from spark_abs.store.root import Root
from spark_abs.store.table import Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class DeltaSink:
    """Commits the batches of one sink to a Delta table, as one writer and run.

    Not thread-safe, but `version_at` may be called from one other thread.
    """

    def __init__(
        self,
        root: Root,
        uri: str,
        *,
        writer: SinkWriter,
        run: RunId,
        session: Callable[[], SparkSession],
        key: Sequence[str] = (),
        overwrites: bool = False,
        changes: ChangeOptions = LAST_WINS,
        in_order_since: RunId | None = None,
    ) -> None:
        """Open the table, which `ensure_sink` or somebody else has made.

        Args:
            root: The job's root; rows for a table that is not plain are staged below it.
            uri: The table.
            writer: Who commits.
            run: The run.
            session: Called only where Delta's own writer is needed.
            key: Columns by which a batch is merged; without, it is appended.
            overwrites: Whether a batch takes the place of all rows.
            changes: How changes of one key are applied.
            in_order_since: See `is_fenced_for`.

        Raises:
            FileNotFoundError: there is no such table.
        """
        self._root, self._session = root, session
        self._writer, self._run, self._in_order_since = writer, run, in_order_since
        self._fence = run_app_id(writer.owner)
        self._key, self.overwrites, self._changes = tuple(key), overwrites, changes
        self._table = Table.open(root.storage.place(uri))
        self._view = Table.open(root.storage.place(uri))
        self.log = SinkLog(self._table, writer)
        """What the table holds of this attempt, as of the version last refreshed."""
        self._fit = Fit(self._table, rewrites=bool(key) or overwrites, stored=changes.stored)
        self._passed = NOTHING_PASSED
        """Commits of others between two batches are read once, not at every cut."""

    @property
    def table_id(self) -> str:
        return self._table.id

    @property
    def uri(self) -> str:
        return self._table.uri

    def refresh(self) -> None:
        """Read what came since."""
        self._table.refresh()

    def begin(self, take_over: bool = False, alone: bool = False) -> None:
        """Fence the table against older runs; once, before the stage starts.

        Repeatable. It marks the version at which the attempt came to the table, or at which the stage took it
        over from another stage of the attempt: every cut includes the rows of that stage. If there is nothing
        to mark, and all runs that the newest fence lets in have ended in order, the first commit carries the
        fence.

        Args:
            take_over: fence all other roots that have written to the table, too: they commit nothing more,
                now or when they are started again.
            alone: refuse a table with rows if this root has never committed to it.

        Raises:
            Fenced: a newer run or attempt, or another root, has taken over.
            Refused: the sink has written the table after checkpoints, or rows of others are there.
            TableChanged: the table cannot be that of a sink any more.
        """

        def fences() -> Marked | None:
            self._require_current()
            self._fit.require(None)
            others = other_writers(self._table, self._writer.job, self._writer.root) if take_over else None
            new = all(
                self._table.transaction(app) is None for app in (self._writer.app, self._writer.restore_app)
            )
            mine = self._newest_is_mine()
            fenced = is_fenced_for(self._table, self._fence, self._run, self._in_order_since)
            if fenced and others is None and (mine or (mine is None and not new)):
                return None
            if new:
                refuse_epochs(self._table, self._writer.job, self._writer.root)
            if alone and new and self._table.transaction(self._fence) is None:
                refuse_others(self._writer.sink, f"table {self.uri}", rows_there(self._table))
            note = replace(self._note(attached=new or mine is False), took_over=others is not None)
            return Marked(dict.fromkeys(others or (), FENCED) | {self._fence: int(self._run)}, note)

        commit_marks(self._table, fences, self._session)

    def fence_older(self) -> None:
        """Fence the table against older runs, unless it is; mark nothing. Repeatable.

        Raises:
            Fenced: a newer run or attempt, or another root, has taken over.
        """

        def fences() -> Marked | None:
            self._require_current()
            if is_fenced_for(self._table, self._fence, self._run, self._in_order_since):
                return None
            return Marked({self._fence: int(self._run)}, self._note())

        commit_marks(self._table, fences, self._session)

    def _newest_is_mine(self) -> bool | None:
        """Say whether this attempt's newest commit that counts is of this stage; None if there is none."""
        for version, note in self.log.of_attempt(self._passed):
            if note is not None and (note.begins or note.batch > NO_BATCH):
                mine = self.log.is_mine(note)
                if mine:
                    self._passed = Passed(self._table.version, version)
                return mine
        return None

    def _require_current(self) -> None:
        require_current(self._table, self._writer.owner, self._run, self._writer.app)

    @property
    def plain(self) -> bool:
        """Whether it takes files as they are, as of the version read."""
        return not self._key and self._fit.plain

    def write_files(self, frame: DataFrame, batch: BatchId) -> Files:
        """Evaluate the frame once and write its rows as files that nobody sees before `commit_batch`.

        Those for a table that is not plain are staged below the root.
        """
        name = directory_name(self._writer.attempt, self._run, batch)
        place = self._table.place if self.plain else self._root.top
        above = "data" if self.plain else staging_of(self._writer.stage, self._writer.sink)
        return Files(place, write_parquet(frame, place, f"{above}/{name}"))

    def copy_files(self, files: Files, batch: BatchId) -> Files:
        """Copy files of rows into a plain table, as `write_files` would write them."""
        name = directory_name(self._writer.attempt, self._run, batch)
        return copy_files(files, self._table.place, f"data/{name}")

    def commit_batch(
        self,
        files: Files | None,
        batch: BatchId,
        plans: Sequence[PlannedBatch] = (),
        evaluated: Sequence[Staged] = (),
        lookups: Sequence[LookupVersion] = (),
    ) -> Standing | None:
        """Commit a batch; return None, without a commit, if it changes nothing and was not committed before.

        The steps are those of `ChannelWriter.commit_batch`, and so is what a crash between them leaves. Files
        that lie elsewhere than in the table are read and written again by Delta's own writer.

        Raises:
            Fenced: a newer run or attempt has taken over.
            TableChanged: others have changed the table so that it does not take the rows.
            CommitStateUnknown: the store did not say; repeat the call.
        """
        note = replace(self._note(batch=batch), plans=tuple(plans), evaluated=tuple(evaluated))
        note = replace(note, lookups=tuple(lookups))
        while True:
            self._table.refresh()
            self._require_current()
            if self.log.last_batch() >= batch:
                return self._standing(batch)
            if files is None or not (files.written.files or self.overwrites):
                return None
            self._fit.require(files.written.schema)
            if not self.plain or (files.written.files and files.place != self._table.place):
                try:
                    return self._write_by_spark(files, note)
                except CommitConflict:
                    continue
            try:
                version = self._table.commit_next(
                    Commit(
                        files.written.files,
                        {self._writer.app: int(batch), self._fence: int(self._run)},
                        to_json(note),
                        replace=self.overwrites,
                    )
                )
            except CommitConflict:
                continue
            return Standing(replace(_entry(version, note), files=files.written.entry_files), fresh=True)

    def said_at(self, version: Version) -> str:
        """Name the sink and a version of its table for a person."""
        return f"sink {self._writer.sink!r} (version {version} of {self.uri})"

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
        own: list[Version] = []
        for found, note in SinkLog(self._view, self._writer).backwards(self._passed):
            if note is None or not (note.begins or note.batch > NO_BATCH):
                continue
            own.append(found)
            if note.begins or note.batch <= batch:
                break
        else:
            last = self._view.transaction(self._writer.app)
            if last is not None and last > batch:
                raise DamageError(
                    f"the log of {self.uri} begins at {found}, after batch {batch} of {self._writer.name}"
                )
        self._passed = Passed(self._view.version, own[0] if own else found)
        return found

    def fence(self, apps: Iterable[str]) -> None:
        """Burn the ids under which other attempts commit to this table. Repeatable."""

        def fences() -> Marked | None:
            burnt = {app: FENCED for app in apps if self._table.transaction(app) != FENCED}
            return Marked(burnt, self._note()) if burnt else None

        commit_marks(self._table, fences, self._session)

    def restore_to(
        self, version: Version, own: Own, undo_others: bool = False, by_function: bool = False
    ) -> Version:
        """Bring the table back to `version`, `NO_TABLE`: to no rows, and return the version that does it.

        Whatever is added behind that stays, also between Delta's RESTORE and the mark. If there was nothing
        to undo, it may be `version` itself.

        The commit names the attempt, so a repeat finds it and changes nothing. OPTIMIZE and other
        commits that change no data do not stand in the way. Rows of other roots stay.

        If the table is written by a function, the same commit sets back the ids under which it may write: see
        `ahead`. A table that is not plain keeps them.

        Raises:
            Refused: somebody else has changed data since, and not `undo_others`; names the commits. Or
                another root has, and its rows cannot be told from ours.
            DamageError: the version, or a file of it, is not there any more.
            CommitStateUnknown: the store did not say; repeat the call.
        """
        writer = self._writer
        while True:
            self._table.refresh()
            self._table.require_unfenced(writer.app)
            if self._table.transaction(writer.restore_app) is not None:
                return self._undone_until(version)
            with suppress(TakenOver):  # its own rows may go back all the same
                self._require_current()  # Delta's RESTORE knows no fence
            tombstones = said_at(self._table, version, writer.job, writer.root)
            note = replace(self._note(restored=version), tombstones=tombstones)
            back = {}
            if by_function and why_not_native(self._table.delta) is None:
                back = ahead(self._table, version, writer.job, writer.owner)
            mark = Marked({**back, writer.restore_app: int(version)}, note)
            with suppress(CommitConflict):
                bring_back(
                    self._table, version, own=own, mark=mark, session=self._session, undo_others=undo_others
                )

    def _undone_until(self, version: Version) -> Version:
        """Return the version that has undone what came after `version`, by a restore that is done."""
        later = takewhile(lambda entry: entry[0] > version, self.log.backwards())
        found = [number for number, note in later if note is not None and note.restored is not None]
        for one in found:
            commit = self._table.read_commit(one)
            if commit is None or not is_mark_by_spark(commit):
                return one
        return found[0] if version == NO_TABLE else version

    def _write_by_spark(self, files: Files, note: SinkMetadata) -> Standing:
        """Write through Delta's writer; killed after it, the repeat finds the batch in the log."""
        if self._table.transaction(self._fence) != self._run:  # Delta's writer takes one id
            commit_mark(self._table, Marked({self._fence: int(self._run)}, self._note()), self._session)
            self._table.refresh()  # histories are read at the newest version: Delta refuses old ones in time
        session, place = self._session(), self._table.place
        stamp = Stamp(self._writer.app, int(note.batch), to_json(note))
        uris = files.uris
        with planned_for(self._table):
            if self._key:
                # Of all attempts: one may go on with rows that a restore has left as they were.
                notes = notes_of_root(self._table, self._writer.job, self._writer.root)
                sink = f"{self._writer.stage}.{self._writer.sink}"
                merging = Merging(
                    self._table, self._key, options=self._changes, root=self._root, sink=sink, notes=notes
                )
                merge_changes(in_files(session, uris), merging, note, stamp)
            else:
                no_rows = spark_writer.no_rows
                rows = session.read.parquet(*uris) if uris else no_rows(session, self._table)
                write = spark_writer.overwrite if self.overwrites else spark_writer.append
                write(rows, place, stamp)
        self._table.refresh()
        self._require_current()
        standing = self._standing(note.batch)
        if standing is None:
            raise CommitStateUnknown(f"batch {note.batch} was written to {self.uri} and is not in its log")
        self._fit.require(files.written.schema)  # others may have changed it between our look and Delta's
        return replace(standing, fresh=True)

    def _standing(self, batch: BatchId) -> Standing | None:
        """Return what stands for a batch as of the version read; None if it had no rows."""
        found = self.log.commit_of(batch)
        return None if found is None else Standing(_entry(*found), fresh=False)

    def _note(
        self, batch: BatchId = NO_BATCH, restored: Version | None = None, attached: bool = False
    ) -> SinkMetadata:
        writer = self._writer
        return SinkMetadata(
            writer.name,
            writer.attempt,
            self._run,
            batch,
            restored=restored,
            attached=attached,
            root=writer.root,
        )


def _entry(version: Version, note: SinkMetadata) -> Entry:
    return Entry(
        version, note.attempt, run=note.run, batch=note.batch, barrier=note.barrier, cancel=note.cancel
    )
