"""A Delta table whose readers see whole checkpoints only: the rows of an epoch and its mark in one commit.

A plain table is committed to at exactly the version after what was read. Any other, and a merge, goes
through Delta's own writer: it skips a number that is not above the one in the log, and its transaction fails
where another commit has changed that number meanwhile. So of two runs the older one commits nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_abs.channels.staged import STAGING
from spark_abs.codec import to_json
from spark_abs.errors import CommitConflict, CommitStateUnknown, Refused
from spark_abs.model import FENCED, NO_ATTEMPT
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.commit_metadata import CommittedEpoch, SinkMetadata, Tombstones
from spark_abs.sinks.delta.epoch_files import delete_rows, write_rows
from spark_abs.sinks.delta.epoch_marks import (
    Newest,
    app_of,
    newest,
    next_number,
    require_newest,
    version_to,
)
from spark_abs.sinks.delta.fit import Fit, planned_for
from spark_abs.sinks.delta.marks import Marked, commit_mark, epoch_sinks, notes_of_root, other_writers
from spark_abs.sinks.delta.merge_changes import Merging, merge_changes
from spark_abs.sinks.delta.native_writable import why_not_native
from spark_abs.sinks.delta.options import EpochTable
from spark_abs.sinks.delta.others import rows_there
from spark_abs.sinks.delta.rollback import bring_back, why_not_back
from spark_abs.sinks.delta.spark_writer import Stamp
from spark_abs.sinks.delta.tombstones import said_at
from spark_abs.sinks.marked import MarkedSink, mark_changed
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from spark_abs.store.table import Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FADES_MS = 24 * 3_600_000
"""The age from which a start renews the newest commit: a clean-up of the log removes old commits."""


class DeltaEpochSink(MarkedSink[Newest]):
    """The sink behind `Delta(…, visible="checkpoint")`. Not thread-safe."""

    def __init__(self, config: EpochTable, root: Root, session: Callable[[], SparkSession]) -> None:
        """Take the table, which need not be there yet.

        Args:
            config: the table.
            root: the job's root; rows for a table that is not plain are staged below it.
            session: called only where Delta's own writer is needed.
        """
        self._config, self._root, self._session = config, root, session
        self._kept: Table | None = None
        self._fit: Fit | None = None
        """Compares `_kept`, the open table, with the rows."""

    # -- what the job and a restore call

    def check(self, schema: pa.Schema) -> None:
        """Do nothing: `check_sink` compares the table with the rows, before there is one."""

    def rows_of_others(self, owner: Owner) -> str:
        """Say which rows are there, if no sink of the root has been there; needs no Spark."""
        try:
            table = self._read()
        except FileNotFoundError:
            return ""
        there = rows_there(table) if table.transaction(app_of(owner)) is None else ""
        return there if there and next(notes_of_root(table, owner.job, owner.root), None) is None else ""

    def rests(self, owner: Owner) -> bool:
        """Say whether the newest commit stays readable for long, and no other root is to be fenced."""
        table = self._read()
        found = newest(table, owner)
        if found is None or now_ms() - found.at_ms > _FADES_MS:
            return False
        return not self._config.take_over or other_writers(table, owner.job, owner.root) is None

    def spark_table(self) -> str:
        """Return the table if only Spark can write it."""
        return self._config.path if why_not_native(self._read().delta) is not None else ""

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say what keeps the table from going back; needs no Spark."""
        table = self._read()
        found = newest(table, owner)
        if found is None or found.mark is None or found.mark == back:
            return ""
        target = version_to(table, owner, back)
        if target is None:
            return "the log of the table no longer says which version belongs to that checkpoint"
        return why_not_back(table, target, _own(owner))

    def close(self) -> None:
        super().close()
        self._kept = self._fit = None

    # -- the mark, and the commits

    def _read_mark(self, owner: Owner) -> Newest | None:
        return newest(self._read(), owner)

    def _fence(self, owner: Owner) -> Newest:
        """Commit a number of this run: commits that an older run has prepared fail from then on."""
        while True:
            table = self._read()
            found = require_newest(table, owner)
            self._takes_files(None)
            notes = tuple(notes_of_root(table, owner.job, owner.root)) if found is None else ()
            if before := epoch_sinks(notes):
                raise Refused(
                    f"sink {before[-1]!r} has written {table.uri}; under another name, the checkpoints that "
                    "it has not sent yet would be missing. Declare the sink under that name again, or with "
                    "another table"
                )
            if notes:
                raise Refused(
                    f"this root has written {table.uri} with each batch, so the table may be ahead of every "
                    "checkpoint: declare the sink with visible='batch' again, or with another table"
                )
            mark = None if found is None else found.mark
            others = other_writers(table, owner.job, owner.root) if self._config.take_over else None
            number = next_number(None if found is None else found.number, owner.run)
            ids = dict.fromkeys(others or (), FENCED) | {app_of(owner): number}
            note = _note(owner, CommittedEpoch(mark), took_over=self._config.take_over)
            with suppress(CommitConflict):
                commit_mark(table, Marked(ids, note), self._session)
                if self._read().transaction(app_of(owner)) == number:
                    break
        delete_rows(self._root.top, self._staging(owner))
        return Newest(number, mark)

    def _add(self, epoch: Epoch, known: Newest, rows: Rows) -> Newest:
        """Commit the rows and the mark; a table that is not plain, or has a key, by Delta's own writer."""
        owner, table = epoch.owner, self._read()
        self._require(table, owner, known)
        done = Newest(known.number + 1, epoch.mark)
        mark = Marked({app_of(owner): done.number}, _note(owner, CommittedEpoch(epoch.mark, epoch.after)))
        if not self._append(table, owner, known, mark, rows):
            self._write_by_spark(table, owner, known, mark, rows)
        return done

    def _go_back(self, owner: Owner, known: Newest, back: Mark, *, keep: bool) -> Newest:
        """Bring the rows back to the version of a mark, in a commit that says so, or only the mark."""
        done = Newest(known.number + 1, back)
        mark = Marked({app_of(owner): done.number}, _note(owner, CommittedEpoch(back, kept=keep)))
        while True:
            table = self._read()
            self._require(table, owner, known)
            with suppress(CommitConflict):
                self._bring_back(table, owner, back, mark, keep)
                if self._read().transaction(app_of(owner)) == done.number:
                    break
        return done

    def _read(self) -> Table:
        if self._kept is None:
            self._kept = Table.open(self._root.storage.place(self._config.path))
            self._fit = Fit(self._kept, rewrites=bool(self._config.key), stored=self._config.changes.stored)
        else:
            self._kept.refresh()
        return self._kept

    def _takes_files(self, rows: Rows | None) -> bool:
        """Say whether the table, as of the version read, takes rows as files; None for no rows.

        Raises:
            TableChanged: others have changed it so that it does not take them in any way.
        """
        assert self._fit is not None
        self._fit.require(None if rows is None else rows.schema)
        return not self._config.key and self._fit.plain

    def _staging(self, owner: Owner) -> str:
        return f"{STAGING}/{owner.sink}"

    def _require(self, table: Table, owner: Owner, known: Newest) -> None:
        """Require that the newest commit is the one that is known, as of the version read.

        Raises:
            Fenced: a newer run has been here.
            CommitConflict: another object of this run has.
        """
        if table.transaction(app_of(owner)) != known.number:
            require_newest(table, owner)
            raise mark_changed(owner, known)
        newest(table, owner)  # and it was not taken over

    def _append(self, table: Table, owner: Owner, known: Newest, mark: Marked, rows: Rows) -> bool:
        """Commit rows as files; False, with nothing committed, if only Delta's own writer can."""
        if not self._takes_files(rows):
            return False
        directory = f"data/{int(owner.run)}-{uuid.uuid4().hex}"
        tried = False
        try:
            files = write_rows(rows, table.place, directory).files
            while True:
                try:
                    tried = True
                    table.commit_next(Commit(files, mark.transactions, to_json(mark.note)))
                    return True
                except CommitConflict:  # others commit to the table, too
                    tried = False
                    self._require(self._read(), owner, known)
                    if not self._takes_files(rows):
                        delete_rows(table.place, directory)
                        return False
        except Exception:
            if not tried:  # nothing of it is in the table
                with suppress(OSError):
                    delete_rows(table.place, directory)
            raise

    def _write_by_spark(self, table: Table, owner: Owner, known: Newest, mark: Marked, rows: Rows) -> None:
        ((app, number),) = mark.transactions.items()
        key, top, session = self._config.key, self._root.top, self._session()
        directory = f"{self._staging(owner)}/{number}-{uuid.uuid4().hex}"
        stamp = Stamp(app, number, to_json(mark.note))
        try:
            files = write_rows(rows, top, directory, numbered=bool(key)).files
            if not files:
                commit_mark(table, mark, self._session)
            else:
                frame = session.read.parquet(*(f"{top}/{file.path}" for file in files))
                with planned_for(table):
                    if key:
                        notes = notes_of_root(table, owner.job, owner.root)
                        changes = self._config.changes
                        merging = Merging(
                            table, key, options=changes, root=self._root, sink=owner.sink, notes=notes
                        )
                        merge_changes(frame, merging, mark.note, stamp)
                    else:
                        spark_writer.append(frame, table.place, stamp)
        except Exception:
            self._require(self._read(), owner, known)  # of a run that was replaced that is the reason
            raise
        finally:
            with suppress(OSError):
                delete_rows(top, directory)
        found = self._read().transaction(app)
        if found != number:
            require_newest(table, owner)
            raise CommitStateUnknown(f"number {number} was written to {table.uri}, and its log has {found}")
        self._takes_files(rows)  # others may have changed the table between our look and Delta's

    def _bring_back(self, table: Table, owner: Owner, back: Mark, mark: Marked, keep: bool) -> None:
        if keep:
            commit_mark(table, mark, self._session)
            return
        target = version_to(table, owner, back)
        if target is None:
            raise Refused(f"the log of {table.uri} no longer says which version belongs to {back}")
        tombstones = said_at(table, target, owner.job, owner.root) or Tombstones((), ())
        mark = replace(mark, note=replace(mark.note, tombstones=tombstones))
        bring_back(table, target, own=_own(owner), mark=mark, session=self._session)


def _own(owner: Owner) -> Own:
    return Own(owner.job, owner.root, frozenset())


def _note(owner: Owner, epoch: CommittedEpoch, took_over: bool = False) -> SinkMetadata:
    attempt = epoch.mark.attempt if epoch.mark is not None else NO_ATTEMPT
    return SinkMetadata(
        f"{owner.job}/{owner.sink}", attempt, owner.run, root=owner.root, epoch=epoch, took_over=took_over
    )
