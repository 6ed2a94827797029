"""What nobody in the simulated cluster decides: who is next, how much a batch takes, which message comes."""

from __future__ import annotations

from random import Random
from typing import Protocol


class Chance(Protocol):
    """Answers every question that the job does not decide: at random, or one answer after the other."""

    def happens(self, what: str, likelihood: float) -> bool:
        """Say whether something happens now."""
        ...

    def pick(self, what: str, count: int) -> int:
        """Choose one of `count` things, from 0."""
        ...


class Luck:
    """Chance by a seed."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def happens(self, what: str, likelihood: float) -> bool:
        """Throw a coin."""
        return self.rng.random() < likelihood

    def pick(self, what: str, count: int) -> int:
        """Throw a die."""
        return int(self.rng.random() * count)
