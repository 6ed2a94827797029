"""Seeded runs of a simulated job that is declared otherwise at each start, and goes on exactly once.

    python -m tests.simulator.changing --runs 500
    python -m tests.simulator.changing --seed 4711        # see one again

What decides is the product's own: the comparison, what it rests on, gates, cuts, the coordinator.
It is long because a change, what a start makes of it and what must hold then share one seeded story.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import click

from spark_abs.errors import AbsError, DamageError, Refused
from spark_abs.keep import Keep, Tier
from spark_abs.model import NO_BATCH, CheckpointId, CheckpointKind, StageId, Version
from spark_abs.protocol.changes import Begin
from spark_abs.protocol.credit import Capacity
from spark_abs.protocol.trigger import Request, TriggerSettings
from spark_abs.snapshots.retention import needed_of_channels, retired
from tests.invariants import InvariantViolated, require
from tests.simulator.chance import Luck
from tests.simulator.changed import ChangingDriver, Declared
from tests.simulator.cluster import Checkpoint
from tests.simulator.lanes import Step, check_lanes
from tests.simulator.memory import Batch
from tests.simulator.parts import Parts
from tests.simulator.rewiring import Path, Renamed, Rewired, Rewiring
from tests.simulator.root import Root, manifest_of
from tests.simulator.table import Table

STARTS = 14
"""Starts under faults; then the job is left in peace until it ends."""
PATIENCE = 15_000
"""Steps in peace within which the job has to end."""
RETAINED = Keep(3, (Tier(12, 4),))


@dataclass(frozen=True, slots=True)
class Intent:
    """What the next start is to do, and what that means."""

    name: str
    declared: Declared
    renamed: Renamed
    expected: bool | None = None
    """Whether it must start, if that is known."""


class Changing:
    """One root whose job changes."""

    def __init__(
        self, seed: int, parts: Parts, tables: dict[str, Table] | None = None, identity: str = "root"
    ) -> None:
        self.rng = Random(f"{seed} {identity}")
        rng = self.rng
        capacity = Capacity(rng.choice((None, None, 2, 4)))
        self.storage = Root(parts, {} if tables is None else tables, identity)
        self.seen: Counter[str] = Counter()
        self.now_ms = 0
        self.sources = "abcde" if identity == "root" else "fghij"
        self.parts = replace(parts, capacity=capacity)
        self.rewiring = Rewiring(rng, self.sources)
        self.settings = TriggerSettings(
            interval_ms=rng.choice((60, 150)), min_pause_ms=0, timeout_ms=rng.choice((1_000, 4_000))
        )
        self.history: tuple[Step, ...] = ()
        self.histories: dict[CheckpointId, tuple[Step, ...]] = {}
        self.frozen: list[ChangingDriver] = []
        self.restoring: Iterator[None] | None = None
        self.driver: ChangingDriver | None = None
        self.ahead: tuple[Step, ...] = ()
        """The history before the last restore."""
        self.left_steps = 0
        self.ended_by = "kill"
        self.starts = 0
        self.quiet = False
        first = self.rewiring.first()
        self.intent = Intent("first", Declared(first), lambda path: path, True)

    # -- a step

    def run(self) -> Counter[str]:
        """Run to the end.

        Raises:
            InvariantViolated: something does not hold.
        """
        while self.starts < STARTS:
            self.step()
        self.settle()
        return self.seen

    def settle(self) -> None:
        """Leave the job in peace until it ends, and check it."""
        self.frozen.clear()
        while self.restoring is not None:
            self.step()
        if self.driver is not None and self.driver.booted:
            self.driver.faulty = False
        for _ in range(PATIENCE):
            if self._finished():
                break
            self._peaceful()
        else:
            raise InvariantViolated("3: the job did not end")
        rows = {name: self.storage.tables[name] for name in self.storage.came}
        found = {name: table.read(table.version) for name, table in rows.items()}
        require(check_lanes(self.history, found, self.sources))

    def _peaceful(self) -> None:
        self.now_ms += 2
        if self.driver is None or self.driver.over:
            self._start(self._unchanged())
            assert self.driver is not None
            self.driver.faulty = False
        self._advance()

    def _finished(self) -> bool:
        run = self.storage.state.run
        return self.driver is not None and self.driver.over and run is not None and run.ended == "finished"

    def step(self) -> None:
        """Let something happen."""
        self.now_ms += 2
        rng = self.rng
        if self.frozen and rng.random() < 0.1:
            self._thaw(rng.choice(self.frozen))
        if self.restoring is not None:
            if rng.random() < 0.02:
                self.restoring = self.storage.restore(self.going_back, lambda: self.now_ms)
            elif next(self.restoring, self) is self:
                self.restoring = None
                self.history = self.histories[self.going_back.id]
        elif self.driver is None or self.driver.over:
            self._next()
        else:
            self._advance()
            self.left_steps -= 1
            if self.left_steps <= 0 and self.driver is not None and not self.driver.over and self._ripe():
                self._end()
            elif rng.random() < 0.02:
                self._fault()

    def _advance(self) -> None:
        driver = self.driver
        assert driver is not None
        try:
            driver.step()
        except Refused as error:
            self._refused(error)

    def _thaw(self, driver: ChangingDriver) -> None:
        self.quiet = False
        try:
            driver.step()
        except DamageError:
            driver.over = True
        if driver.over:
            self.frozen.remove(driver)

    # -- starts

    def _unchanged(self) -> Intent:
        """Return the job as it is recorded, or as it was at the checkpoint to which it was restored."""
        if not self.history:
            return self.intent
        return Intent("unchanged", Declared(self.history[-1].graph), lambda path: path, True)

    def _next(self) -> None:
        rng = self.rng
        if self.driver is not None and any(answer.ok for answer in self.driver.answers.values()):
            self.seen["ended by a savepoint"] += 1
        self.driver = None
        if self.storage.retained and rng.random() < 0.25:
            self.going_back: Checkpoint = rng.choice(list(self.storage.retained.values()))
            self.restoring = self.storage.restore(self.going_back, lambda: self.now_ms)
            self.ahead = self.history
            self.seen["restores"] += 1
            return
        self._start(self._chosen())

    def _chosen(self) -> Intent:
        rng = self.rng
        if not self.history or rng.random() < 0.25:
            return self._unchanged()
        ahead = self.ahead
        if (
            len(ahead) > len(self.history)
            and ahead[: len(self.history)] == self.history
            and rng.random() < 0.5
        ):
            later = ahead[len(self.history) :]
            self.seen["changed again after a restore"] += 1
            return Intent("again", Declared(later[-1].graph), lambda path: _through(later, path))
        rewired = self.rewiring.change(self.history[-1].graph)
        begin: dict[StageId, Begin] = {}
        known = {s.id for s in self.history[-1].graph}
        if rng.random() < 0.2:
            begin = {s.id: "earliest" for s in rewired.graph if s.inputs and s.id not in known}
        leave = rng.random() < 0.1
        keeps = not leave and not begin
        renamed = rewired.renamed if keeps else _same
        return Intent(_named(rewired, leave, bool(begin)), Declared(rewired.graph, begin, leave), renamed)

    def _start(self, intent: Intent) -> None:
        self.starts += 1
        self.intent = intent
        self.quiet = not self.frozen
        declared = intent.declared
        self.checked = self.storage.compare(declared.graph, declared.begin, declared.leave)
        if intent.expected and not self.checked.ok and self.quiet:
            raise InvariantViolated(f"3: {intent.name}: the job does not start: {self.checked}")
        driver = ChangingDriver(
            self.storage, Luck(self.rng), self.parts, self.settings, lambda: self.now_ms, self.seen
        )
        driver.declared = declared
        driver.on_record = self._recorded
        driver.on_complete = self._completed
        self.driver = driver
        self.left_steps = 1 + int(self.rng.random() * self.rng.choice((12, 80, 250)))
        self.ended_by = self.rng.choice(
            ("kill", "kill", "torn", "torn", "written", "stop", "savepoint", "savepoint", "freeze")
        )

    def _refused(self, error: Refused) -> None:
        if self.quiet and self.checked.ok:
            raise InvariantViolated(f"2: the check lets {self.intent.name} pass, the start refuses: {error}")
        self.seen[f"refused: {self.intent.name}"] += 1
        if not self.quiet and self.intent.expected:
            self.seen["unchanged and refused"] += 1
        self.driver = None

    def _recorded(self) -> None:
        if self.quiet and not self.checked.ok:
            raise InvariantViolated(f"2: {self.intent.name} starts, the check refuses it: {self.checked}")
        attempt = self.storage.state.attempt.id
        natives = {str(s): n for (a, s), n in self.storage.native.items() if a == attempt}
        step = Step(
            self.intent.name,
            self.intent.declared.graph,
            self.intent.renamed,
            {stage: native.newest.native for stage, native in natives.items()},
            {s: n.durable.native for s, n in natives.items()} if self.intent.name == "put after" else {},
        )
        if not self.history or step.graph != self.history[-1].graph:
            self.history = (*self.history, step)
            self.seen[f"started: {self.intent.name}"] += 1

    def _completed(self, row: Checkpoint) -> None:
        self.histories[row.id] = self.history
        self.seen["completed"] += 1

    # -- ends and faults

    def _ripe(self) -> bool:
        """Say whether the moment has come: some kills wait until one output holds a batch, or all do."""
        driver, waits = self.driver, self.ended_by in ("torn", "written") and self.left_steps > -200
        if driver is None or not driver.booted or not waits:
            return True
        for process in driver.processes.values():
            if isinstance(process.at, Batch):
                outputs = len(process.channels) + process.stage.sink
                done = process.at.output >= outputs
                if done if self.ended_by == "written" else 0 < process.at.output < outputs:
                    return True
        return False

    def _end(self) -> None:
        driver = self.driver
        assert driver is not None
        if driver.booted and self.ended_by == "savepoint" and not driver.answers:
            driver.ask(Request(f"stop-{self.now_ms}", CheckpointKind.SYNC_SAVEPOINT, f"stop-{self.now_ms}"))
            self.left_steps, self.ended_by = 1_500, "saved"
            return
        self.seen[f"ended by {self.ended_by}" if driver.booted else "killed before it ran"] += 1
        if self.ended_by == "freeze" and driver.booted:
            self.frozen.append(driver)
        self.driver = None

    def _fault(self) -> None:
        driver = self.driver
        if driver is None or driver.over or not driver.booted:
            return
        match self.rng.choice(("stage", "stage", "snapshotter", "coordinator", "retain", "retain", "retain")):
            case "stage":
                driver.crash_stage(self.rng.choice(driver.graph).id)
            case "snapshotter":
                driver.crash_snapshotter()
            case "coordinator":
                driver.crash_coordinator()
            case _:
                self._retain()

    def _retain(self) -> None:
        """Retire old checkpoints, and trim channels behind their readers."""
        storage = self.storage
        rows = storage.retained
        gone = retired(
            rows.values(),
            RETAINED,
            storage.state.last_claimed,
            on_path=lambda row: storage.state.on_path(row.attempt, row.id),
        )
        for number in gone:
            del rows[number]
        attempt = storage.state.attempt.id
        readers: dict[str, list[Version | None]] = {}
        for stage in storage.graph:
            for position in storage.native[attempt, stage.id].durable.positions:
                readers.setdefault(position.channel, []).append(position.version)
        since = max(
            (row.id for row in rows.values() if storage.state.on_path(row.attempt, row.id)),
            default=CheckpointId(0),
        )
        manifests = [manifest_of(row, row.graph) for row in rows.values()]
        for channel, needed in needed_of_channels(manifests, readers, since).items():  # type: ignore[arg-type]
            table, floor = storage.tables[channel], needed.floor
            table.trim_rows(needed)
            own = list(table.newest_first(storage.path(table.channel, attempt)))
            batch = next((e.version for e in own if e.batch != NO_BATCH), floor)
            marker = next((e.version for e in own if e.barrier or e.cancel is not None), floor)
            behind = min(floor, batch, marker)
            table.entries[:behind] = [None] * behind
            self.seen["channels trimmed"] += behind > 0


def _same(path: Path) -> Path:
    return path


def _through(steps: Sequence[Step], path: Path) -> Path:
    for step in steps:
        path = step.renamed(path)
    return path


def _named(rewired: Rewired, leave: bool, earliest: bool) -> str:
    return rewired.name + (", left behind" if leave else "") + (", from the earliest" if earliest else "")


def simulate_changes(seed: int, parts: Parts | None = None) -> Counter[str]:
    """Run one seed and return what happened in it, by name.

    Raises:
        InvariantViolated: something does not hold; the message begins with the seed.
    """
    try:
        return Changing(seed, parts or Parts()).run()
    except (AssertionError, AbsError, RuntimeError, LookupError) as error:
        raise InvariantViolated(f"seed {seed}: {error}") from error


def simulate_two_roots(seed: int, parts: Parts | None = None) -> Counter[str]:
    """Run one seed of two roots that run jobs of one name and write the same tables.

    Raises:
        InvariantViolated: something does not hold; the message begins with the seed.
    """
    tables: dict[str, Table] = {}
    roots = [Changing(seed, parts or Parts(), tables, identity) for identity in ("root", "other")]
    turns = Random(seed)
    try:
        while running := [root for root in roots if root.starts < STARTS]:
            turns.choice(running).step()
        for root in roots:
            root.settle()
    except (AssertionError, AbsError, RuntimeError, LookupError) as error:
        raise InvariantViolated(f"seed {seed}: {error}") from error
    return roots[0].seen + roots[1].seen


@click.command()
@click.option("--runs", default=500, show_default=True, help="Seeds to run.")
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option("--roots", type=click.Choice(["1", "2"]), default="1", show_default=True)
def main(runs: int, seed: int, roots: str) -> None:
    """Run seeds of a job that changes; stop at the first that violates an invariant."""
    begun, seen = time.process_time(), Counter[str]()
    simulate = simulate_changes if roots == "1" else simulate_two_roots
    for number in range(seed, seed + runs):
        seen += simulate(number)
    seconds = time.process_time() - begun
    for name, count in sorted(seen.items()):
        click.echo(f"{count:>9,}  {name}")
    click.echo(f"{runs:,} runs in {seconds:.1f} s of one core, no violation")


if __name__ == "__main__":
    main()
