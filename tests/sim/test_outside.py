"""A job, its attempts, runs that are late and a sink outside, in any order: every row that counts, once.

The job is a log of entries with cuts; the sink has rows, a mark and a run number that change at once. Each
part of the protocol is also left out, and that is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from spark_abs.model import NO_EPOCH, AttemptId, Branch, CheckpointId, RunId, Version, counts
from spark_abs.protocol import outside
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.outside import Epoch, Mark, Owner

RETAINED = 1
OWNER = Owner("root", "job", "sink", RunId(1))


@dataclass
class Sink:
    """The place outside."""

    run: int = 0
    mark: Mark | None = None
    rows: list[Version] = field(default_factory=list)
    history: list[tuple[Version, CheckpointId, list[Version]]] = field(default_factory=list)
    places: list[Version] = field(default_factory=lambda: [FIRST_ENTRY])
    """Of a sink that goes back to places, and undoes nothing row by row: where it can."""


@dataclass
class Sender:
    """A run that sends; it may be late with what it has in hand."""

    run: int
    attempt: AttemptId
    known: bool = False
    mark: Mark | None = None
    asked: tuple[Version, ...] = ()
    hand: tuple[Mark, Mark, list[Version]] | None = None


class Outside(RuleBasedStateMachine):
    """Parts of the protocol, to be left out by mutants."""

    next_epochs = staticmethod(outside.next_epochs)
    mark_after_rollback = staticmethod(outside.mark_after_rollback)
    needed_from = staticmethod(outside.needed_from)
    undone_from = staticmethod(outside.undone_from)
    asked_for = staticmethod(outside.asked_for)
    next_batches = staticmethod(outside.next_batches)
    each_batch = False
    fences = True
    looks = True
    undoes = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Version, AttemptId]] = []
        self.forks: dict[AttemptId, tuple[AttemptId, Version] | None] = {AttemptId(1): None}
        self.attempt = AttemptId(1)
        self.ids = 0
        self.kept: list[Mark] = []
        self.saved: set[int] = set()
        self.trimmed = Version(0)
        self.sink = Sink()
        self.runs = 0
        self.late: list[Sender] = []
        self.begin()

    # -- the job

    def line(self, attempt: AttemptId, until: Version | None) -> tuple[Branch, ...]:
        fork = self.forks[attempt]
        before = self.line(*fork) if fork is not None else ()
        return (*before, Branch(attempt, until))

    @property
    def path(self) -> tuple[Branch, ...]:
        return self.line(self.attempt, None)

    def begin(self) -> None:
        self.runs += 1
        self.sender = Sender(self.runs, self.attempt)

    def add(self) -> Version:
        self.log.append((Version(len(self.log) + 1), self.attempt))
        return self.log[-1][0]

    def read(self, path: Sequence[Branch], after: Version, until: Version) -> list[Version]:
        found = [v for v, attempt in self.log if after < v <= until and counts(path, attempt, v)]
        assert not found or min(found) > self.trimmed, f"entry {min(found)} is wanted and was deleted"
        return found

    @rule(entries=st.integers(1, 3))
    def write(self, entries: int) -> None:
        for _ in range(entries):
            self.add()

    @rule(savepoint=st.booleans())
    def complete(self, savepoint: bool) -> None:
        self.ids += 1
        if savepoint:
            self.saved.add(self.ids)
        self.kept.append(Mark(self.attempt, CheckpointId(self.ids), self.add()))

    @rule()
    def tidy(self) -> None:
        """Retire as retention does, then trim."""
        periodic = [m for m in self.kept if m.checkpoint not in self.saved]
        mine = [m for m in periodic if outside.is_on(self.path, m)][-RETAINED:]
        if len(mine) == RETAINED:
            first = mine[0].checkpoint
            self.kept = [m for m in self.kept if m.checkpoint >= first or m.checkpoint in self.saved]
        if self.sender.known and self.kept:
            mark = self.sender.mark or Mark(AttemptId(1), NO_EPOCH, Version(0))
            line = self.line(mark.attempt, mark.version)
            kept = [self.line(m.attempt, m.version) for m in self.kept]
            needed = self.needed_from(mark, line, kept)
            self.trimmed = max(self.trimmed, min(needed, *(m.version for m in self.kept)))
            self.forget(self.undone_from(line, kept))
            self.sender.asked = tuple(self.asked_for(line, kept))

    def forget(self, floor: Version) -> None:
        self.sink.history = [epoch for epoch in self.sink.history if epoch[0] > floor]

    @rule()
    def crash(self) -> None:
        self.late.append(self.sender)
        self.begin()

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.kept:
            self.go_back(data.draw(st.sampled_from(self.kept)))

    def go_back(self, to: Mark) -> None:
        self.late.append(self.sender)
        attempt = AttemptId(max(self.forks) + 1)
        self.forks[attempt] = (to.attempt, to.version)
        self.attempt = attempt
        self.runs += 1
        self.sink.run = self.runs
        mark = self.sink.mark
        if mark is not None and self.undoes:
            line = self.line(mark.attempt, mark.version)
            back = self.mark_after_rollback(mark, line, self.path, self.kept)
            places = self.sink.places
            assert back.version in places, f"the place after entry {back.version} is asked for"
            self.sink.places = [place for place in places if place <= back.version]
            for until, _, rows in reversed(self.sink.history):
                if until > back.version:
                    del self.sink.rows[len(self.sink.rows) - len(rows) :]
            self.sink.history = [pair for pair in self.sink.history if pair[0] <= back.version]
            self.sink.mark = back
        self.begin()

    # -- who sends

    @rule()
    def step(self) -> None:
        self.advance(self.sender)

    @rule(data=st.data())
    def step_late(self, data: st.DataObject) -> None:
        if self.late:
            self.advance(data.draw(st.sampled_from(self.late)))

    def advance(self, sender: Sender) -> None:
        if not sender.known:
            if self.fences and self.sink.run > sender.run:
                return
            self.sink.run = max(self.sink.run, sender.run)
            sender.mark, sender.known = (self.sink.mark if self.looks else None), True
        elif sender.hand is None:
            path = self.line(sender.attempt, None)
            mark = sender.mark or Mark(AttemptId(1), NO_EPOCH, Version(0))
            epochs = self.next(mark, path)
            if epochs and sender is self.sender:
                after, until = epochs[0]
                sender.hand = (after, until, self.read(path, after.version, until.version))
        else:
            after, until, rows = sender.hand
            sender.hand = None
            if self.fences and self.sink.run != sender.run:
                return
            if self.looks and self.fences and self.sink.mark not in (after, None):
                sender.known = False
                return
            self.sink.rows += rows
            self.sink.history.append((until.version, until.checkpoint, rows))
            epoch = Epoch(OWNER, after, until, asked=sender.asked)
            places = [*self.sink.places, until.version]
            self.sink.places = [place for place in places if epoch.may_return_to(place)]
            self.sink.mark = sender.mark = until

    def next(self, mark: Mark, path: Sequence[Branch]) -> tuple[tuple[Mark, Mark], ...]:
        if not self.each_batch:
            return self.next_epochs(mark, self.kept, path)
        return self.next_batches(mark, [(attempt, version) for version, attempt in self.log], self.kept, path)

    # -- what must hold

    @invariant()
    def every_row_once(self) -> None:
        mark = self.sink.mark
        if mark is None:
            assert self.sink.rows == []
            return
        line = self.line(mark.attempt, mark.version)
        assert self.sink.rows == [v for v, a in self.log if v <= mark.version and counts(line, a, v)]

    def teardown(self) -> None:
        """In the end everything complete is there, and nothing else."""
        for _ in range(3 * len(self.kept) + 3 + 3 * len(self.log) * self.each_batch):
            self.advance(self.sender)
        self.every_row_once()
        newest = [m.version for m in self.kept if outside.is_on(self.path, m)]
        if self.each_batch:
            newest += [v for v, a in self.log if counts(self.path, a, v)]
        if newest:
            sent = [v for v, a in self.log if v <= max(newest) and counts(self.path, a, v)]
            assert self.sink.rows == sent


EXAMPLES = settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck))
# Ten times as many as the rarest mutant needs. What examples there are depends on the modules that other
# tests have loaded: Hypothesis takes constants from them.
UNTIL_CAUGHT = settings(
    EXAMPLES,
    max_examples=15_000,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
)


def test_every_row_that_counts_is_outside_once() -> None:
    run_state_machine_as_test(Outside, settings=EXAMPLES)


class Batches(Outside):
    """Takes each batch, also those after the newest checkpoint."""

    each_batch = True


def test_every_batch_that_counts_is_outside_once() -> None:
    run_state_machine_as_test(Batches, settings=EXAMPLES)


def _all_entries(
    mark: Mark, entries: Iterable[tuple[AttemptId, Version]], cuts: Iterable[Mark], _: Sequence[Branch]
) -> tuple[tuple[Mark, Mark], ...]:
    ahead = [Mark(a, mark.checkpoint, v) for a, v in entries if v > mark.version]
    return tuple(zip([mark, *ahead], ahead, strict=False))


def _to_whole_epochs(
    mark: Mark, entries: Iterable[tuple[AttemptId, Version]], cuts: Iterable[Mark], path: Sequence[Branch]
) -> tuple[tuple[Mark, Mark], ...]:
    """Take what there is at once, over cuts that complete later: one cannot go back to these."""
    found = outside.next_batches(mark, entries, cuts, path)
    return ((mark, found[-1][1]),) if found else ()


BATCH_MUTANTS: dict[str, tuple[str, Callable[..., object] | bool]] = {
    "sends what an abandoned attempt wrote": ("next_batches", staticmethod(_all_entries)),
    "sends over cuts": ("next_batches", staticmethod(_to_whole_epochs)),
    "lets replaced runs commit": ("fences", False),
    "undoes nothing": ("undoes", False),
}


@pytest.mark.parametrize("name", BATCH_MUTANTS)
def test_a_protocol_of_batches_that_does_less_is_caught(name: str) -> None:
    part, replaced = BATCH_MUTANTS[name]
    mutant = type("Mutant", (Batches,), {part: replaced})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(mutant, settings=UNTIL_CAUGHT)


def _all_cuts(mark: Mark, cuts: Iterable[Mark], _: Sequence[Branch]) -> tuple[tuple[Mark, Mark], ...]:
    ordered = sorted((c for c in cuts if c.version > mark.version), key=lambda c: c.version)
    return tuple(zip([mark, *ordered], ordered, strict=False))


def _to_the_target(mark: Mark, _: object, path: Sequence[Branch], cuts: Iterable[Mark]) -> Mark:
    target = path[-2]
    return next((c for c in cuts if (c.attempt, c.version) == (target.attempt, target.until)), mark)


def _by_their_cuts(_: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> tuple[Version, ...]:
    return tuple(sorted({until for target in kept if (until := target[-1].until) is not None}))


def _for_good(line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> tuple[Version, ...]:
    return (*outside.asked_for(line, kept), Version(2**62))


MUTANTS: dict[str, tuple[str, Callable[..., object] | bool]] = {
    "sends what an abandoned attempt completed": ("next_epochs", staticmethod(_all_cuts)),
    "takes the target for the fork": ("mark_after_rollback", staticmethod(_to_the_target)),
    "lets replaced runs commit": ("fences", False),
    "does not look at the mark": ("looks", False),
    "undoes nothing": ("undoes", False),
    "keeps no place where an abandoned branch begins": ("asked_for", staticmethod(_by_their_cuts)),
    "keeps no place of what completes later": ("asked_for", staticmethod(_for_good)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_protocol_that_does_less_is_caught(name: str) -> None:
    part, replaced = MUTANTS[name]
    mutant = type("Mutant", (Outside,), {part: replaced})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(mutant, settings=UNTIL_CAUGHT)


class TakesTheMarkForItsCheckpoint(Batches):
    @staticmethod
    def mark_after_rollback(
        mark: Mark, line: Sequence[Branch], path: Sequence[Branch], cuts: Iterable[Mark]
    ) -> Mark:
        cut = next((c for c in cuts if c.checkpoint == mark.checkpoint), mark)
        return mark if outside.is_on(path, cut) else outside.mark_after_rollback(mark, line, path, cuts)


@pytest.mark.parametrize("kind", [Batches, TakesTheMarkForItsCheckpoint])
def test_batches_behind_a_checkpoint_are_undone_when_one_goes_back_to_it(kind: type[Batches]) -> None:
    job = kind()
    job.complete(savepoint=False)
    job.write(2)
    for _ in range(8):
        job.step()
    assert job.sink.rows == [1, 2, 3]
    job.go_back(job.kept[0])
    if kind is Batches:
        assert job.sink.rows == [1]
        job.every_row_once()
        job.teardown()
        return
    job.write(1)
    with pytest.raises(AssertionError):
        job.teardown()


class TrimsByTheMark(Outside):
    @staticmethod
    def needed_from(mark: Mark, line: Sequence[Branch], kept: Iterable[Sequence[Branch]]) -> Version:
        return mark.version


@pytest.mark.parametrize("kind", [Outside, TrimsByTheMark])
def test_what_only_an_abandoned_savepoint_needs_is_not_trimmed(kind: type[Outside]) -> None:
    """Savepoint 2 is left for checkpoint 1, nothing of it was sent; then one goes back to it."""
    job = kind()
    job.complete(savepoint=False)
    job.write(2)
    job.complete(savepoint=True)
    first, left = job.kept
    job.go_back(first)
    job.complete(savepoint=False)
    for _ in range(6):
        job.step()
    job.tidy()
    assert [mark.checkpoint for mark in job.kept] == [2, 3]
    job.go_back(left)
    if kind is Outside:
        job.teardown()
    else:
        with pytest.raises(AssertionError, match="was deleted"):
            job.teardown()


class ForgetsByTheCheckpoint(Outside):
    def forget(self, floor: Version) -> None:
        oldest = min(mark.checkpoint for mark in self.kept)
        self.sink.history = [epoch for epoch in self.sink.history if epoch[1] > oldest]


@pytest.mark.parametrize("kind", [Outside, ForgetsByTheCheckpoint])
def test_what_only_the_way_to_an_abandoned_savepoint_undoes_is_not_forgotten(kind: type[Outside]) -> None:
    """Savepoint 3 follows checkpoint 1, and one went on from checkpoint 2: its epoch has a lower number."""
    job = kind()
    job.complete(savepoint=False)
    job.complete(savepoint=False)
    first, second = job.kept
    for _ in range(5):
        job.step()
    job.go_back(first)
    job.complete(savepoint=True)
    saved = job.kept[-1]
    job.go_back(second)
    for _ in range(2):
        job.complete(savepoint=False)
    for _ in range(9):
        job.step()
    job.tidy()
    assert [mark.checkpoint for mark in job.kept] == [3, 5]
    job.go_back(saved)
    if kind is Outside:
        job.every_row_once()
        job.teardown()
    else:
        with pytest.raises(AssertionError):
            job.every_row_once()
