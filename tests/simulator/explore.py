"""Every interleaving of a small system, breadth first; a violation comes with a shortest way to it.

A system is a `World`: it is copied and moved choice by choice. Two states are one if their fingerprints are
equal; these are exact, no hashes of states, so nothing is taken for seen that was not.

Beside each step, two things are looked at:

- where nothing but a fault can happen, the system has to be finished;
- from every state a finished one can be reached.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from spark_abs.errors import AbsError
from tests.invariants import InvariantViolated


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that may happen next."""

    actor: str
    pick: int = 0
    """Which of several, e.g. messages."""
    fault: bool = False
    """Whether it need not happen for the system to go on."""


class World(Protocol):
    """A small system in one of its states. The same choices lead to the same state, always."""

    def copy(self) -> World:
        """Return the same state, to be moved on its own."""
        ...

    def choices(self) -> Sequence[Choice]:
        """Return what may happen next; a choice that changes nothing may be among it."""
        ...

    def take(self, choice: Choice) -> None:
        """Let it happen.

        Raises:
            InvariantViolated, AbsError: something does not hold.
        """
        ...

    def fingerprint(self) -> Hashable:
        """Return a value that is equal for equal states among copies of one world, and for no others."""
        ...

    def unfinished(self) -> Iterable[str]:
        """Yield what is wrong, given that nothing can happen any more but faults."""
        ...

    def facts(self) -> Sequence[str]:
        """Return what a reader of a counterexample wants to know of the state, a line each."""
        ...


@dataclass(frozen=True, slots=True)
class Explored:
    """A whole state space, in which nothing was violated."""

    states: int
    steps: int
    """Choices that lead from one state to another."""
    depth: int
    """Choices of the state that is furthest from the start."""
    ends: int
    """States in which only faults can happen."""


_YOUNG = 20_000
"""How many objects come before Python looks for unused ones: a copy of a world has some hundreds."""


class Violation(InvariantViolated):
    """What does not hold, and a shortest list of steps that leads there; the message tells both."""

    def __init__(self, steps: tuple[str, ...], wrong: str) -> None:
        super().__init__("\n".join([f"after {len(steps)} steps: {wrong}", *steps]))
        self.steps = steps
        self.wrong = wrong


class TooLarge(AbsError):
    """The system has more states than were to be looked at."""


class _Search:
    def __init__(self, first: World) -> None:
        self.first = first
        self.came: list[tuple[int, Choice] | None] = [None]
        """How each state was reached first."""
        self.before: list[list[int]] = [[]]
        self.depth = [0]
        self.ends: list[int] = []
        self.steps = 0
        self.numbers = {first.fingerprint(): 0}
        self.waiting = deque([(0, first)])

    def run(self, most: int) -> Explored:
        while self.waiting:
            self._expand(*self.waiting.popleft())
            if len(self.numbers) > most:
                raise TooLarge(f"more than {most:,} states, some {self.depth[-1]} steps deep")
        self._all_can_end()
        return Explored(len(self.numbers), self.steps, max(self.depth), len(self.ends))

    def _expand(self, state: int, world: World) -> None:
        here, over = world.fingerprint(), True
        next_world = world.copy()
        for choice in world.choices():
            try:
                next_world.take(choice)
            except (AssertionError, AbsError) as error:
                raise self._violation([*self._path(state), choice], str(error)) from error
            there = next_world.fingerprint()
            if there == here:
                continue
            self.steps += 1
            over = over and choice.fault
            number = self.numbers.setdefault(there, len(self.numbers))
            if number == len(self.came):
                self.came.append((state, choice))
                self.before.append([])
                self.depth.append(self.depth[state] + 1)
                self.waiting.append((number, next_world))
            self.before[number].append(state)
            next_world = world.copy()
        if over:
            self.ends.append(state)
            if wrong := list(world.unfinished()):
                raise self._violation(self._path(state), "\n".join(wrong))

    def _all_can_end(self) -> None:
        can, look = set(self.ends), list(self.ends)
        while look:
            for earlier in self.before[look.pop()]:
                if earlier not in can:
                    can.add(earlier)
                    look.append(earlier)
        lost = next((state for state in range(len(self.came)) if state not in can), None)
        if lost is not None:
            raise self._violation(self._path(lost), "3: from here the job goes on for ever and cannot end")

    def _path(self, state: int) -> list[Choice]:
        """Return the choices that lead to a state."""
        found = []
        while (came := self.came[state]) is not None:
            state, choice = came
            found.append(choice)
        return found[::-1]

    def _violation(self, path: Sequence[Choice], wrong: str) -> Violation:
        """Take the steps again, and tell after each what is new."""
        world, steps = self.first.copy(), []
        known = Counter(world.facts())
        for number, choice in enumerate(path, start=1):
            # the last step may be the one that is refused: what it did until then is told too
            with suppress(AssertionError, AbsError):
                world.take(choice)
            now = Counter(world.facts())
            news = "; ".join((now - known).elements())
            news = news or "no longer: " + (
                "; ".join((known - now).elements()) or "(nothing that can be seen)"
            )
            steps.append(f"{number:>3}. {choice.actor}: {news}")
            known = now
        return Violation(tuple(steps), wrong)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Let Python look less often for objects that refer to each other: worlds do, and each is soon unused.

    A sixth of a search is saved.
    """
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def explore(first: World, most: int = 1_000_000) -> Explored:
    """Visit every state that can be reached from `first`; all of them, or an error.

    Raises:
        Violation: something does not hold; no shorter way leads to a violation by a step.
        TooLarge: there are more states than `most`.
    """
    with _seldom_collected():
        return _Search(first).run(most)
