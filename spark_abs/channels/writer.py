"""The writing end of a channel: one object for one output, used by one thread at a time.

Every commit is decided by what was just read, and takes exactly the next version: a fence, a repeat and
the agent's race against a batch are all seen before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_abs.channels.channel_log import ChannelLog
from spark_abs.channels.entries import EntryMetadata, encode_note, entry_from
from spark_abs.channels.files import Written, directory_name, write_parquet
from spark_abs.channels.staged import Files, copy_files
from spark_abs.errors import CommitConflict, DamageError
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    AttemptId,
    Barrier,
    BatchId,
    ChannelId,
    CheckpointId,
    Entry,
    LookupVersion,
    RunId,
    StageId,
    Version,
    app_id,
    barrier_app_id,
    channel_id,
    run_app_id,
)
from spark_abs.protocol.evaluation import Staged
from spark_abs.store.fence import end_app_id, fence_run, is_fenced_for, require_current
from spark_abs.store.root import Root
from spark_abs.store.table import LOG_PROPERTIES, Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_PROPERTIES = {**LOG_PROPERTIES, "delta.deletedFileRetentionDuration": "interval 1 hours"}
"""Only our clean-up deletes a channel's files: old tombstones would weigh on every checkpoint of the log."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The entry that stands in the log after a commit was asked for."""

    entry: Entry
    fresh: bool
    """False if it was there before: then it decides, and the given entry was not committed."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest entries of an attempt in one output, as of `version`."""

    version: Version
    batch: BatchId
    """The last batch, `NO_BATCH` if none."""
    epoch: CheckpointId
    """The newest barrier or cancelled id, `NO_EPOCH` if none."""
    marker: Entry | None
    """The entry that holds it."""


def create_channel(root: Root, channel: ChannelId, schema: StructType) -> str:
    """Create the table of a channel if there is none, and return its table id. Two creators end with one.

    A channel that is there gets the new columns, and keeps the removed ones for the rows in it.

    Raises:
        UsageError: a column has a type that channels cannot carry, or the table has one of another type;
            names every field that differs.
    """
    from spark_abs.channels.schema import delta_schema  # a restore, which has no schemas, needs no Spark

    place = root.place(root.channel(channel))
    table = Table.ensure(place, delta_schema(schema), _PROPERTIES)
    _check(channel, table, schema)
    known = {field.name for field in table.delta.schema().fields}
    new = [field for field in delta_schema(schema) if field.name not in known]
    if new:
        table.add_columns(pa.schema(new))
    return table.id


def check_channel(root: Root, channel: ChannelId, schema: StructType) -> None:
    """Check that a channel, if it is there, can take rows of a schema: columns may be new, or gone.

    Raises:
        UsageError: as `create_channel`.
    """
    with suppress(FileNotFoundError):
        _check(channel, Table.open(root.place(root.channel(channel))), schema)


def _check(channel: ChannelId, table: Table, schema: StructType) -> None:
    from spark_abs.channels.schema import check_schema

    known = {field.name.casefold() for field in table.delta.schema().fields}
    have = type(schema)([field for field in schema.fields if field.name.casefold() in known])
    check_schema(f"channel {channel}", table.delta.schema().to_json(), have, may_lack=True)


class ChannelWriter:
    """Writes the entries of one output under one attempt and run. Not thread-safe.

    Batches and the agent of an idle stage share it; `BatchLock` keeps them apart. All versions handed out and
    taken are the channel's entry numbers.
    """

    def __init__(
        self,
        root: Root,
        job: str,
        *,
        stage: StageId,
        output: str,
        attempt: AttemptId,
        run: RunId,
        in_order_since: RunId | None = None,
    ) -> None:
        """Open the channel of `output`, which `create_channel` has made.

        Args:
            root: the job's root.
            job: its name.
            stage: the stage.
            output: of the stage.
            attempt: as which attempt it commits.
            run: as which run.
            in_order_since: see `is_fenced_for`.

        Raises:
            FileNotFoundError: there is no such channel.
        """
        self.channel = channel_id(stage, output)
        self.output = output
        self._attempt, self._run, self._job = attempt, run, job
        self._in_order_since = in_order_since
        self._app = app_id(job, stage, output, attempt)
        self._barrier_app = barrier_app_id(job, stage, output, attempt)
        self._end_app = end_app_id(job, stage, output, attempt)
        self._table = Table.open(root.place(root.channel(self.channel)))
        self.log = ChannelLog(self._table, self._app, attempt)
        """What the channel holds of this attempt, as of the version last refreshed."""

    @property
    def table_id(self) -> str:
        return self._table.id

    def begin(self) -> None:
        """Fence the channel against older runs; to be called once, before the stage starts. Repeatable.

        If all runs that the newest fence lets in have ended in order, the first commit carries the fence.

        Raises:
            Fenced: a newer run or attempt has taken over.
        """
        self._table.refresh()
        require_current(self._table, self._job, self._run, self._app)
        if not is_fenced_for(self._table, run_app_id(self._job), self._run, self._in_order_since):
            fence_run(self._table, self._job, self._run, self._app)

    def refresh(self) -> Version:
        """Read newer commits and return the newest version: the `at` of decisions that rest on it."""
        self._table.refresh()
        return self._table.version

    def write_files(self, frame: DataFrame, batch: BatchId) -> Written:
        """Evaluate the frame once and write its rows as files that nobody sees before `commit_batch`."""
        relative = f"data/{directory_name(self._attempt, self._run, batch)}"
        return write_parquet(frame, self._table.place, relative)

    def copy_files(self, files: Files, batch: BatchId) -> Files:
        """Copy files of rows into the channel, as `write_files` would write them."""
        relative = f"data/{directory_name(self._attempt, self._run, batch)}"
        return copy_files(files, self._table.place, relative)

    def commit_batch(
        self,
        written: Written,
        batch: BatchId,
        *,
        barrier: Barrier | None = None,
        cancel: CheckpointId | None = None,
        watermark_ms: int | None = None,
        offsets: str | None = None,
        evaluated: tuple[Staged, ...] = (),
        lookups: tuple[LookupVersion, ...] = (),
        at: Version | None = None,
    ) -> Standing:
        """Commit the entry of a batch, rows or not.

        1. Refresh. 2. Fences. 3. If the batch is in the log already, return the entry that stands: its
        barrier, or its absence, decides for all outputs. 4. Commit at exactly the version after `at`;
        without `at`, at whatever version comes next.

        Killed before 4, the files are garbage; killed after it, the repeat ends at 3.

        Args:
            written: What `write_files` returned.
            batch: The producer's batch.
            barrier: Stands after the rows.
            cancel: The aborted id that the stage passes here (P9).
            watermark_ms: The producer's watermark.
            offsets: The text of the producer's `offsets/<batch>`.
            evaluated: The files of all outputs of the batch, if this is the first of them to be committed.
            lookups: The versions of its lookups, likewise.
            at: The version on which the decision for this entry rests, from `refresh`. For the first
                output of a stage: an entry that the agent has put in between must be seen first.

        Raises:
            CommitConflict: the log has moved on from `at`; see `ChannelLog.after`, then decide again.
            Fenced: a newer run or attempt has taken over.
            CommitStateUnknown: the store did not say; repeat the call.
        """
        note = EntryMetadata(
            self._attempt,
            self._run,
            batch,
            barrier,
            cancel,
            watermark=watermark_ms,
            offsets=offsets,
            evaluated=evaluated,
            lookups=lookups,
            uncompressed=written.uncompressed or None,
        )
        return self._commit(
            written, note, at=at, app=self._app, number=int(batch), is_it=lambda e: e.batch == batch
        )

    def commit_barrier(self, barrier: Barrier, at: Version | None = None) -> Standing:
        """Commit an entry that holds only a barrier: of an idle source, or to complete a half-written one.

        If this output has an entry of only that barrier already, it is returned.

        Args:
            barrier: The barrier.
            at: As in `commit_batch`; an agent's barrier is void if a batch came first.

        Raises:
            CommitConflict: the log has moved on from `at`.
            Fenced: a newer run or attempt has taken over.
            CommitStateUnknown: the store did not say; repeat the call.
        """
        note = EntryMetadata(self._attempt, self._run, barrier=barrier)
        return self._commit(
            Written(),
            note,
            at=at,
            app=self._barrier_app,
            number=int(barrier.id),
            is_it=lambda e: e.batch == NO_BATCH and e.barrier is not None and e.barrier.id == barrier.id,
        )

    def commit_end(self) -> Standing:
        """Commit the marker after which this run writes nothing more (P10). Repeatable.

        Raises:
            Fenced: a newer run or attempt has taken over.
        """
        note = EntryMetadata(self._attempt, self._run, end=True)
        run = self._run
        return self._commit(
            Written(),
            note,
            at=None,
            app=self._end_app,
            number=int(run),
            is_it=lambda e: e.end and e.run == run,
        )

    def said_at(self, version: Version) -> str:
        """Name the channel and a version of it for a person."""
        return f"channel {self.channel!r} (version {version})"

    def newest(self) -> Newest:
        """Refresh, and return the newest entries of this attempt; reads the log back to the last marker."""
        self._table.refresh()
        marker = self.log.find(lambda entry: entry.barrier is not None or entry.cancel is not None)
        return Newest(
            self._table.version,
            self.log.last_batch(),
            NO_EPOCH if marker is None else epoch_of(marker),
            marker,
        )

    def _commit(
        self,
        written: Written,
        note: EntryMetadata,
        *,
        at: Version | None,
        app: str,
        number: int,
        is_it: Callable[[Entry], bool],
    ) -> Standing:
        ids = {app: number, run_app_id(self._job): int(self._run)}
        commit = Commit(written.files, ids, encode_note(note))
        while True:
            self._table.refresh()
            require_current(self._table, self._job, self._run, self._app)
            last = self._table.transaction(app)
            if last is not None and last >= number:
                entry = self.log.find(is_it)
                if entry is None:
                    raise DamageError(
                        f"the log of {self._table.uri} lacks the commit of {app} {number}, though a later "
                        f"one, {last}, is recorded: restore a checkpoint"
                    )
                return Standing(entry, fresh=False)
            if at is not None and self._table.version != at:
                raise CommitConflict(
                    f"{self.channel} is at version {self._table.version}, and the decision was made at {at}"
                )
            try:
                version = self._table.commit_next(commit)
            except CommitConflict:
                if at is not None:
                    raise
                continue
            return Standing(entry_from(version, note, written.entry_files), fresh=True)


def epoch_of(entry: Entry) -> CheckpointId:
    """Return the id of an entry's marker, `NO_EPOCH` if it holds none."""
    barrier = entry.barrier.id if entry.barrier is not None else NO_EPOCH
    return max(barrier, entry.cancel if entry.cancel is not None else NO_EPOCH)
