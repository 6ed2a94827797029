"""A stage of the simulated job as it runs: batches in numbered steps, and the agent of a stage without input.

Between two steps it may be killed, frozen or overtaken. What a step has done is on storage, what the next one
needs is a frozen value, to be copied. It is long because it is one machine, with a method for each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spark_abs.alignment import align, marker
from spark_abs.alignment.loops import forward
from spark_abs.errors import CommitConflict
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    Barrier,
    BatchId,
    Branch,
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Entry,
    Position,
    Version,
    barrier_app_id,
)
from tests.invariants import BlockedInput, none_blocked, require
from tests.simulator.cluster import Stage, State, apply, carried
from tests.simulator.cluster import record as native_record
from tests.simulator.flow import check_bound, is_held_back, may_begin
from tests.simulator.memory import Batch, Ending, Taking
from tests.simulator.running import Run, is_it
from tests.simulator.table import JOB, Planned, Row, Table


class Process:
    """One stage within one run."""

    def __init__(self, run: Run, stage: Stage) -> None:
        self.run = run
        self.stage = stage
        self.storage = run.storage
        self.native = run.storage.native[run.attempt, stage.id]
        self.channels = run.storage.written(stage)
        self.at: Batch | BatchId | Ending | None = None
        """What it has in memory of the batch under way; only its number once it is planned."""
        self.taking: Taking | None = None
        """What its agent has in memory."""
        self.held = False
        """Whether it is a paused source whose planned batch waits: barriers go ahead of it."""

    @property
    def is_ending(self) -> bool:
        """Whether its query has stopped gracefully: it writes its end markers, or has."""
        return self.stage.id in self.run.ended or isinstance(self.at, Ending)

    def copy(self, run: Run) -> Process:
        """Return the same process as part of a copied run."""
        twin = Process(run, self.stage)
        twin.at, twin.taking, twin.held = self.at, self.taking, self.held
        return twin

    def app(self, output: str) -> str:
        """Name the application id of an output."""
        return self.storage.app(self.stage, output, self.run.attempt)

    def path(self, table: Table) -> tuple[Branch, ...]:
        """Return what counts in a channel."""
        return self.run.paths[ChannelId(table.name)]

    # -- batches

    def step(self) -> None:
        """Go on with the batch under way, or begin one; write the end markers when all inputs have ended.

        A frozen driver may still plan a batch after that, so the process looks on, and plans none itself.
        """
        match self.at:
            case None:
                self.at = self._begin()
            case Batch():
                self.at = self._write(self.at)
            case Ending():
                self.at = self._end(self.at)
            case _:
                self.at = self._evaluated(self.at)

    def _begin(self) -> Batch | BatchId | Ending | None:
        """Run the batch that was planned, or plan one if anything moves."""
        batch = self.native.planned
        if batch != self.native.committed:
            return self._evaluated(batch)
        if self.stage.id in self.run.ended:
            return None
        planned = self.native.script.get(BatchId(batch + 1)) or self._plan()
        if planned is not None:
            self.native.plan(BatchId(batch + 1), planned)
            return BatchId(batch + 1)
        return self._end(Ending(0)) if self._exhausted() else None

    def _plan(self) -> Planned | None:
        """Let every gate decide; None if nothing moves."""
        now, run = self.native.newest, self.run
        settled, chance = run.settled(), run.chance
        if chance.happens("the gates know what was taken in place", 0.7):
            settled = replace(settled, taken=run.in_place.get(self.stage.id, NO_EPOCH))
        limits = align.Limits(1 + chance.pick("entries above 1", 4), 10 + chance.pick("bytes above 10", 80))
        positions = []
        back_is_full = is_held_back(self.storage, run.paths, now.positions, run.parts)
        for own in now.positions:
            if back_is_full and not own.feedback:
                positions.append(own)
                continue
            entries = self.storage.tables[own.channel].after(own.version, run.paths[own.channel])
            decision = run.parts.decide(
                own, now.positions, entries, settled=settled, limits=limits, run=run.id, attempt=run.attempt
            )
            if isinstance(decision, align.Blocked):
                wait = BlockedInput(self.stage.id, own.channel, decision.on)
                require(none_blocked([wait], dict.fromkeys(settled.aborted, False)))
            rests = isinstance(decision, align.Advance) and decision.bare and self.native.planned >= 0
            if rests and chance.happens("a gate leaves a barrier to the agent", 0.7):
                positions.append(own)
                continue
            positions.append(decision.position)
        native = min(self.stage.native, now.native + chance.pick("records", 3))
        planned = Planned(tuple(positions), native)
        if planned == now and not (
            self.native.planned >= 0 and chance.happens("a batch without input", 0.02)
        ):
            return None
        return planned

    def _exhausted(self) -> bool:
        now, run = self.native.newest, self.run
        inputs_ended = all(p.is_closed(run.id) for p in forward(now.positions))
        if now.native != self.stage.native or not inputs_ended:
            return False
        ended = run.parts.loop_ended
        return not self.stage.feedback or ended(self.storage, run.attempt, run.paths, self.stage, run.id)

    @property
    def waits(self) -> bool:
        """Whether the batch that is planned waits for credit."""
        return isinstance(self.at, int) and not may_begin(self, BatchId(self.at))

    def _evaluated(self, batch: BatchId) -> Batch | BatchId:
        if self._is_held(batch) or self.run.parts.lets_ahead(self, batch) or not may_begin(self, batch):
            return batch
        before, planned = self.native.before(batch), self.native.batch(batch)
        barrier, cancel = self._marker(batch, before, planned)
        state, rows = self._evaluate(batch, before, planned)
        files = self.native.states.setdefault(batch + 1, {})
        unique = f"{self.run.id}-{len(files)}"
        files[unique] = state
        return Batch(batch, unique, rows, barrier, cancel)

    def _is_held(self, batch: BatchId) -> bool:
        """Pause a source now and then: its planned batch waits, unless an output has a part of it.

        Never its first: a sink that gets barriers before rows records no input of these batches.
        """
        may_hold = self.run.parts.may_hold
        if may_hold is None or self.stage.inputs or batch == 0:
            return False
        paused = self.run.chance.happens("a source is paused", 0.7 if self.held else 0.05)
        self.held = paused and may_hold(self, batch)
        return self.held

    def lets_ahead(self, batch: BatchId) -> bool:
        """Take an unaligned barrier after the batch before, an output a step; say whether it did a step."""
        before = self.native.before(batch)
        if self._free(before) or self.run.parts.written(self, batch):
            return False
        if half := self._half_written():
            self._commit_marker(*half)
            return True
        if (barrier := self.takes(before)) is None:
            return False
        if self.channels and (first := self.channels[0][1]).marker(self.path(first)) < barrier.id:
            self._commit_marker(*self.channels[0], barrier, first.next)
            return True
        taken = self._cut_batch(barrier) if self.channels else BatchId(batch - 1)
        if taken is None:
            return False
        self.run.hand(barrier, self.stage, taken)
        return True

    def _write(self, batch: Batch) -> Batch | None:
        """Write the batch to the next output; after the last, hand the cut over; then finish the batch."""
        sink = len(self.channels)
        if batch.output < sink:
            return self._write_channel(batch)
        if batch.output == sink and self.stage.sink and batch.rows:
            name, table = self.stage.sink_name, self.storage.tables[self.stage.target]
            if not self._holds(name, table, batch.id):
                self._commit(name, table, batch.id, batch.rows, None, None)
            return replace(batch, output=sink + 1)
        if batch.output <= sink + 1:
            if batch.barrier and batch.barrier.id > self._taken:
                self.run.hand(batch.barrier, self.stage, batch.id)
            return replace(batch, output=sink + 2)
        self.native.commit(batch.id, batch.unique)
        return None

    def _write_channel(self, batch: Batch) -> Batch:
        output, table = self.channels[batch.output]
        barrier = batch.barrier
        if not self._holds(output, table, batch.id):
            if half := self._half_written():
                self._commit_marker(*half)
                return batch
            if batch.output == 0:
                planned = self.native.batch(batch.id)
                if barrier is None and batch.cancel is None and not self._free(planned):
                    barrier = self.takes(planned)
                if barrier and table.marker(self.path(table)) >= barrier.id:
                    barrier = None
            self._commit(output, table, batch.id, carried(output, batch.rows), barrier, batch.cancel)
            check_bound(self.storage, self.run.attempt, table, self.path(table), self.run.parts.capacity)
        return replace(batch, barrier=barrier, output=batch.output + 1)

    def _holds(self, output: str, table: Table, batch: BatchId) -> bool:
        """Say whether an output has the batch; first of all whether the run may still ask.

        A burnt id is above every batch: asked the other way round, a fenced writer would find its work done.
        """
        table.require_alive(self.app(output), self.run.id, self.storage.owner(self.stage, output))
        return self.run.parts.already(table, self.app(output), batch)

    def _commit(
        self,
        output: str,
        table: Table,
        batch: BatchId,
        rows: tuple[Row, ...],
        barrier: Barrier | None,
        cancel: CheckpointId | None,
    ) -> None:
        table.commit(
            at=table.next,
            attempt=self.run.attempt,
            run=self.run.id,
            transactions={self.app(output): batch},
            plans=self.native.plans(table.transactions.get(self.app(output), -1), batch),
            rows=rows,
            batch=batch,
            barrier=barrier,
            cancel=cancel,
        )

    def _evaluate(self, batch: BatchId, before: Planned, planned: Planned) -> tuple[State, tuple[Row, ...]]:
        news = [self._read(a, b) for a, b in zip(before.positions, planned.positions, strict=True)]
        if self.stage.native:
            news.append(tuple(native_record(self.stage.id, n) for n in range(before.native, planned.native)))
        old = self.native.state(BatchId(batch - 1)) if batch else ((),) * len(news)
        return apply(self.stage, old, tuple(news))

    def _read(self, before: Position, upto: Position) -> tuple[Row, ...]:
        if before.version == upto.version:
            return ()
        table = self.storage.tables[before.channel]
        found: list[Row] = []
        for entry in table.after(before.version, self.run.paths[before.channel]):
            if entry.version > upto.version:
                break
            found += table.rows_of(entry)
        return tuple(found)

    def _marker(
        self, batch: BatchId, before: Planned, planned: Planned
    ) -> tuple[Barrier | None, CheckpointId | None]:
        """Find the barrier or cancel marker of a batch; an output that holds the batch decides."""
        if held := self.run.parts.written(self, batch):
            return held.barrier, held.cancel
        written = max((t.marker(self.path(t)) for _, t in self.channels), default=CheckpointId(0))
        match self.run.parts.emission(before.positions, planned.positions, self.run.id):
            case marker.Cut(checkpoint) if checkpoint > written:
                if self.run.dropped(checkpoint):
                    return None, checkpoint
                return self.run.claimed(checkpoint), None
            case marker.Cancelled(checkpoint) if checkpoint > written:
                return None, checkpoint
        if self.channels and not self._free(planned):
            return None, None
        barrier = self.takes(planned)
        return (barrier if barrier is not None and barrier.id > written else None), None

    def written(self, batch: BatchId) -> Entry | None:
        """Return what an output holds of a batch that is run again."""
        for output, table in self.channels:
            if self._holds(output, table, batch):
                return next(e for e in table.newest_first(self.path(table)) if e.batch == batch)
        return None

    def _end(self, ending: Ending) -> Ending | None:
        if ending.output == len(self.channels):
            self.run.ended.add(self.stage.id)
            return None
        output, table = self.channels[ending.output]
        app = f"{self.app(output)}/end"
        if table.transactions.get(app, 0) < self.run.id:
            table.require_alive(app, self.run.id)
            table.commit(
                at=table.next,
                attempt=self.run.attempt,
                run=self.run.id,
                transactions={app: self.run.id},
                end=True,
            )
        return Ending(ending.output + 1)

    # -- barriers without a batch

    @property
    def _taken(self) -> CheckpointId:
        """The newest id whose cut the stage has handed over since it started."""
        return max((c for c, stage in self.run.handed if stage == self.stage.id), default=NO_EPOCH)

    def _free(self, planned: Planned) -> bool:
        """Say whether the stage has no open channel input."""
        return all(p.is_closed(self.run.id) for p in forward(planned.positions))

    def takes(self, planned: Planned) -> Barrier | None:
        """Return the barrier that a stage is to take without its inputs having it."""
        waiting = [barrier for barrier in self.run.open if barrier.id > self._taken]
        if not self._free(planned):
            return self.run.parts.overtaking(waiting, planned.positions)
        passed = max((p.epoch for p in forward(planned.positions)), default=NO_EPOCH)
        back = [p for p in planned.positions if p.feedback]
        beyond = [b for b in waiting if b.id > passed or b.mode is CheckpointMode.AT_LEAST_ONCE]
        return next((b for b in beyond if marker.may_take(b.id, back)), None)

    def takes_in_place(self) -> Barrier | None:
        """Return the barrier at whose cut the stage is where it stands, after its first batch."""
        waiting = [barrier for barrier in self.run.open if barrier.id > self._taken]
        at = self.native.newest.positions
        if self.native.planned < 0 or self.stage.native or not waiting:
            return None
        fits = self.run.parts.is_at_cut(waiting[0], at, self._unread, self.run.id)
        return waiting[0] if fits else None

    def _unread(self, own: Position) -> Iterator[Entry]:
        return self.storage.tables[own.channel].after(own.version, self.run.paths[own.channel])

    def _left_over(self) -> Barrier | None:
        """Return the barrier that the stage has sent ahead, but whose cut was not handed over."""
        if not self.channels:
            return None
        left = (b for b in self.run.open if (b.id, self.stage.id) not in self.run.handed and self._wrote(b))
        return next((b for b in left if b.mode is CheckpointMode.UNALIGNED or self._wrote_alone(b)), None)

    def _wrote_alone(self, barrier: Barrier) -> bool:
        """Say whether a stage that reads channels has a barrier in its first output without a batch."""
        _, table = self.channels[0]
        return bool(self.stage.inputs) and any(
            is_it(entry, barrier) and entry.batch == NO_BATCH
            for entry in table.newest_first(self.path(table))
        )

    def look(self) -> None:
        """Let the agent take a barrier while no batch does: an entry of its own, or none once ended."""
        taking = self.taking
        if taking is None:
            if barrier := self._left_over() or self.takes(self.native.newest) or self.takes_in_place():
                self.taking = Taking(barrier, tuple(table.version for _, table in self.channels))
        elif taking.passing:
            self.taking = self._pass(taking)
        else:
            self.taking = self._take(taking)

    def _take(self, taking: Taking) -> Taking | None:
        batch = self.native.committed if self.held else self.native.planned
        now = self.native.newest
        takes = self.takes(now) or self.takes_in_place()
        fits = takes is not None and takes.id == taking.barrier.id
        void = batch != self.native.committed or (bool(self.stage.inputs) and not fits)
        if void and self._left_over() is None:
            return None
        if self.channels and not (self.stage.id in self.run.ended and not self._wrote(taking.barrier)):
            return self._pass(replace(taking, passing=True))
        self._hand(taking.barrier, batch)
        return None

    def _hand(self, barrier: Barrier, batch: BatchId) -> None:
        """Hand a cut without a batch over; then the stage's gates may learn of it."""
        self.run.hand(barrier, self.stage, batch)
        if barrier.mode is not CheckpointMode.UNALIGNED:
            self.run.in_place[self.stage.id] = barrier.id

    def _pass(self, taking: Taking) -> Taking | None:
        """Write the barrier to the next output that lacks it; if none does, hand the cut over."""
        barrier, seen = taking.barrier, list(taking.seen)
        for number, (output, table) in enumerate(self.channels):
            if table.marker(self.path(table)) < barrier.id:
                try:
                    self._commit_marker(output, table, barrier, Version(seen[number] + 1))
                except CommitConflict:
                    if number == 0:
                        return None
                    seen[number] = table.version
                return replace(taking, seen=tuple(seen))
        batch = self.native.committed if self.held else self._cut_batch(barrier)
        if batch is not None and self.native.committed >= batch:
            self._hand(barrier, batch)
        return None

    def passed(self, taking: Taking) -> bool:
        """Say whether every output has the barrier that the agent passes on."""
        return taking.passing and all(
            table.marker(self.path(table)) >= taking.barrier.id for _, table in self.channels
        )

    def _wrote(self, barrier: Barrier) -> bool:
        """Say whether the stage has passed a barrier on, perhaps before a crash."""
        _, table = self.channels[0]
        return any(is_it(entry, barrier) for entry in table.newest_first(self.path(table)))

    def _cut_batch(self, barrier: Barrier) -> BatchId | None:
        """Return the batch after which a barrier stands in the first output; None if it is not there.

        What stands before the barrier may have been trimmed, so the answer comes from what stands after it.
        """
        output, table = self.channels[0]
        newest = table.transactions.get(self.app(output), self.native.committed)
        for entry in table.newest_first(self.path(table)):
            if is_it(entry, barrier):
                return entry.batch if entry.batch != NO_BATCH else BatchId(newest)
            if entry.batch != NO_BATCH:
                newest = entry.batch - 1
        return None

    def _half_written(self) -> tuple[str, Table, Barrier, Version] | None:
        """Return what is missing of a barrier that the agent has written to the first output only."""
        if len(self.channels) < 2:
            return None
        first = self.channels[0][1]
        newest = next((e for e in first.newest_first(self.path(first)) if e.barrier or e.cancel), None)
        if newest is None or newest.barrier is None or newest.batch != NO_BATCH:
            return None
        for output, table in self.channels[1:]:
            if table.marker(self.path(table)) < newest.barrier.id:
                return output, table, newest.barrier, table.next
        return None

    def _commit_marker(self, output: str, table: Table, barrier: Barrier, at: Version) -> None:
        app = barrier_app_id(JOB, self.stage.id, output, self.run.attempt)
        table.require_alive(app, self.run.id)
        run = self.run
        table.commit(at=at, attempt=run.attempt, run=run.id, transactions={app: barrier.id}, barrier=barrier)
