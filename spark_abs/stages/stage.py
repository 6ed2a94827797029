"""One stage at work: its batch function and its agent.

Everything is decided from Spark's offset log and the channel logs, so that a batch that is repeated
after a crash decides the same. In-process state only saves reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spark_abs.alignment.align import Settled, exceeds, waiting
from spark_abs.alignment.loops import forward
from spark_abs.alignment.marker import emission
from spark_abs.errors import AbortReason, StageStopped
from spark_abs.manifest import StageSnapshot
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    Barrier,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Entry,
    Position,
    StageId,
    Version,
    positions_of,
    producer,
)
from spark_abs.protocol.credit import at_once
from spark_abs.protocol.messages import Declined
from spark_abs.run_context import RunContext
from spark_abs.spark.query_progress import QueryProgress, is_planning, last_progress
from spark_abs.stages.activity import said
from spark_abs.stages.alignment_backlog import AlignmentWatch, CheckpointProgress
from spark_abs.stages.barriers import BarrierChoice, Barriers
from spark_abs.stages.batch import BatchFacts, Planned
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.stages.chain import Chain
from spark_abs.stages.credit import Credit
from spark_abs.stages.dormant import DormantStage
from spark_abs.stages.in_place import InPlace
from spark_abs.stages.native import NativeLog
from spark_abs.stages.new_rows import reads_rows
from spark_abs.stages.outputs import Outputs, fixed_rows
from spark_abs.stages.snapshotter import Snapshotter, Taken
from spark_abs.stages.table_cuts import TableCuts
from spark_abs.stages.unread import Unread
from spark_abs.store.activity import Phase, StageActivity
from spark_abs.store.clock import now_ms, steady_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a batch."""

    batch: BatchId
    error: Exception
    fixed: str = ""
    """Which outputs hold the batch, with the consequence, see `fixed_rows`."""


class StageRunner:
    """The batch function of one stage, and the agent that takes barriers while the stage is idle.

    `run_batch` is called by Spark from the query's thread; `offer`, `offer_idle`, `declined`,
    `checkpoint_progress`, `notify` and `succeed` from the coordinator's thread. Both commit to the outputs,
    and never at once: a batch has the lock from its admission to its end, and the agent does nothing while a
    batch has it.
    """

    def __init__(
        self,
        ctx: RunContext,
        name: StageId,
        *,
        outputs: Outputs,
        start: tuple[Position, ...],
        snapshots: Snapshotter,
        credit: Credit,
        wrote: Callable[[Mapping[ChannelId, Entry]], None] = lambda _: None,
        unread: Unread | None = None,
        in_place: InPlace | None = None,
        paused: Callable[[], bool] = lambda: False,
        chain: Chain | None = None,
    ) -> None:
        """Take the stage.

        Args:
            ctx: the run.
            name: the stage.
            outputs: its outputs.
            start: where it begins in each channel.
            snapshots: what copies its state.
            credit: its credit.
            wrote: called in the query's thread with each batch that its channels hold.
            unread: counts what is in the channels of the run.
            in_place: knows whether it can take an aligned barrier without a batch; None if it never does.
            paused: says whether it is a source that begins no batch now.
            chain: joins it to other wrapped queries; None in a job.
        """
        self.name = name
        self._wrote = wrote
        self._unread = unread
        self._in_place = in_place
        self._paused = paused
        self._held: BatchId | None = None
        """A planned batch of a paused source of which no output has anything."""
        self._first: BatchId | None = None
        """The first batch that Spark gave this runner: the run before may have begun it."""
        self._activity = outputs.activity
        self.find_query: Callable[[], Any | None] = lambda: None
        """Returns the JVM object of the running query, None if there is none."""
        self._reported: QueryProgress | None = None
        self._read: tuple[Position, ...] | None = None
        """Where the inputs stand, None before the first batch of this run."""
        self._began_after: tuple[Position, ...] | None = None
        self._recorded = NO_BATCH
        """A batch whose end Spark has recorded."""
        self._moved: dict[ChannelId, int] = {}
        self._watermark: tuple[int | None, int | None] = None, None
        self.batch_lock = BatchLock()
        self.failure: Failure | None = None
        self._tables = TableCuts(ctx, name, chain, self.batch_lock)
        self._ctx = ctx
        self._outputs = outputs
        self.start = start
        self._snapshots = snapshots
        self.credit = credit
        self._reported_ms = 0
        self.native = NativeLog(ctx.native(name))
        self.barriers = Barriers()
        self.progress = outputs.progress
        self._choice = BarrierChoice(ctx, self.barriers, self.progress)
        self._cuts: dict[CheckpointId, BatchId] = {}
        """The batches of cuts whose checkpoint has no outcome yet."""
        self.only: BatchId | None = None
        """If set, every other batch is refused at its entry; `NO_BATCH` refuses all."""
        self._aligning_since: dict[CheckpointId, int] = {}
        self._alignment = AlignmentWatch(ctx.root, ctx.poll_ms(ctx.root.top))

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Run one micro-batch.

        1. Read what the batch consumes; wait while captures lag behind, and for credit unless it carries a
        barrier.  2. Read what outputs hold of it.  3. Decide what it carries; an unaligned barrier that may
        be taken before the batch goes out ahead of it.  4. Evaluate each output once and write the files of
        all.  5. Commit all outputs, barrier included; the first commit names the files.  6. Call the
        functions.  7. Hand the cut over.

        Killed before 5, it leaves files that no commit names. Killed within 5, the first output that holds
        the batch decides for the others: the repeat takes the files that it names. After 5, the repeat skips
        commits.
        """
        batch, failpoint, finished = BatchId(batch_id), self._ctx.failpoint, False
        self._first = batch if self._first is None else self._first
        self._activity.begin(batch)
        try:
            failpoint(f"batch.{self.name}.wait.before")  # 1
            planned, credited_ms = self._planned(batch), self.credit.waited_ms
            with self.batch_lock.batch(batch, partial(self._admit, planned)) as waited_ms:
                if self.only is not None and batch != self.only:
                    raise StageStopped(f"only batch {self.only} is run now")
                self._run(frame, planned, waited_ms - (self.credit.waited_ms - credited_ms))
            finished = True
        except StageStopped:
            if self.only is None or batch > self.only:
                self.batch_lock.park()
            raise
        except Exception as error:
            self.failure = Failure(batch, error, fixed_rows(self._ctx, self._outputs, batch))
            raise
        finally:
            self.credit.waits_for(())
            self._activity.end(finished)

    def _planned(self, batch: BatchId) -> Planned:
        text = self.native.offsets_text(batch)
        offsets = self.native.parsed(batch, text)
        offsets_before = self.native.offsets(BatchId(batch - 1)) if batch > 0 else None
        before = positions_of(offsets_before.lines) if offsets_before is not None else self.start
        after = positions_of(offsets.lines)
        return Planned(
            facts=BatchFacts(batch, text, offsets.watermark_ms),
            offsets=offsets,
            offsets_before=offsets_before,
            before=before,
            after=after,
            emission=emission(before, after, self._ctx.run),
        )

    def _admit(self, planned: Planned) -> bool:
        """Say whether a batch may begin now (P19), and count the time for which it waits for credit."""
        if not self._snapshots.permits(self.name, planned.facts.batch):
            self._activity.enter(Phase.WAITING, "the copies of earlier checkpoints")
            return False
        if self._is_held(planned.facts.batch):
            self._activity.enter(Phase.WAITING, "the end of its pause")
            return False
        offered = self._choice.offered(planned)
        exempt = self.only is not None or at_once(planned.emission, self.progress.every, offered)
        full = () if exempt else self.credit.full()
        self.credit.waits_for(full)
        what = f"credit on {', '.join(full)}" if full else self._tables.waiting
        self._activity.enter(Phase.WAITING, what)
        return not full

    def _is_held(self, batch: BatchId) -> bool:
        """Say whether a planned batch of a paused source waits; barriers are then taken ahead of it.

        A batch of which the outputs may have a part is finished: a cut before it would lack that part.
        """
        if self.only is not None or not self._paused():
            self._held = None
        elif self._held != batch:
            with self.batch_lock.agent() as mine:
                if not mine:
                    return True  # until it is known what the outputs have
                repeats = batch == self._first and self._outputs.calls_functions
                if not repeats and self._outputs.repeated(batch) is None:
                    self._held = batch
        return self._held == batch

    def _run(self, frame: DataFrame, planned: Planned, waited_ms: int) -> None:
        began, failpoint = now_ms(), self._ctx.failpoint
        facts, after = planned.facts, planned.after
        batch = facts.batch
        self._activity.enter(Phase.READING)
        self._note_positions(planned, began)
        failpoint(f"batch.{self.name}.read.before")  # 2
        repeated = self._outputs.repeated(batch)
        marker = None if repeated is None else repeated.marker
        failpoint(f"batch.{self.name}.find.before")  # 3
        if marker is None:
            self._take_ahead(batch, planned.before)
            marker = self._choice.of_inputs(planned)
        self._watch_alignment(after, began)
        failpoint(f"batch.{self.name}.files.before")  # 4
        with self._outputs.evaluated(frame, batch, repeated, idle=self._is_idle(planned)) as given:
            failpoint(f"batch.{self.name}.files.after")
            if marker is None:  # 5: what is open now, not what was open before the rows were there
                now = self._tables.fitting(self._choice.now(after), batch, planned.offsets)
                done = self._outputs.commit_free(given, facts, now)
            else:
                done = self._outputs.commit(given, facts, marker)
            written = {w.channel: done.entries[w.output] for w in self._outputs.channels}
            self.credit.wrote(written)
            self._wrote(written)
            self._outputs.commit_sinks(given, facts)
            self._outputs.call_functions(given, batch, max((p.epoch for p in after), default=NO_EPOCH))  # 6
        self._activity.enter(Phase.ENDING)
        self._read = after
        failpoint(f"batch.{self.name}.handover.before")
        if done.barrier is not None and done.barrier.id > max(self.progress.taken, self._ctx.floor):  # 7
            versions = {output: entry.version for output, entry in done.entries.items()}
            self._hand_over(
                done.barrier, batch, positions=after, channels=versions, began_ms=began, waited_ms=waited_ms
            )
        failpoint(f"batch.{self.name}.handover.after")

    def _is_idle(self, planned: Planned) -> bool:
        """Say whether a batch surely reads no rows; False where the outputs would do no less.

        A log is read only where that may be: of a stage that works row by row, for a batch with a barrier.
        """
        asked = self._outputs.replaces or (
            self._outputs.row_by_row and any(position.at_barrier for position in planned.after)
        )
        before = planned.offsets_before
        return asked and before is not None and not reads_rows(self._ctx.root, before, planned.offsets)

    def _note_positions(self, planned: Planned, now: int) -> None:
        """Remember for operators which inputs the batch reads from, and its watermark."""
        self._read = planned.before
        before = {position.channel: position.version for position in planned.before}
        for position in planned.after:
            channel, since = position.channel, before.get(position.channel, position.version)
            if self._unread is not None and self._unread.has_rows(channel, since, position.version):
                self._moved[channel] = now
        if planned.facts.watermark_ms != self._watermark[0]:
            self._watermark = planned.facts.watermark_ms, now

    def _take_ahead(self, batch: BatchId, before: tuple[Position, ...]) -> None:
        """Take unaligned barriers ahead of a batch that no output holds yet (P16)."""
        while self.reads_channels:
            barrier = self._choice.ahead(before)
            if barrier is None:
                return
            began, last = now_ms(), BatchId(batch - 1)
            self._ctx.failpoint(f"batch.{self.name}.overtake.before")
            cut = self._outputs.commit_barrier(barrier, lambda last=last: last)  # type: ignore[misc]
            if cut is not None:
                self._ctx.failpoint(f"batch.{self.name}.overtake.after")
                self._hand_over(
                    barrier, last, positions=before, channels=cut.channels, began_ms=began, waited_ms=0
                )

    def _watch_alignment(self, after: tuple[Position, ...], now: int) -> None:
        for position in forward(after):
            if position.at_barrier:
                self._aligning_since.setdefault(position.epoch, now)
        settled = Settled(
            self._ctx.floor, self.barriers.aborted, self.barriers.unaligned, taken=self.progress.taken
        )
        self._alignment.blocked(waiting(forward(after), settled, self._ctx.run))

    def declined(self, limit: int | None) -> tuple[Declined, ...]:
        """Watch the alignment. Decline checkpoints without a cut of the stage (P9) or over the limit (P6).

        Args:
            limit: how many bytes may queue up behind a barrier while inputs wait; None for no limit.
        """
        progress = self.progress
        missed = [b.id for b in self.barriers.above(progress.taken) if b.id <= progress.missed]
        return (
            *(self._declined_missed(n) for n in missed),
            *self._over_limit(limit),
            *self._tables.declined(),
        )

    def _declined_missed(self, checkpoint: CheckpointId) -> Declined:
        detail = "the stage passed the barrier on without a snapshot"
        return Declined(steady_ms(), checkpoint, self.name, AbortReason.DECLINED, detail)

    def _over_limit(self, limit: int | None) -> tuple[Declined, ...]:
        return tuple(
            Declined(
                steady_ms(),
                checkpoint,
                self.name,
                AbortReason.ALIGNMENT_LIMIT,
                f"{size} bytes have queued up behind its barrier, the limit is {limit}",
            )
            for checkpoint, size in self._alignment.look()
            if exceeds(size, limit) and checkpoint not in self.barriers.unaligned
        )

    def _hand_over(
        self,
        barrier: Barrier,
        batch: BatchId,
        *,
        positions: tuple[Position, ...],
        channels: Mapping[str, Version],
        began_ms: int,
        waited_ms: int,
    ) -> None:
        # It may fail; nothing may follow that could: a cut that is said to be handed over is not repeated.
        versions = self._outputs.versions(batch, channels)
        self.progress.handed_over(barrier.id)
        self._cuts[barrier.id] = batch
        reported_ms, self._reported_ms = self._reported_ms, self.credit.waited_ms
        self._tables.made(barrier, batch, versions)
        if barrier.id in self.barriers.aborted:  # before there was anything to release
            self._tables.release(barrier.id)
        first = self._aligning_since.pop(barrier.id, began_ms)
        self._aligning_since = {n: t for n, t in self._aligning_since.items() if n > barrier.id}
        self._snapshots.submit(
            Taken(
                self.name,
                barrier,
                batch,
                positions,
                versions,
                start_delay_ms=max(0, first - barrier.timestamp_ms),
                alignment_ms=began_ms - first,
                sync_ms=waited_ms,
                aligned_ms=began_ms,
                backlog=self._alignment.over(barrier.id),
                backpressured_ms=self._reported_ms - reported_ms,
                lookups=self._outputs.lookup_versions,
            )
        )

    def offer(self, barrier: Barrier) -> None:
        """Tell the stage of a claimed barrier, or that it is unaligned from now on."""
        self._tables.opened(barrier.id)
        self.barriers.offer(barrier)

    def offer_idle(self) -> None:
        """Take an open barrier if no batch is under way: see `BarrierChoice.now` (P1, P16) and `InPlace`.

        If a batch came first, the barrier is void here: that batch carries it.
        """
        offered = self._choice.waiting()
        unaligned = any(b.mode is CheckpointMode.UNALIGNED for b in offered)
        waits = self.reads_channels and not self._ctx.bounded and self._in_place is None
        if not offered or (waits and not unaligned):
            return
        with self.batch_lock.agent() as mine:
            batch = self._last_batch_if_idle() if mine else None
            if batch is None:
                return
            positions = self.native.positions(batch) if batch != NO_BATCH else self.start
            offsets = self.native.offsets(batch) if self._tables.joined and batch != NO_BATCH else None
            barrier = self._tables.fitting(self._choice.now(positions), batch, offsets)
            in_place = self._in_place if barrier is None and batch != NO_BATCH else None
            if in_place is not None and in_place.is_at_cut(offered[0], positions):
                barrier = offered[0]
            if barrier is None:
                return
            began = now_ms()
            self._ctx.failpoint(f"agent.{self.name}.commit.before")
            cut = self._outputs.commit_barrier(
                barrier, lambda: batch if self._last_batch_if_idle() == batch else None
            )
            if cut is None:
                return
            self._ctx.failpoint(f"agent.{self.name}.commit.after")
            self._hand_over(
                barrier, batch, positions=positions, channels=cut.channels, began_ms=began, waited_ms=0
            )
            if in_place is not None:
                in_place.note.write(barrier.id)

    def stands_at(self, cut: StageSnapshot) -> bool:
        """Say whether the stage has done nothing since a cut, nor anybody to the tables of its functions.

        It may say no of a stage that is just about to begin a batch, or to stop.
        """
        with self.batch_lock.agent() as mine:
            return mine and self.native.stands_at(cut.cut_batch) and self._outputs.stand_at(cut)

    def _last_batch_if_idle(self) -> BatchId | None:
        # Once the query has stopped, what it has planned and not begun is the next run's.
        if self.batch_lock.ended or self._held is not None:
            return self.native.newest_committed()
        return self.native.idle_at()

    @property
    def reads_channels(self) -> bool:
        return bool(self.start)

    def inputs_closed(self, batch: BatchId) -> bool:
        """Say whether all channel inputs, feedback edges left out, had ended after a batch (P10)."""
        return batch != NO_BATCH and all(
            p.is_closed(self._ctx.run) for p in forward(self.native.positions(batch))
        )

    @property
    def heads_loop(self) -> bool:
        """Whether the stage has a feedback edge among its inputs."""
        return any(p.feedback for p in self.start)

    def consumed(self) -> tuple[Position, ...]:
        """Return where the inputs stand after the last finished batch."""
        return self.native.consumed() or self.start

    def has_taken(self, checkpoint: CheckpointId) -> bool:
        """Say whether the stage has made its cut of a checkpoint."""
        return self.progress.taken >= checkpoint

    @property
    def producers(self) -> frozenset[StageId]:
        """The stages from which it reads, those over a feedback edge left out."""
        return frozenset(producer(position.channel) for position in forward(self.start))

    def activity(self) -> StageActivity:
        """Return what the stage does now. Any thread; it may read the native checkpoint and ask Spark."""
        doing, done, query = self._activity.now, self._activity.done, self.find_query()
        since: int | None
        if query is not None and (self._reported is None or self._reported.batch < done.batch):
            self._reported = last_progress(query) or self._reported
        if doing is not None:
            phase, what, since = doing.phase, doing.what, doing.since_ms
        elif not self._is_recorded(done.batch):
            phase, what, since = Phase.ENDING, "", done.ended_ms
        else:
            plans = None if query is None else is_planning(query)
            phase, what = (Phase.IDLE, "") if plans is None else (Phase.PLANNING, plans)
            since = done.ended_ms
        reported = self._reported
        return StageActivity(
            self.name,
            phase,
            what,
            since,
            batch=done.batch if doing is None else doing.batch,
            began_ms=done.began_ms if doing is None else doing.began_ms,
            ended_ms=done.ended_ms,
            last_ms=done.last_ms,
            last_waited_ms=done.waited_ms,
            waited_ms=0 if doing is None else doing.waited_ms,
            slowest_ms=done.slowest_ms,
            longest=done.longest,
            rows=None if reported is None else reported.rows,
            rows_per_s=None if reported is None else reported.rows_per_s,
            watermark_ms=self._watermark[0] or 0,
            watermark_since_ms=self._watermark[1],
            has_watermark=reported is not None and reported.has_watermark,
            state_rows=None if reported is None else reported.state_rows,
            state_memory=None if reported is None else reported.state_memory,
            inputs=()
            if self._unread is None
            else tuple(self._unread.after(p, self._moved.get(p.channel)) for p in self._stands_at()),
        )

    def _is_recorded(self, batch: BatchId) -> bool:
        """Say whether Spark has recorded the end of the newest finished batch."""
        if batch > self._recorded and self.native.has_committed(batch):
            self._recorded = batch
        return batch <= self._recorded

    def _stands_at(self) -> tuple[Position, ...]:
        """Return how far the inputs are read; before the first batch of this run, how far they were."""
        if self._read is None and self._began_after is None:
            self._began_after = self.consumed()
        return self._read or self._began_after or self.start

    def checkpoint_progress(self, barrier: Barrier) -> CheckpointProgress:
        """Return how far the stage is with a checkpoint, from its newest planned batch."""
        since, size = self._aligning_since.get(barrier.id), self._alignment.size(barrier.id)
        waited_ms = self.credit.waited_ms - self._reported_ms
        if self.has_taken(barrier.id):
            return CheckpointProgress(since, "its state is being copied", backpressured_ms=waited_ms)
        batch = self.native.newest_planned()
        positions = self.start if batch == NO_BATCH else self.native.positions(batch)
        late = sorted(
            {p.channel for p in forward(positions) if p.epoch < barrier.id and not p.is_closed(self._ctx.run)}
        )
        what = f"the barrier has not come out of {', '.join(late)}"
        if not late:
            what = f"the batch that takes the barrier, after {batch}, has not ended"
            what = self._tables.unread(barrier.id) or what
        if self.credit.waiting:
            what += f"; it waits for credit on {', '.join(self.credit.waiting)}"
        doing = self._activity.now
        work = "" if doing is None else said(doing, now_ms())
        alignment_bytes = size if late else 0
        return CheckpointProgress(since, what, alignment_bytes, waited_ms, work=work, behind=tuple(late))

    def notify(self, checkpoint: CheckpointId, completed: bool) -> None:
        """Take the outcome of a checkpoint (P15)."""
        self.barriers.settle(checkpoint, completed)
        self._alignment.over(checkpoint)
        batch = self._cuts.pop(checkpoint, None)
        if completed and batch is not None:
            self.progress.completed(batch)
        if not completed:
            self._tables.release(checkpoint)
        self._tables.settled(checkpoint)
        self.batch_lock.wake()

    def succeed(self, before: Member) -> None:
        """Take over the memory of the runner that this one replaces; called before the first batch.

        Cuts that the old runner handed over are not handed over again: their copies wait for the batch, which
        is repeated. If a barrier was committed without its batch and the cut was not handed over, the stage
        misses that checkpoint.
        """
        self.progress.handed_over(before.progress.taken)
        if self.progress.alone > self.progress.taken:
            self.progress.went_past(self.progress.alone)
        self.barriers.aborted |= before.barriers.aborted
        self.batch_lock.succeed(before.batch_lock)
        if isinstance(before, StageRunner):
            self._cuts, self._aligning_since = dict(before._cuts), dict(before._aligning_since)
        self._tables.succeed(before._tables if isinstance(before, StageRunner) else before)

    def end(self) -> None:
        """Write end markers; the query has stopped."""
        with self.batch_lock.ending():
            self._outputs.end()


Member = StageRunner | DormantStage
"""Participants in checkpoints."""
