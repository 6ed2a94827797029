"""The stateful functions that a stage's function declares when it is called, for checks and manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_abs.errors import GraphError
from spark_abs.manifest import StateFunction

if TYPE_CHECKING:
    from pyspark import Accumulator

    from spark_abs.settings import Settings


@dataclass(frozen=True, slots=True)
class Before:
    """The facts of a stage's last finished batch, for functions without their own record."""

    watermark_ms: int = 0
    functions: Mapping[str, StateFunction] = field(default_factory=dict)
    """The forms of the stored state, by uid; without an entry: as declared."""


NOTHING = Before()


@dataclass
class Declared:
    """The stateful functions of one stage, in the order in which they were declared."""

    stage: str
    settings: Settings | None = None
    """The settings of the job; None: those of session and environment."""
    provider: str | None = None
    """Class of the stage's state store provider; None: the session's."""
    before: Before = NOTHING
    """For partitions without a record, as after a repartitioning."""
    evolved: Mapping[str, StateFunction] = field(default_factory=dict)
    """The known forms of the stage's functions with the history of their state, by uid."""
    functions: list[StateFunction] = field(default_factory=list)
    late: list[Accumulator[int]] = field(default_factory=list)
    """Counters of the rows that each function has dropped as late."""

    def add(self, function: StateFunction, late: Accumulator[int]) -> None:
        """Add a function.

        Raises:
            GraphError: the stage already has a function with that uid.
        """
        if any(f.uid == function.uid for f in self.functions):
            where = f"stage {self.stage!r}" if self.stage else "the query"
            raise GraphError(
                f"{where}: two stateful functions have the uid {function.uid!r}. State is found by the uid: "
                "give each function its own with uid=…"
            )
        self.functions.append(function)
        self.late.append(late)

    def place(self, places: Sequence[str]) -> None:
        """Put the functions in the order of the stage's plan, and drop those that the plan does not use."""
        self.functions.sort(key=lambda f: places.index(f.uid) if f.uid in places else len(places))
        self.functions[:] = [f for f in self.functions if f.uid in places]

    def dropped(self) -> int:
        """Return the number of late rows that all functions of the stage have dropped."""
        return sum(int(count.value) for count in self.late)


_declaring: ContextVar[Declared | None] = ContextVar("spark_abs.state.declaring", default=None)


def declaring() -> Declared | None:
    """Return the collection of functions of the stage that is being built; None outside of a stage."""
    return _declaring.get()


@contextmanager
def gathering(declared: Declared) -> Iterator[Declared]:
    """Gather the functions that are declared meanwhile."""
    token = _declaring.set(declared)
    try:
        yield declared
    finally:
        _declaring.reset(token)
