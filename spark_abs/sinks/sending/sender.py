"""One sink outside: a thread that sends it rows, after completed checkpoints or with each batch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_abs.channels.follow import follow
from spark_abs.channels.trim import left_after
from spark_abs.errors import (
    CommitConflict,
    CommitStateUnknown,
    Fenced,
    Refused,
    SinkFailed,
    SinkUnreachable,
)
from spark_abs.model import NO_EPOCH, Branch, ChannelId, CheckpointId, StageId, Version, channel_id
from spark_abs.protocol import outside
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.control import OutsideSink, attach_outside
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.run_context import RunContext
from spark_abs.sinks.sending.epoch_rows import EpochRows
from spark_abs.sinks.sending.tasks import SendTasks
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.control import Control

log = logging.getLogger(__name__)

AGAIN = (SinkUnreachable, CommitConflict, CommitStateUnknown, OSError)
"""Errors after which a sender tries again."""
WAIT_S = 0.1
"""The first wait before a new try."""
_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Sending:
    """A sink outside, as a job declares it."""

    name: str
    stage: StageId
    output: str
    schema: pa.Schema
    sink: TwoPhaseSink
    kind: str
    settings: str
    """The config of the sink as JSON; empty for a sink that a user has written."""

    @property
    def channel(self) -> ChannelId:
        return channel_id(self.stage, self.output)

    def record(self, first: Mark, begun: bool) -> OutsideSink:
        """Return what `control/` keeps of it."""
        return OutsideSink(
            self.name,
            self.stage,
            output=self.output,
            kind=self.kind,
            settings=self.settings,
            first=first,
            begun=begun,
        )


_at_work: dict[int, threading.Thread] = {}
"""The threads that use a sink, by its `id`: the thread of a run that has ended may still be committing."""


def require_free(sending: Sending, patience_s: float) -> None:
    """Wait at most `patience_s` until no earlier run uses the object of a sink.

    Raises:
        Refused: an earlier run still uses it.
    """
    thread = _at_work.get(id(sending.sink))
    if thread is None:
        return
    thread.join(patience_s)
    if thread.is_alive():
        raise Refused(
            f"sink {sending.name!r}: an earlier run in this process is still committing through the same "
            "object: start again when it has, or declare the sink with an object of its own"
        )


class Sender:
    """Sends the rows of one sink in its own thread. Thread-safe, except for `begin` and `recover`."""

    def __init__(
        self,
        ctx: RunContext,
        sending: Sending,
        *,
        record: OutsideSink,
        path: Sequence[Branch],
        cuts: Iterable[Mark],
        savepoints: Mapping[CheckpointId, str],
        owner: Owner,
        missed: Sequence[CheckpointId] = (),
        tasks: SendTasks | None = None,
    ) -> None:
        """Take the run.

        Args:
            ctx: the run.
            sending: what is sent where.
            record: what `control/` says of it.
            path: what counts in the channel.
            cuts: the cuts of checkpoints that are complete.
            savepoints: the names of those that are savepoints.
            owner: as whom.
            missed: checkpoints of a time when the job had the output and no sink or stage took it.
            tasks: where work on many rows is done; without them it is done in the sender's thread.
        """
        self._missed, self._tasks = missed, tasks
        self._ctx, self._sending, self._path = ctx, sending, path
        self._record, self._owner = record, owner
        self.floor = FIRST_ENTRY
        """The entry up to which no restore undoes rows, 0 if it is not known."""
        self.asked: tuple[Version, ...] = ()
        """The entries to which a restore may go back, see `Epoch`."""
        self._cuts, self._savepoints = list(cuts), dict(savepoints)
        self._committed: Mark | None = None
        self._known = self._rests = False
        """Whether this run has stored the mark; whether the mark was only read, with no rows to send."""
        self._gone = FIRST_ENTRY
        """The entry up to which the channel was trimmed, if no row up to there was to be sent."""
        self._wake = threading.Condition()
        self._closing = self._abandoned = False
        self._trouble = ""
        self._troubled_at = 0.0
        """When `_trouble` began, by `time.monotonic`."""
        self.troubled_s = 0.0
        """For how long every try had failed when the last try failed; a try under way does not count."""
        self._batches = follow(ctx.root, sending.channel, path) if sending.sink.each_batch else None
        self._looked, self._newest = self._batches is None, FIRST_ENTRY
        """Whether the log was read, and the newest known entry with rows: the log says which entries lie
        between the mark and that entry.
        """
        self._thread: threading.Thread | None = None

    @property
    def channel(self) -> ChannelId:
        return self._sending.channel

    @property
    def each_batch(self) -> bool:
        """Whether the sink gets each batch, rather than all rows up to a completed checkpoint."""
        return self._batches is not None

    @property
    def mark(self) -> Mark:
        """The mark up to which the rows are durable in the sink, or at which the sink begins."""
        return self._committed or self._record.first

    @property
    def waits(self) -> bool:
        """Whether rows wait that can be sent."""
        mark = self.mark
        if not self._looked or self._newest > mark.version:
            return True
        return bool(outside.next_epochs(mark, list(self._cuts), self._path))

    def begin(self) -> None:
        """Prepare to send: `recover`, or read the mark if there are no rows to send and no run to fence.

        After such a reading `recover` comes before the first row. Raises as `recover`.
        """
        since, sink = self._ctx.in_order_since, self._sending.sink
        alone = since is not None and since < self._ctx.run
        if alone and self._record.begun and not self.each_batch and sink.rests(self._owner):
            found = sink.mark(self._owner)
            self._take(found, found)
            self._rests = not self.waits
        if not self._rests:
            self.recover()

    def recover(self) -> None:
        """Fence older runs and read the mark; before the first row, and after every failure.

        Raises:
            Refused: the mark is missing, it lies after the checkpoint to which the job was restored, or rows
            after it were not kept.
            Fenced: a newer run has taken over.
            SinkUnreachable: try again.
        """
        self._ctx.failpoint(f"send.{self._sending.name}.recover.before")
        found = self._sending.sink.recover(self._owner)
        self._take(found, self._sending.sink.mark(self._owner))
        self._known = True

    def _take(self, found: Mark | None, newest: Mark | None) -> None:
        name = self._sending.name
        if found is None and self._record.begun:
            raise Refused(
                f"sink {name!r} has sent rows before, but its mark is missing: the mark was deleted, or the "
                "sink now names another server or table. Bring the mark back, or give the sink another name: "
                "it then starts at the newest checkpoint"
            )
        missed = [m for m in self._missed if found is not None and NO_EPOCH < found.checkpoint < m]
        if missed:
            raise Refused(
                f"sink {name!r} was not declared at checkpoint {missed[0]}, and the rows of its output were "
                "not kept for it. Give it another name: it then starts at the newest checkpoint"
            )
        if newest is not None and not outside.is_on(self._path, newest):
            raise Refused(
                f"sink {name!r} has committed up to checkpoint {newest.checkpoint}, and the job was restored "
                "to an earlier one: restore again; the plan says what happens to the later rows"
            )
        self._require_kept(found or self._record.first)
        self._committed = found

    def _require_kept(self, mark: Mark) -> None:
        """Refuse a mark if rows after it still count on the path, and the channel was trimmed beyond them."""
        left = left_after(self._ctx.root, self.channel, mark.version)
        if left is None:
            return
        if outside.may_miss(self._path, mark, left.attempt):
            raise Refused(
                f"sink {self._sending.name!r} has sent rows up to checkpoint {mark.checkpoint}, and the rows "
                "after it were not kept: the sink was not declared for some time, or its mark was set back. "
                "Give it another name: it then starts at the newest checkpoint"
            )
        self._gone = Version(left.version - 1)

    def start(self, on_failure: Callable[[Exception], None]) -> None:
        """Start to send; `on_failure` is called once, from the thread, if it cannot continue."""
        name = f"spark-abs-send-{self._sending.name}"
        self._thread = threading.Thread(target=self._run, args=(on_failure,), name=name, daemon=True)
        _at_work[id(self._sending.sink)] = self._thread
        self._thread.start()

    def completed(self, cut: Mark, savepoint: str | None) -> None:
        """Take note of a completed checkpoint, and of its name if it is a savepoint."""
        with self._wake:
            if savepoint is not None:
                self._savepoints[cut.checkpoint] = savepoint
            self._cuts.append(cut)
            self._wake.notify_all()

    def wrote(self, version: Version) -> None:
        """Take note of an entry with rows in the channel; the same entry may be told twice."""
        if self._batches is None:
            return
        with self._wake:
            self._newest = max(self._newest, version)
            self._wake.notify_all()

    def close(self, patience_s: float) -> str:
        """Send the rows that can be sent, at most for so long; return a sentence if rows are left."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is None:
            self._sending.sink.close()
        else:
            self._thread.join(patience_s)
        with self._wake:
            self._abandoned = True
            self._wake.notify_all()
        if self._tasks is not None:
            self._tasks.cancel()
        if not self.waits:
            return ""
        return f"sink {self._sending.name!r} has sent up to checkpoint {self.mark.checkpoint}{self._trouble}"

    def _run(self, on_failure: Callable[[Exception], None]) -> None:
        wait_s = WAIT_S
        try:
            while True:
                try:
                    self._send()
                    wait_s = WAIT_S
                    self._say("")
                except AGAIN as error:
                    self._known = False
                    self._say(f"; {error}")
                with self._wake:
                    if self._abandoned or (self._closing and not self.waits):
                        break
                    if not (self._known or self._rests):
                        if self._wake.wait_for(lambda: self._abandoned, wait_s):
                            break  # what the last try failed with is why rows are left
                        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                    else:
                        self._wake.wait_for(lambda: self._closing or self.waits)
        except Exception as error:  # noqa: BLE001 - the thread's edge: the run ends with it
            on_failure(error)
        finally:
            self._sending.sink.close()
            _at_work.pop(id(self._sending.sink), None)

    def _say(self, trouble: str) -> None:
        if trouble and not self._trouble:
            log.warning("sink %s waits%s; it is tried again", self._sending.name, trouble)
            self._troubled_at = time.monotonic()
        if self._trouble and not trouble:
            log.info("sink %s sends again", self._sending.name)
        self.troubled_s = time.monotonic() - self._troubled_at if trouble else 0.0
        self._trouble = trouble

    def _send(self) -> None:
        """Send epochs that are complete, one by one; read the mark first if it is not known."""
        if self._rests and not self.waits:
            return
        self._rests = False
        if not self._known:
            self.recover()
        if self._committed is not None:
            self._note_begun()
        for after, until in self._next():
            if self._abandoned:
                return
            self._send_one(after, until)

    def _next(self) -> Sequence[tuple[Mark, Mark]]:
        """Return the epochs to send now; of a sink that gets each batch, those of the entries in the log."""
        mark = self.mark
        if self._batches is None:
            return outside.next_epochs(mark, list(self._cuts), self._path)
        entries = [entry for entry in self._batches.after(max(mark.version, self._gone)) if entry.files]
        self._batches.forget(mark.version)
        with self._wake:  # what was told meanwhile is newer, and wakes the thread once more
            self._newest, self._looked = max([self._newest, *(e.version for e in entries)]), True
        return outside.next_batches(
            mark, [(e.attempt, e.version) for e in entries], list(self._cuts), self._path
        )

    def _send_one(self, after: Mark, until: Mark) -> None:
        ctx, name = self._ctx, self._sending.name
        rows = EpochRows(
            ctx.root,
            self.channel,
            path=self._path,
            after=max(after.version, self._gone),
            until=until.version,
            schema=self._sending.schema,
            read=lambda: ctx.failpoint(f"send.{name}.rows.after"),
            tasks=self._tasks,
        )
        whole = until in list(self._cuts)  # a batch after the cut of a savepoint names it, too
        savepoint = self._savepoints.get(until.checkpoint) if whole else None
        first = self._committed is None
        epoch = Epoch(
            self._owner,
            after,
            mark=until,
            floor=self.floor,
            first=first,
            savepoint=savepoint,
            asked=self.asked,
        )
        ctx.failpoint(f"send.{name}.commit.before")
        try:
            self._sending.sink.commit(epoch, rows)
        except (*AGAIN, Fenced):
            raise
        except Exception as error:
            which = f"of checkpoint {until.checkpoint}"
            if self._batches is not None:
                which = f"after checkpoint {after.checkpoint}, of entry {until.version} of {self.channel}"
            raise SinkFailed(f"sink {name!r} did not take {rows.count:,} rows {which}: {error}") from error
        ctx.failpoint(f"send.{name}.commit.after")
        self._committed = until
        with self._wake:  # a checkpoint may complete meanwhile
            self._cuts = [cut for cut in self._cuts if cut.version > until.version]
        log.debug("sink %s has checkpoint %s: %s rows", name, until.checkpoint, rows.count)
        self._note_begun()

    def _note_begun(self) -> None:
        """Record, once, that the sink has a mark: later starts are refused if the mark is missing."""
        ctx = self._ctx
        if not self._record.begun:
            record = replace(self._record, begun=True)
            Control.open(ctx.root).update(lambda state: attach_outside(state, ctx.run, [record]))
            self._record = record
