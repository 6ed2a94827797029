"""Small systems to explore: the simulated job with its scheduling left open.

The module is long because the rules below and the code that keeps to them have to be read side by side.

What the simulator leaves to chance is enumerated here or fixed. Enumerated: which process takes the next
step, which message the coordinator hears next, when the one crash strikes and when time runs out. Fixed: a
batch takes one record or entry of each input, no message is lost or comes twice but by a crash, nothing
foreign is committed, and a driver that crashes is started again before anything else happens.

Steps that nobody else can tell apart are taken as one, unless the process in question may crash:

- after its last channel a batch writes its sink, hands its cut over and is finished: sink rows of a batch
  are in no version recorded for an earlier cut, a cut is not captured before its batch is finished, and the
  agent of a stage does nothing while a batch is unfinished;
- a batch with an open channel input is planned and evaluated: evaluating reads what the stage alone writes,
  and outcomes, of which only an abort counts, so not where there may be one; a barrier that is offered in
  between is taken as one offered before is, ahead of the batch, or as one offered after, with it;
- an agent that has passed a barrier on to every output hands the cut over, and one whose stage has ended or
  has no output does all at once: no batch will come between;
- cuts are captured, copied and acknowledged at once, and the committer sends its message with the outcome:
  all that comes of it for others is a message, which may be under way as long as it likes;
- acknowledgements are heard at once where no checkpoint can run out of time: the last one only asks the
  committer to complete it, who may wait as long as he likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from spark_abs.alignment.loops import forward
from spark_abs.model import CheckpointKind, CheckpointMode, StageId, channel_id
from spark_abs.protocol.credit import Capacity
from spark_abs.protocol.messages import Acked, Tick
from spark_abs.protocol.trigger import Request, TriggerSettings
from tests.simulator.checks import check_checkpoint, check_end
from tests.simulator.cluster import AGAIN, LATE, Graph, Native, Stage, Storage
from tests.simulator.driver import Driver
from tests.simulator.explore import Choice, World
from tests.simulator.memory import Batch, detached
from tests.simulator.names import Names
from tests.simulator.parts import Parts
from tests.simulator.story import inputs, told
from tests.simulator.table import Table

TIMEOUT_MS = 1_000
_NEVER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class System:
    """What to explore."""

    graph: Graph
    checkpoints: int = 2
    concurrent: int = 1
    """How many of them may be open at once."""
    crash: str | None = None
    """What may crash once, at any moment: a stage, `snapshotter`, `coordinator` or `driver`."""
    mode: CheckpointMode = CheckpointMode.ALIGNED
    overtaken: bool = False
    """Whether an open aligned checkpoint may become unaligned at any moment after the crash."""
    timeout: bool = False
    """Whether an open checkpoint may run out of time at any moment after the crash, if there is one.

    It has to if the crash lost what it waits for.
    """
    parts: Parts = field(default_factory=Parts)
    knows: bool = False
    """Whether gates know at once which barriers their stage has taken where it stood; else they never do."""

    def first(self) -> World:
        """Return the system in its first state."""
        return Small(self)


class Fixed:
    """The answers to what is not enumerated; of messages and cuts the one that was picked."""

    def __init__(self) -> None:
        self.driver: Driver
        self.picked = 0
        self.knows = False

    def happens(self, what: str, likelihood: float) -> bool:
        """Say what always happens and what never does."""
        match what:
            case "a message comes":
                return True
            case "an acknowledgement comes again":
                return not self.driver.mail
            case "the gates know what was taken in place":
                return self.knows
            case _:
                return False

    def pick(self, what: str, count: int) -> int:
        """Return what was picked; a source takes one record in a batch, everything else the least."""
        match what:
            case "message" | "capture":
                return self.picked
            case "records":
                return 1
            case _:
                return 0


class Small:
    """A system in one of its states."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.storage = Storage(system.graph)
        self.now_ms = 0
        self.crashes = 0 if system.crash is None else 1
        self._names = Names()
        self._numbered: dict[str, tuple[object, int]] = {}
        self._heard = 0
        """How often the coordinator may have changed."""
        self._boot()

    def _boot(self) -> None:
        settings = TriggerSettings(
            interval_ms=None,
            min_pause_ms=0,
            timeout_ms=_NEVER_MS if self.system.overtaken else TIMEOUT_MS,
            mode=self.system.mode,
            aligned_timeout_ms=TIMEOUT_MS if self.system.overtaken else None,
            max_concurrent=self.system.concurrent,
        )
        self.chance = Fixed()
        self.driver = Driver(
            self.storage, self.chance, self.system.parts, settings, lambda: self.now_ms, Counter()
        )
        self.driver.faulty = False
        self._wire()
        while not self.driver.booted:
            self.driver.advance("boot")
        for number in range(len(self.storage.claimed), self.system.checkpoints):
            self.driver.ask(Request(f"request {number + 1}", CheckpointKind.CHECKPOINT))
            self.driver.advance("coordinator")

    def _wire(self) -> None:
        self.chance.driver, self.chance.knows = self.driver, self.system.knows
        self.driver.on_complete = lambda row: check_checkpoint(self.storage, row)

    def copy(self) -> World:
        """Return the same state, to be moved on its own."""
        twin = detached(self)
        twin.storage = detached(self.storage)
        twin.storage.tables = {name: detached(table) for name, table in self.storage.tables.items()}
        twin.storage.native = {key: _own(native) for key, native in self.storage.native.items()}
        twin.chance = Fixed()
        twin.driver = self.driver.copy(twin.storage, twin.chance, lambda: twin.now_ms)
        twin._wire()
        return twin

    def choices(self) -> Sequence[Choice]:
        """Return whose turn it may be, message by message and cut by cut, and the faults that are left."""
        found, driver = [], self.driver
        for actor in driver.actors:
            if actor == "coordinator":
                found += [Choice(actor, number) for number in range(len(driver.mail))]
            elif actor == "snapshotter" and driver.copying is None:
                found += [Choice(actor, number) for number in range(len(driver.ready) or bool(driver.acks))]
            elif actor != "committer" or driver.todo or driver.deciding:
                found.append(Choice(actor))
        if self.crashes:
            found.append(Choice(f"crash of {self.system.crash}", fault=True))
        if not self.crashes and not any(isinstance(event, Tick) for event in driver.mail):
            open_ones = [p for p in driver.coordinator.pending[:1] if p.verdict is None]
            if self.system.overtaken:
                open_ones = [p for p in open_ones if p.barrier.mode is CheckpointMode.ALIGNED]
            if self.system.timeout or self.system.overtaken:
                found += [Choice("time") for _ in open_ones]
        return found

    def take(self, choice: Choice) -> None:
        """Let a process take a step and those that belong to it, or let a fault strike."""
        self._heard += choice.fault or choice.actor in ("coordinator", "committer", "time")
        if choice.actor == "time":
            self.now_ms += TIMEOUT_MS
            self.driver.mail.append(Tick(0))
            if self.system.overtaken:  # what becomes of it waits in the committer
                self.chance.picked = len(self.driver.mail) - 1
                self.driver.advance("coordinator")
        elif not choice.fault:
            self.chance.picked = choice.pick
            self.driver.advance(choice.actor)
            while self._goes_on(choice.actor):
                self.driver.advance(choice.actor)
            self._snapshot()
        else:
            self.crashes -= 1
            self.forget()
            self._crash(self.system.crash)

    def _goes_on(self, actor: str) -> bool:
        """Say whether the next step of a process belongs to this one (see the module's text)."""
        crash, driver = self.system.crash, self.driver
        if actor == "committer":
            return driver.deciding is not None and crash != "driver"
        kind, _, name = actor.partition(":")
        stage = StageId(name)
        if stage not in driver.processes or crash in (stage, "driver"):
            return False
        process = driver.processes[stage]
        if kind == "agent":
            return process.taking is not None and (
                stage in driver.run.ended or not process.channels or process.passed(process.taking)
            )
        if isinstance(process.at, Batch):
            return process.at.output >= len(process.channels)
        inputs = forward(process.native.newest.positions)
        reads = [p for p in inputs if not p.is_closed(driver.run.id)]
        return isinstance(process.at, int) and bool(reads) and not self.system.timeout and not process.waits

    def _snapshot(self) -> None:
        """Capture, copy and acknowledge at once what can be."""
        self.chance.picked = 0
        while self.system.crash not in ("snapshotter", "driver") and (
            self.driver.ready or self.driver.copying
        ):
            self.driver.advance("snapshotter")
        while not self.system.timeout and self._acks():
            self._heard += 1
            self.chance.picked = self._acks()[0]
            self.driver.advance("coordinator")

    def _acks(self) -> list[int]:
        return [number for number, event in enumerate(self.driver.mail) if isinstance(event, Acked)]

    def _crash(self, what: str | None) -> None:
        match what:
            case "driver":
                self._boot()
            case "coordinator":
                self.driver.crash_coordinator()
            case "snapshotter":
                self.driver.crash_snapshotter()
            case _:
                self.driver.crash_stage(StageId(what or ""))

    def unfinished(self) -> Iterator[str]:
        """Yield what an ended job still lacks: ends, outcomes, or what a run without failure holds."""
        run, decided = self.driver.run, {number for number, _ in self.storage.checkpoints}
        for stage in self.storage.graph:
            if stage.id not in run.ended:
                yield f"3: {stage.id} cannot go on: {inputs(run.storage.native[run.attempt, stage.id])}"
        for barrier in self.storage.claimed:
            if barrier.id not in decided:
                yield f"2: checkpoint {barrier.id} gets no outcome"
        try:
            check_end(self.storage)
        except AssertionError as error:
            yield str(error)

    # -- what tells one state from another

    def fingerprint(self) -> Hashable:
        """Return what the future can depend on: storage, messages, and what each process remembers."""
        of, driver, storage = self._names.of, self.driver, self.storage
        run = driver.run
        return (
            self.now_ms,
            self.crashes,
            *(self._table(table) for table in storage.tables.values()),
            *(self._native(f"{key}", native) for key, native in storage.native.items()),
            self._once("control", storage.state, lambda: of(storage.state)),
            len(storage.claimed),
            of(storage.overtaken),
            self._once("outcomes", len(storage.checkpoints), lambda: of(storage.checkpoints)),
            self._once("packs", len(storage.packs), lambda: of(storage.packs)),
            of(run.open),
            of(run.handed),
            of(run.in_place),
            of(sorted(map(of, run.captures))),
            of(run.ended),
            of(sorted(map(of, driver.mail))),
            of(tuple(map(of, driver.todo))),
            of(driver.acks),
            self._once("coordinator", self._heard, lambda: of(self._coordinator())),
            of(driver.deciding),
            of(driver.copying),
            *(of(process.at) for process in driver.processes.values()),
            *(of(process.taking) for process in driver.processes.values()),
        )

    def forget(self) -> None:
        """Drop what is kept of the fingerprint; the next one is made anew."""
        self._numbered.clear()

    def _once(self, what: str, version: object, number: Callable[[], int]) -> int:
        """Number something anew if its version is another one than when it was numbered last."""
        known, kept = self._numbered.get(what, (None, 0))
        if known is not version and known != version:
            kept = number()
            self._numbered[what] = version, kept
        return kept

    def _coordinator(self) -> list[object]:
        return [held for name, held in vars(self.driver.coordinator).items() if name != "_settings"]

    def _table(self, table: Table) -> int:
        """Number a table; every change of one adds an entry."""
        of = self._names.of

        def number() -> int:
            content = (tuple(table.entries), tuple(table.rows), table.visible[-1], tuple(table.log))
            return of((of(content), of(table.transactions)))

        return self._once(table.name, len(table.entries), number)

    def _native(self, name: str, native: Native) -> int:
        """Number what is still read of a native checkpoint; every change of one adds a file.

        That is the newest planned batch and the newest finished one, and what is yet to be captured.
        """
        of, files = self._names.of, sum(map(len, native.states.values()))

        def number() -> int:
            batches = {native.planned, native.committed, *(batch for _, _, batch in self.driver.run.captures)}
            kept = [(b, native.offsets.get(b), native.commits.get(b)) for b in sorted(batches)]
            return of((tuple(kept), of([native.states.get(b + 1) for b in sorted(batches)])))

        return self._once(
            name, (native.planned, native.committed, files, tuple(self.driver.run.captures)), number
        )

    def facts(self) -> Sequence[str]:
        """Return what is on storage, in memory and under way, a sentence each."""
        return list(told(self.driver))


def _own(native: Native) -> Native:
    twin = detached(native)
    twin.states = {version: dict(files) for version, files in native.states.items()}
    return twin


def source(name: str, records: int, *outputs: str) -> Stage:
    """Return a source."""
    return Stage(StageId(name), native=records, outputs=outputs or ("main",))


def two_inputs(first: int, second: int) -> Graph:
    """Return two sources of so many records, and the stage that reads both."""
    both = Stage(StageId("both"), (channel_id("a"), channel_id("b")), outputs=())
    return source("a", first), source("b", second), both


def two_outputs(records: int) -> Graph:
    """Return a source that writes two channels, and the stage that reads both."""
    both = Stage(StageId("both"), (channel_id("a"), channel_id("a", LATE)), outputs=())
    return source("a", records, "main", LATE), both


def diamond(records: int) -> Graph:
    """Return a source whose channel is read twice: by a stage, and by the one that reads that stage too."""
    between = Stage(StageId("between"), (channel_id("a"),))
    both = Stage(StageId("both"), (channel_id("a"), channel_id("between")), outputs=())
    return source("a", records), between, both


def chain(records: int) -> Graph:
    """Return a source and the stage that reads it."""
    return source("a", records), Stage(StageId("tail"), (channel_id("a"),), outputs=())


def loop(records: int) -> Graph:
    """Return a source and a stage that sends every record round to itself, twice."""
    back = channel_id("head", AGAIN)
    head = Stage(StageId("head"), (channel_id("a"), back), outputs=(AGAIN,), feedback=(back,))
    return source("a", records), head


_UNALIGNED, _COUNTED = CheckpointMode.UNALIGNED, CheckpointMode.AT_LEAST_ONCE

SYSTEMS = {
    "two inputs": System(two_inputs(1, 0), checkpoints=1),
    "two inputs, two checkpoints": System(two_inputs(0, 0), checkpoints=2),
    "two outputs, the source crashes": System(two_outputs(1), checkpoints=1, crash="a"),
    "diamond": System(diamond(1), checkpoints=1),
    "diamond, with room for one entry": System(diamond(2), checkpoints=1, parts=Parts(capacity=Capacity(1))),
    "loop": System(loop(1), checkpoints=1),
    "loop, two checkpoints, its head crashes": System(loop(0), checkpoints=2, crash="head"),
    "chain, two checkpoints, the last stage crashes": System(chain(1), checkpoints=2, crash="tail"),
    "chain, two checkpoints, the last stage crashes, its gate knows": System(
        chain(1), checkpoints=2, crash="tail", knows=True
    ),
    "two inputs, the gates know": System(two_inputs(1, 0), checkpoints=1, knows=True),
    "chain, the driver crashes, the gate knows": System(chain(0), checkpoints=1, crash="driver", knows=True),
    "chain, two checkpoints at once": System(chain(1), checkpoints=2, concurrent=2),
    "chain, the checkpoint may run out of time": System(chain(1), checkpoints=1, timeout=True),
    "chain, the coordinator crashes": System(chain(0), checkpoints=1, crash="coordinator", timeout=True),
    "chain, the snapshotter crashes": System(chain(0), checkpoints=1, crash="snapshotter", timeout=True),
    "chain, the driver crashes": System(chain(0), checkpoints=1, crash="driver"),
    "two inputs, unaligned": System(two_inputs(0, 0), checkpoints=1, mode=_UNALIGNED),
    "chain, two unaligned": System(chain(1), checkpoints=2, mode=_UNALIGNED),
    "two outputs, unaligned, the source crashes": System(
        two_outputs(0), checkpoints=1, crash="a", mode=_UNALIGNED
    ),
    "chain, unaligned, the stage crashes": System(chain(1), checkpoints=1, crash="tail", mode=_UNALIGNED),
    "loop, unaligned": System(loop(0), checkpoints=1, mode=_UNALIGNED),
    "two outputs, overtaken": System(two_outputs(0), checkpoints=1, overtaken=True),
    "two inputs, at least once": System(two_inputs(0, 0), checkpoints=1, mode=_COUNTED),
    "two outputs, two at least once": System(two_outputs(0), checkpoints=2, mode=_COUNTED),
    "diamond, at least once": System(diamond(0), checkpoints=1, mode=_COUNTED),
}
"""What is explored in whole; the interleavings of larger ones are the simulator's, by chance."""
