"""What processes of the simulated job have in memory between two steps: frozen values, lost in a crash."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from spark_abs.model import Barrier, BatchId, CheckpointId, Version
from spark_abs.protocol.messages import Decided, Effect
from tests.simulator.cluster import Stage, State
from tests.simulator.table import Planned, Row

_OWNED = {list, dict, set, deque}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was evaluated, on its way to the outputs."""

    id: BatchId
    unique: str
    rows: tuple[Row, ...]
    barrier: Barrier | None
    cancel: CheckpointId | None
    output: int = 0
    """Where it goes next: to a channel by its number, then to the sink, the snapshotter, the commit log."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The inputs have ended, and the outputs before `output` say so."""

    output: int


@dataclass(frozen=True, slots=True)
class Taking:
    """The agent takes a barrier; `seen` was the newest version of each output when it began."""

    barrier: Barrier
    seen: tuple[Version, ...]
    passing: bool = False
    """Whether it has seen that no batch is planned beyond the last finished one."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """A verdict that is being carried out: its outcome is durable, and perhaps told to the gates."""

    effect: Effect
    outcome: Decided
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """A cut that was captured and is not yet copied."""

    barrier: Barrier
    stage: Stage
    batch: BatchId
    planned: Planned
    state: State


def detached(thing: _T) -> _T:
    """Return a copy with lists, dicts, sets and queues of its own; what these hold is shared."""
    twin = object.__new__(type(thing))
    own = vars(twin)
    for name, held in vars(thing).items():
        own[name] = held.copy() if type(held) in _OWNED else held
    return twin
