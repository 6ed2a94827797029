"""Seeded runs of a simulated job under faults, held against the six invariants.

    python -m tests.simulator.simulate --runs 2000
    python -m tests.simulator.simulate --seed 4711        # see one again

The protocol that runs is the product's own; what is simulated is Spark, storage, time and bad luck.
It is long because all faults and all invariants of one story draw from one seed, in one order.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import click

from spark_abs.errors import AbsError, DamageError
from spark_abs.manifest import StageSnapshot
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    StageId,
    Version,
    channel_id,
)
from spark_abs.protocol.credit import Capacity
from spark_abs.protocol.trigger import (
    Request,
    TriggerSettings,
)
from tests.invariants import InvariantViolated
from tests.simulator.chance import Luck
from tests.simulator.checks import (
    check_checkpoint,
    check_end,
    check_retention,
    check_skip,
    gaps,
    in_place,
    rows_in_flight,
)
from tests.simulator.cluster import AGAIN, LATE, Checkpoint, Graph, Stage, Storage
from tests.simulator.driver import Driver
from tests.simulator.parts import Parts
from tests.simulator.recovery import rebuilt, restore
from tests.simulator.root import manifest_of

_MODES = (*[CheckpointMode.ALIGNED] * 4, *[CheckpointMode.UNALIGNED] * 3, *[CheckpointMode.AT_LEAST_ONCE] * 3)
RETAINED = 4
"""Checkpoints kept by the simulated retention."""
STEPS = 900
"""Steps under faults; then the job is left in peace until it ends."""
RATE = 0.014
"""Faults, requests and clean-ups per step."""
PATIENCE = 12_000
"""Steps in peace within which the job has to end."""


def _source(name: str, records: int = 10) -> Stage:
    return Stage(StageId(name), native=records)


FIVE: Graph = (
    _source("clicks"),
    _source("orders2"),
    Stage(
        StageId("match"),
        (channel_id("clicks"), channel_id("orders2")),
        join=True,
        outputs=("main", "late"),
        sink=True,
    ),
    Stage(StageId("totals"), (channel_id("match"),)),
    Stage(
        StageId("report"),
        (channel_id("match", "late"), channel_id("totals")),
        join=True,
        outputs=(),
        sink=True,
    ),
)
"""Sources, a join with two outputs, and a diamond after it."""

SELF_JOIN: Graph = (
    _source("events"),
    Stage(StageId("pairs"), (channel_id("events"), channel_id("events")), join=True, outputs=(), sink=True),
)
"""One channel read twice by one stage: two lines that nothing tells apart."""

MIXED: Graph = (
    _source("left", 4),
    _source("silent", 0),
    Stage(StageId("merge"), (channel_id("left"), channel_id("silent")), native=5, outputs=("main", "late")),
    Stage(StageId("tail"), (channel_id("merge", "late"), channel_id("merge")), outputs=(), sink=True),
)
"""A silent source, and a stage that also has a native input."""

ROUND = channel_id("rest", AGAIN)
LOOP: Graph = (
    _source("clicks", 6),
    _source("orders2", 4),
    Stage(
        StageId("match"),
        (channel_id("clicks"), ROUND, channel_id("orders2")),
        outputs=("main", "late"),
        feedback=(ROUND,),
    ),
    Stage(StageId("rest"), (channel_id("match"),), outputs=("main", AGAIN)),
    Stage(StageId("report"), (channel_id("match", LATE), channel_id("rest")), outputs=(), sink=True),
)
"""A loop of two stages, and a diamond out of it."""

INNER, OUTER = channel_id("inner", AGAIN), channel_id("outer", AGAIN)
LOOPS: Graph = (
    _source("orders", 5),
    Stage(StageId("head"), (channel_id("orders"), OUTER), feedback=(OUTER,)),
    Stage(StageId("inner"), (channel_id("head"), INNER), outputs=("main", AGAIN), feedback=(INNER,)),
    Stage(StageId("outer"), (channel_id("inner"),), outputs=(AGAIN,), sink=True),
)
"""A loop of one stage within a loop of three."""

GRAPHS = {"five": FIVE, "self-join": SELF_JOIN, "mixed": MIXED, "loop": LOOP, "loops": LOOPS}


class Simulation:
    """One seeded run."""

    def __init__(self, seed: int, graph: Graph, parts: Parts) -> None:
        self.rng = Random(seed)
        self.parts = parts if parts.capacity.bounded else replace(parts, capacity=self._capacity())
        self.storage = Storage(graph)
        self.seen: Counter[str] = Counter()
        self.now_ms = 0
        self.frozen: list[Driver] = []
        self.restoring: tuple[Checkpoint, Iterator[None]] | None = None
        self.settings = TriggerSettings(
            interval_ms=self.rng.choice((30, 100, 200)),
            min_pause_ms=self.rng.choice((0, 30)),
            timeout_ms=self.rng.choice((200, 500, 2_000)),
            max_concurrent=1 + seed % 3,
            mode=self.rng.choice(_MODES),
            aligned_timeout_ms=self.rng.choice((None, None, 20, 100)),
        )
        self.alignment_limit = (5, 25, None)[seed // 3 % 3]
        self.slow: Stage | None = self.rng.choice((None, *graph))
        """A stage that takes a twentieth of its turns, until there are no more faults."""
        self.driver = self._new_driver()
        self._menu: list[tuple[str, Callable[[], bool], int]] = [
            ("stage crashes", self._crash_stage, 6),
            ("snapshotter crashes", self._crash_snapshotter, 2),
            ("coordinator crashes", self._crash_coordinator, 2),
            ("driver kills", self._kill, 2),
            ("driver freezes", self._freeze, 1),
            ("restores", self._restore, 8),
            ("native checkpoints lost", self._lose, 3),
            ("foreign commits", self._foreign, 2),
            ("retentions", self._retain, 2),
            ("mode changes", self._change_mode, 1),
            ("savepoint requests", lambda: self._ask(CheckpointKind.SAVEPOINT), 3),
            ("stop requests", lambda: self._ask(CheckpointKind.SYNC_SAVEPOINT), 1),
        ]
        self._weights = [weight for _, _, weight in self._menu]

    def _capacity(self) -> Capacity:
        return Capacity(self.rng.choice((None, 1, 2, 4)), self.rng.choice((None, None, 20)))

    def run(self) -> Counter[str]:
        """Run to the end.

        Raises:
            InvariantViolated: something does not hold.
        """
        for _ in range(STEPS):
            if self.rng.random() < RATE:
                name, fault, _ = self.rng.choices(self._menu, self._weights)[0]
                if fault():
                    self.seen[name] += 1
            self._step()
        self.driver.faulty = False
        self.slow = self.driver.slow = None
        for _ in range(PATIENCE):
            if self._finished():
                break
            self._step()
        else:
            raise InvariantViolated(f"3: the job did not end: {self._where()}")
        check_end(self.storage)
        return self.seen

    def _finished(self) -> bool:
        run = self.storage.state.run
        return self.driver.over and run is not None and run.ended == "finished"

    def _step(self) -> None:
        self.now_ms += 2
        if self.frozen and self.rng.random() < 0.05:
            self._thaw(self.frozen[int(self.rng.random() * len(self.frozen))])
        if self.restoring is not None:
            if next(self.restoring[1], self) is self:
                self.restoring = None
                self.driver = self._new_driver()
        elif self.driver.over:
            self.driver = self._new_driver()
        else:
            self.driver.step()

    def _thaw(self, driver: Driver) -> None:
        """Let a frozen driver go on for a step; nobody keeps channels for its attempt any more."""
        try:
            driver.step()
        except DamageError:
            driver.over = True
        if driver.over:
            self.frozen.remove(driver)

    def _new_driver(self) -> Driver:
        driver = Driver(
            self.storage, Luck(self.rng), self.parts, self.settings, lambda: self.now_ms, self.seen
        )
        driver.alignment_limit = self.alignment_limit
        driver.slow = self.slow
        driver.on_complete = self._completed
        driver.on_skip = lambda cuts: self._skipped(driver, cuts)
        return driver

    def _skipped(self, driver: Driver, cuts: tuple[StageSnapshot, ...]) -> None:
        """Check it, unless the driver was replaced: then it skips nothing that the job needs."""
        run = self.storage.state.run
        if run is not None and run.id == driver.run.id and self.restoring is None:
            check_skip(self.storage, cuts)

    def _completed(self, row: Checkpoint) -> None:
        check_checkpoint(self.storage, row)
        self.seen[f"completed {row.mode}"] += 1
        self._trim_rows(row.id)
        self.seen["completed with data in flight"] += any(gap < 0 for gap in gaps(self.storage, row))
        if row.mode is not CheckpointMode.UNALIGNED:
            self.seen["barriers taken in place"] += in_place(self.storage, row)
        self.seen["completed with data from after"] += any(gap > 0 for gap in gaps(self.storage, row))
        self.seen["rows on their way round"] += rows_in_flight(self.storage, row) > 0

    def _booted(self) -> bool:
        return self.restoring is None and self.driver.booted and not self.driver.over

    # -- faults; each returns whether it took place

    def _crash_stage(self) -> bool:
        if not self._booted():
            return False
        return self.driver.crash_stage(self.rng.choice(self.storage.graph).id)

    def _crash_snapshotter(self) -> bool:
        if not self._booted():
            return False
        self.driver.crash_snapshotter()
        return True

    def _crash_coordinator(self) -> bool:
        if not self._booted():
            return False
        self.driver.crash_coordinator()
        return True

    def _kill(self) -> bool:
        """Kill whatever runs: a job, or a restore, which has to be begun again."""
        if self.restoring is not None:
            self._begin_restore(self.restoring[0])
        else:
            self.driver = self._new_driver()
        return True

    def _lose(self) -> bool:
        """Kill the driver; one stage's native checkpoint is gone, and the next driver rebuilds it alone.

        The killed one may have been frozen only: what it still writes lands where nobody looks.
        """
        if not self._booted():
            return False
        stage = self.rng.choice(self.storage.graph)
        native = rebuilt(self.storage, stage, self.parts.repeats)
        if native is None:
            return False
        if self.rng.random() < 0.3:
            self.frozen.append(self.driver)
        self.storage.native[self.storage.state.attempt.id, stage.id] = native
        self.driver = self._new_driver()
        self.seen["batches repeated"] += len(native.script)
        return True

    def _freeze(self) -> bool:
        """Let another driver take over while the old one is stopped; it goes on later."""
        if not self._booted():
            return False
        self.frozen.append(self.driver)
        self.driver = self._new_driver()
        return True

    def _restore(self) -> bool:
        """Go back to any retained checkpoint, of this path or an abandoned one; the driver may be alive."""
        if self.restoring is not None or not self.storage.retained:
            return False
        if self._booted() and self.rng.random() < 0.5:
            self.frozen.append(self.driver)
        row = self.rng.choice(list(self.storage.retained.values()))
        if not self.storage.state.on_path(row.attempt, row.id):
            self.seen["restores to an abandoned checkpoint"] += 1
        self._begin_restore(row)
        return True

    def _begin_restore(self, row: Checkpoint) -> None:
        self.restoring = (row, restore(self.storage, row, lambda: self.now_ms))

    def _foreign(self) -> bool:
        self.rng.choice(list(self.storage.tables.values())).commit_foreign()
        return True

    def _change_mode(self) -> bool:
        self.settings = replace(self.settings, mode=self.rng.choice(_MODES))
        self.driver.settings = self.settings
        return True

    def _ask(self, kind: CheckpointKind) -> bool:
        if not self._booted():
            return False
        self.driver.ask(Request(f"request-{self.now_ms}", kind, f"asked-{self.now_ms}"))
        return True

    def _retain(self) -> bool:
        """Retire old checkpoints, sweep packs, trim channels."""
        storage = self.storage
        if self.restoring is not None:
            return False
        rows = list(storage.retained.values())
        current = [row for row in rows if storage.state.on_path(row.attempt, row.id)]
        kept = {*(r.id for r in rows[-RETAINED:]), *(r.id for r in current[-1:])}
        for row in rows:
            if row.id not in kept and not row.kind.owned_by_user:
                del storage.retained[row.id]
        decided = {number for number, _ in storage.checkpoints}
        live = {file.at.pack for row in storage.retained.values() for s in row.snapshots for file in s.files}
        live.update(*(packs for number, packs in storage.captured.items() if number not in decided))
        storage.packs = {pack: state for pack, state in storage.packs.items() if pack in live}
        if current:
            self._trim(storage.state.attempt.id)
        check_retention(storage)
        return True

    def _trim(self, attempt: AttemptId) -> None:
        """Remove the entries that every reader and every retained checkpoint have passed.

        The producer is a reader too: its newest batch and its newest marker tell it where it was.
        """
        passed: dict[str, int] = {}
        for stage in self.storage.graph:
            standing = self.storage.native[attempt, stage.id].durable.positions
            recorded = [row.snapshot(stage.id).positions for row in self.storage.retained.values()]
            for position in (*standing, *(p for positions in recorded for p in positions)):
                least = passed.get(position.channel, position.version)
                passed[position.channel] = min(least, position.version)
        for channel, version in passed.items():
            table = self.storage.tables[channel]
            own = list(table.newest_first(self.storage.path(table.channel, attempt)))
            batch = next((e.version for e in own if e.batch != NO_BATCH), version)
            marker = next((e.version for e in own if e.barrier or e.cancel is not None), version)
            behind = min(version, batch, marker)
            table.entries[:behind] = [None] * behind

    def _trim_rows(self, since: CheckpointId) -> None:
        """Remove the rows that no reader and no restore needs."""
        storage, readers = self.storage, defaultdict[ChannelId, list[Version]](list)
        for stage in storage.graph:
            for position in storage.native[storage.state.attempt.id, stage.id].durable.positions:
                readers[position.channel].append(position.version)
        manifests = [manifest_of(row, storage.graph) for row in storage.retained.values()]
        for channel, needed in self.parts.needed(manifests, readers, since).items():
            storage.tables[channel].trim_rows(needed)

    def _where(self) -> str:
        if self.restoring is not None:
            return f"restoring {self.restoring[0].id}"
        return "; ".join(
            f"{stage.id} at {self.storage.native[self.storage.state.attempt.id, stage.id].newest}"
            for stage in self.storage.graph
        )


def simulate(seed: int, graph: Graph = FIVE, parts: Parts | None = None) -> Counter[str]:
    """Run one seed and return what happened in it, by name.

    Raises:
        InvariantViolated: an invariant does not hold; the message begins with the seed.
    """
    simulation = Simulation(seed, graph, parts or Parts())
    try:
        return simulation.run()
    except (AssertionError, AbsError, RuntimeError) as error:
        raise InvariantViolated(f"seed {seed}, {len(graph)} stages: {error}") from error


@click.command()
@click.option("--runs", default=2000, show_default=True, help="Seeds to run.")
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option("--graph", type=click.Choice(sorted(GRAPHS)), default="five", show_default=True)
def main(runs: int, seed: int, graph: str) -> None:
    """Run seeds of the simulated job; stop at the first that violates an invariant."""
    begun, seen = time.process_time(), Counter[str]()
    for number in range(seed, seed + runs):
        seen += simulate(number, GRAPHS[graph])
    seconds = time.process_time() - begun
    for name, count in sorted(seen.items()):
        click.echo(f"{count:>9,}  {name}")
    click.echo(
        f"{runs:,} runs in {seconds:.1f} s of one core, {runs / seconds * 60:,.0f} a minute, no violation"
    )


if __name__ == "__main__":
    main()
