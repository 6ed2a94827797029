"""The volatile half of the simulated cluster: a driver with its processes, and a restore.

A driver may be dropped at any step (killed), or kept and stepped on after another took over (frozen).
It is long because a crash may come between any two effects: each effect has a method of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from spark_abs.alignment import align
from spark_abs.errors import AbortReason, Fenced
from spark_abs.manifest import Location, StageSnapshot, StoredFile
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    Barrier,
    BatchId,
    CheckpointId,
    CheckpointKind,
    RunId,
    StageId,
)
from spark_abs.protocol import control
from spark_abs.protocol.control import overtake, overtaken
from spark_abs.protocol.messages import (
    Abort,
    AckAnswer,
    Acked,
    Answer,
    Claim,
    Claimed,
    Complete,
    Decided,
    Declined,
    Discard,
    Effect,
    Event,
    Notify,
    Overtake,
    Requested,
    Skipped,
    StatusChanged,
    Tick,
)
from spark_abs.protocol.trigger import (
    Request,
    RunStatus,
    TriggerSettings,
)
from tests.simulator.chance import Chance
from tests.simulator.cluster import Checkpoint, Lost, Native, Stage, Storage, digest
from tests.simulator.memory import Captured, Deciding, detached
from tests.simulator.parts import Parts
from tests.simulator.process import Process
from tests.simulator.recovery import Clock, fence, settle
from tests.simulator.running import Capture, Run

_PACE = (1, 1, 1, 2, 5)
"""How many steps a process takes before another one is looked at."""


class Driver:
    """One run of the job: its stages, agents, snapshotter, coordinator, and the messages between them."""

    def __init__(
        self,
        storage: Storage,
        chance: Chance,
        parts: Parts,
        settings: TriggerSettings,
        clock: Clock,
        seen: Counter[str],
    ) -> None:
        self.storage = storage
        self.graph = storage.graph
        """The job as it is declared."""
        self.chance = chance
        self.parts = parts
        self.settings = settings
        self.clock = clock
        self.seen = seen
        self.actors: dict[str, Callable[[], None]] = {"boot": self._boot().__next__}
        """What each process does when it is its turn."""
        self.processes: dict[StageId, Process] = {}
        self.deciding: Deciding | None = None
        """What the committer has in memory."""
        self.copying: Captured | Acked | None = None
        """What the snapshotter has in memory."""
        self.over = False
        self.answers: dict[str, Answer] = {}
        self.on_complete: Callable[[Checkpoint], None] = lambda _: None
        self.on_skip: Callable[[tuple[StageSnapshot, ...]], None] = lambda _: None
        self.alignment_limit: int | None = None
        """Bytes behind blocked inputs, beyond which a stage declines (P6)."""
        self.slow: Stage | None = None
        """A stage that takes one turn in twenty."""
        self.faulty = True
        """Whether messages are lost, repeated and out of order."""
        self.mail: list[Event] = []
        self.todo: deque[Effect] = deque()
        self.acks: dict[tuple[CheckpointId, StageId], StageSnapshot] = {}

    def copy(self, storage: Storage, chance: Chance, clock: Clock) -> Driver:
        """Return the same driver, booted, with the same processes, on copied storage."""
        twin = detached(self)
        twin.storage, twin.chance, twin.clock = storage, chance, clock
        twin.run = self.run.copy(storage, chance)
        twin.coordinator = detached(self.coordinator)
        twin.actors = {}
        for process in self.processes.values():
            twin._attach(process.copy(twin.run))
        twin._attach_shared()
        return twin

    # -- what the scheduler and its faults do

    def step(self) -> None:
        """Let one process take a step or a few."""
        names = list(self.actors)
        name = names[self.chance.pick("process", len(names))]
        if (
            self.slow
            and name == f"life:{self.slow.id}"
            and not self.chance.happens("the slow one moves", 0.05)
        ):
            return
        for _ in range(_PACE[self.chance.pick("pace", len(_PACE))]):
            if not self.advance(name):
                break

    def advance(self, name: str) -> bool:
        """Let a process take one step; return whether it may take another at once."""
        try:
            self.actors[name]()
        except StopIteration:
            self.actors.pop(name, None)
        except Lost:
            self.over = not self.crash_stage(StageId(name.partition(":")[2]))
        except Fenced:
            self.over = True
            self.seen["drivers fenced"] += 1
        else:
            return True
        return False

    @property
    def booted(self) -> bool:
        """Whether the processes have started."""
        return "coordinator" in self.actors

    def crash_stage(self, stage: StageId) -> bool:
        """Kill one query and start it again, under the same run; False if it has stopped gracefully."""
        if self.processes[stage].is_ending:
            return False
        self.run.handed = {(c, s) for c, s in self.run.handed if s != stage}
        self._start(next(s for s in self.graph if s.id == stage))
        return True

    def crash_snapshotter(self) -> None:
        """Lose every capture and every acknowledgement that is not answered."""
        self.run.captures.clear()
        self.acks.clear()
        self.copying = None

    def crash_coordinator(self) -> None:
        """Lose the coordinator's memory and its mail; a new one is told of the claims without an outcome."""
        self.mail.clear()
        self._new_coordinator()
        for claim in self.storage.state.claims:
            self._feed(Claimed(self.clock(), claim.barrier, None))

    def ask(self, request: Request) -> None:
        """Ask for a checkpoint or savepoint."""
        self.mail.append(Requested(0, request))

    # -- start

    def _boot(self) -> Iterator[None]:
        storage = self.storage
        storage.control.append(control.begin_run(storage.state, "sim", 1, self.clock()))
        run = storage.state.run
        assert run is not None
        floor = storage.state.last_claimed
        yield from fence(storage, run.id, before=AttemptId(0))
        self._begin(run.id, floor)

    def _begin(self, run: RunId, floor: CheckpointId) -> None:
        """Start the processes; nothing on storage changes."""
        storage, attempt = self.storage, self.storage.state.attempt.id
        paths = {c: storage.path(c, attempt) for stage in self.graph for c in stage.channels}
        self.run = Run(storage, self.chance, self.parts, run, attempt, floor, paths)
        self._new_coordinator()
        for stage in self.graph:
            self._start(stage)
        self._attach_shared()

    def _start(self, stage: Stage) -> None:
        self.run.ended.discard(stage.id)
        self._attach(Process(self.run, stage))

    def _attach_shared(self) -> None:
        self.actors |= {
            "snapshotter": self._capture,
            "committer": self._carry_out,
            "coordinator": self._deliver,
        }

    def _attach(self, process: Process) -> None:
        stage = process.stage.id
        self.processes[stage] = process
        self.actors[f"life:{stage}"] = process.step
        self.actors[f"agent:{stage}"] = process.look

    def _new_coordinator(self) -> None:
        self.coordinator = self.parts.coordinator((s.id for s in self.graph), lambda: self.settings)
        self._feed(StatusChanged(self.clock(), RunStatus.RUNNING))

    # -- coordinator and what it asks for

    def _deliver(self) -> None:
        """Hand one message to the coordinator: any of them, perhaps twice, perhaps never."""
        happens = self.chance.happens
        if len(self.run.ended) == len(self.graph) and happens("the job ends", 0.05):
            self._finish(RunStatus.FINISHED)
        if self.alignment_limit is not None and happens("somebody looks at what inputs hold up", 0.3):
            self._watch_alignments(self.alignment_limit)
        if self.mail and happens("a message comes", 0.8):
            self._hear(self.mail.pop(self._pick()))
        elif happens("time goes by", 0.3):
            self._feed(Tick(self.clock()))

    def _watch_alignments(self, limit: int) -> None:
        for stage, process in self.processes.items():
            queued: Counter[CheckpointId] = Counter()
            for own in align.waiting(process.native.newest.positions, self.run.settled(), self.run.id):
                behind = self.storage.tables[own.channel].after(own.version, self.run.paths[own.channel])
                queued[own.epoch] += sum(entry.size for entry in behind)
            for checkpoint, size in queued.items():
                if align.exceeds(size, limit):
                    why = f"{size} bytes"
                    self.mail.append(Declined(0, checkpoint, stage, AbortReason.ALIGNMENT_LIMIT, why))

    def _hear(self, event: Event) -> None:
        happens = self.chance.happens
        if self.faulty and happens("a message comes twice", 0.1):
            self.mail.append(event)
        if not (self.faulty and isinstance(event, Acked) and happens("an acknowledgement is lost", 0.1)):
            self._feed(replace(event, now_ms=self.clock()))

    def _pick(self) -> int:
        """Choose a message; claims keep their order, as they do in `control/`."""
        number = self.chance.pick("message", len(self.mail))
        if isinstance(self.mail[number], Claimed):
            return next(n for n, event in enumerate(self.mail) if isinstance(event, Claimed))
        return number

    def _finish(self, status: RunStatus) -> None:
        self._feed(StatusChanged(self.clock(), status))
        for effect in list(self.todo):
            if not isinstance(effect, Claim | Overtake):
                self._settle(self._outcome(effect))
        self.todo.clear()
        self.storage.control.append(control.end_run(self.storage.state, self.run.id, status))
        self.over = True

    def _feed(self, event: Event) -> None:
        for effect in self.coordinator.handle(event):
            match effect:
                case Claim() | Complete() | Abort():
                    self.todo.append(effect)
                case Overtake(checkpoint):
                    self.run.overtake(checkpoint)
                    self.todo.append(effect)
                case AckAnswer(checkpoint, stage, result):
                    self.acks.pop((checkpoint, stage), None)
                    self.seen[f"acks {result}"] += 1
                case Notify(checkpoint, _):
                    self.run.open = tuple(b for b in self.run.open if b.id > checkpoint)
                case Answer():
                    self.answers[effect.request_id] = effect
                case Discard():
                    pass
        if isinstance(event, Claimed) and self._is_collecting(event.barrier):
            self.run.open = (*self.run.open, event.barrier)

    def _is_collecting(self, barrier: Barrier) -> bool:
        newer = all(barrier.id > known.id for known in self.run.open)
        return newer and any(p.id == barrier.id and p.verdict is None for p in self.coordinator.pending)

    def _carry_out(self) -> None:
        """Carry out effects in order, each commit a step of its own."""
        if self.deciding is None:
            if self.todo:
                effect = self.todo[0]
                if isinstance(effect, Claim | Overtake):
                    self._claim(effect) if isinstance(effect, Claim) else self._overtake(effect)
                    self._done(effect)
                else:
                    self.deciding = Deciding(effect, self._outcome(effect))
        elif not self.deciding.settled:
            self._settle(self.deciding.outcome)
            self.deciding = replace(self.deciding, settled=True)
        else:
            self.mail.append(self.deciding.outcome)
            self._done(self.deciding.effect)
            self.deciding = None

    def _done(self, effect: Effect) -> None:
        if self.todo and self.todo[0] is effect:
            self.todo.popleft()
        self._stop_after_savepoint()

    def _claim(self, effect: Claim) -> None:
        if effect.unless and self._stand_at(effect.unless):
            self.on_skip(effect.unless)
            self.seen["skipped"] += 1
            self._feed(Skipped(self.clock()))
            return
        state, barrier = control.claim(
            self.storage.state,
            self.run.id,
            kind=effect.kind,
            name=effect.name,
            now_ms=self.clock(),
            mode=effect.mode,
        )
        self.storage.control.append(state)
        self.storage.claimed.append(barrier)
        self.mail.append(Claimed(0, barrier, effect.request_id))

    def _stand_at(self, cuts: tuple[StageSnapshot, ...]) -> bool:
        natives = {stage.id: self._native(stage) for stage in self.graph}
        return all(self.parts.stands_at(natives[cut.stage], cut) for cut in cuts)

    def _overtake(self, effect: Overtake) -> None:
        after = overtake(self.storage.state, self.run.id, effect.id)
        self.storage.overtaken.update(overtaken(self.storage.state, after))
        self.storage.control.append(after)
        self.seen["overtaken"] += 1

    def _outcome(self, effect: Effect) -> Decided:
        """Commit an outcome; the one that stands is the one that counts."""
        assert isinstance(effect, Complete | Abort)
        storage, row, reason = self.storage, None, AbortReason.STATE_MISSING
        if isinstance(effect, Abort):
            reason = effect.reason
        elif all(file.at.pack in storage.packs for s in effect.snapshots for file in s.files):
            barrier = self.run.claimed(effect.id)
            row = Checkpoint(
                effect.id, self.run.attempt, barrier.kind, effect.snapshots, barrier.mode, self.graph
            )
        known = {checkpoint for checkpoint, _ in storage.checkpoints}
        completed = storage.decide(effect.id, row, self.run.id)
        if effect.id not in known:
            self.seen["completed" if completed else f"aborted: {reason}"] += 1
            if row is not None:
                self.on_complete(row)
        return Decided(0, effect.id, completed, None if completed else reason)

    def _settle(self, decided: Decided) -> None:
        reason = decided.reason or AbortReason.STATE_MISSING
        settle(self.storage, decided.id, decided.completed, reason)

    def _stop_after_savepoint(self) -> None:
        done = [a for a in self.answers.values() if a.ok and a.id is not None]
        if any(self.storage.claimed[a.id - 1].kind is CheckpointKind.SYNC_SAVEPOINT for a in done if a.id):
            self._finish(RunStatus.STOPPING)

    # -- snapshots

    def _capture(self) -> None:
        """Capture a cut whose batch is finished, copy it, acknowledge until answered."""
        if isinstance(self.copying, Captured):
            self.copying = self._copied(self.copying)
        elif self.copying is not None:
            checkpoint, snapshot = self.copying.id, self.copying.snapshot
            self.acks[checkpoint, snapshot.stage] = snapshot
            self.mail.append(self.copying)
            self.copying = None
        elif ready := self.ready:
            cut = ready[self.chance.pick("capture", len(ready))]
            self.run.captures.remove(cut)
            self.copying = self._captured(*cut)
        elif self.acks and self.chance.happens("an acknowledgement comes again", 0.1):
            (checkpoint, _), snapshot = next(iter(self.acks.items()))
            self.mail.append(Acked(0, checkpoint, snapshot))

    @property
    def ready(self) -> list[Capture]:
        """The cuts whose batch is finished and that wait to be captured."""
        return [c for c in self.run.captures if self._native(c[1]).committed >= c[2]]

    def _captured(self, barrier: Barrier, stage: Stage, batch: BatchId) -> Captured | Acked | None:
        native = self._native(stage)
        if batch == NO_BATCH:
            return self.run.acknowledgement(barrier, stage, batch, native.start, ())
        if batch not in native.commits:
            gone = f"batch {batch} is no longer in the native checkpoint"
            self.mail.append(Declined(0, barrier.id, stage.id, AbortReason.DECLINED, gone))
            return None
        return Captured(barrier, stage, batch, native.offsets[batch], self.parts.captured(native, batch))

    def _copied(self, captured: Captured) -> Acked:
        barrier, batch = captured.barrier, captured.batch
        size, sha256 = digest(captured.state)
        self.storage.packs[sha256] = captured.state
        self.storage.captured.setdefault(barrier.id, set()).add(sha256)
        file = StoredFile(f"state/{batch + 1}", size, sha256, Location(sha256, 0, 1))
        return self.run.acknowledgement(barrier, captured.stage, batch, captured.planned, (file,))

    def _native(self, stage: Stage) -> Native:
        return self.storage.native[self.run.attempt, stage.id]
