"""The recorded facts of a job, and the effect of its new declaration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from spark_abs.manifest import CHANNEL, StageShape
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    Position,
    StageId,
    Version,
)
from spark_abs.protocol.attempt import Start

Begin = Literal["cut", "earliest"]
"""Where a stage begins to read a channel that is older than its reading it."""
FIRST_ENTRY = Version(0)
"""The commit that creates a channel."""
LEAVE = "start with allow_non_restored_state=True"
"""How a user leaves behind state and positions, for messages."""


def first_position(channel: ChannelId, feedback: bool = False) -> Position:
    """Return where a channel begins for a stage that is there from its creation on."""
    return Position(channel, AttemptId(1), FIRST_ENTRY, NO_EPOCH, feedback=feedback)


class Verdict(StrEnum):
    """The effect of a start on a stage."""

    KEPT = "kept"
    """It continues at its position."""
    NEW = "new"
    """It begins."""
    LEFT = "left"
    """It is no longer declared; its state and positions are left behind."""
    REFUSED = "refused"
    """The job does not start."""


class UnderWay(StrEnum):
    """How far the batch after the last finished one of a stage has come."""

    NOTHING = "nothing"
    """None was planned."""
    PLANNED = "planned"
    """No output holds it."""
    WRITTEN = "written"
    """Every output holds it: only Spark has not recorded its end."""
    TORN = "torn"
    """Some outputs hold it."""
    NAMED = "named"
    """Some outputs hold it, and the first commit names the files of the others."""

    @property
    def decided(self) -> bool:
        """Whether every output holds it, or can be brought to without the query."""
        return self in (UnderWay.WRITTEN, UnderWay.NAMED)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The position of a recorded stage."""

    sources: tuple[Position | None, ...] = ()
    """Where each of its sources stands, in the order of Spark's offset file: None for a native one."""
    finished: BatchId = NO_BATCH
    under_way: UnderWay = UnderWay.NOTHING
    stateful: bool = False
    calls_functions: bool = False
    """Whether one of its sinks is a function: the batches that it has seen are not recorded."""
    lost: bool = False
    """Its native checkpoint is not whole."""
    first: tuple[Position | None, ...] = ()
    """Where it begins to read each source if it has finished no batch: its first one is repeated from there.
    Empty if that is where it stands."""
    lacks: Collection[ChannelId] = ()
    """Its channels that do not hold the batch under way, and get what its first commit names for them."""

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where it stands in its channels."""
        return tuple(p for p in self.sources if p is not None)

    @property
    def ended(self) -> BatchId:
        """The last batch that all outputs hold completely."""
        return BatchId(self.finished + 1) if self.under_way.decided else self.finished


def newly_read(shape: StageShape, reached: StageProgress) -> frozenset[ChannelId]:
    """Return the channels that a stage is declared to read and did not read before."""
    return frozenset(_read(shape)) - {p.channel for p in reached.positions}


def less_read(reached: StageProgress, shape: StageShape | None) -> tuple[Position, ...]:
    """Return where a stage stands, at the least, in each channel that it is declared to read less often."""
    now = _read(shape) if shape is not None else Counter[ChannelId]()
    gone = Counter(p.channel for p in reached.positions) - now
    found = {p.channel: p for p in sorted(reached.positions, key=lambda p: -p.version) if p.channel in gone}
    return tuple(found.values())


def _read(shape: StageShape) -> Counter[ChannelId]:
    return Counter(ChannelId(s.name) for s in shape.sources if s.kind == CHANNEL)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The job as the root knows it."""

    where: str
    """The origin of the record, for messages: `the last run`, `checkpoint 7`."""
    shapes: tuple[StageShape, ...] = ()
    progress: Mapping[StageId, StageProgress] = field(default_factory=dict)
    left: Collection[StageId] = ()
    """Stages that were left out since the attempt began."""
    ends: Mapping[ChannelId, Version] = field(default_factory=dict)
    """Up to which entry each channel is in the past of a stage that begins now; it is there from 0 if it is
    not named."""
    earliest: Mapping[ChannelId, Version] = field(default_factory=dict)
    """After which entry each channel is still whole."""
    unread: Callable[[Position], int] = lambda _: 0
    """Counts the entries with rows after a position in its channel."""
    epoch: CheckpointId = NO_EPOCH
    """The newest id that was ever claimed: it has an outcome."""

    def shape(self, stage: StageId) -> StageShape | None:
        """Return what is recorded of a stage."""
        return next((s for s in self.shapes if s.stage == stage), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources of a stage that goes on, in their new order."""

    sources: tuple[int | Position | None, ...]
    """The place that each had; of a channel that begins, its first position; None: a native one begins."""


@dataclass(frozen=True, slots=True)
class StageChange:
    """The effect of a start on one stage, with reasons."""

    stage: StageId
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """What differs and what follows from it; of a refused stage the reasons."""
    starts: tuple[Start, ...] = ()
    """Where it begins to read its channels, if it has finished no batch."""
    layout: Layout | None = None
    """If its sources are others than before, or in another order; also before its first batch: a driver that
    was frozen may still plan that one, of the old sources, where it was."""
    ends_batch: bool = False
    """Whether the batch under way is to be brought to all its outputs, and recorded as finished, first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on every stage, declared ones first."""

    where: str
    """Who recorded what the job is compared with."""
    stages: tuple[StageChange, ...]
    obstacles: tuple[str, ...] = ()
    """What else the job does not start for."""

    @property
    def refused(self) -> tuple[StageChange, ...]:
        """The stages for which the job does not start."""
        return tuple(s for s in self.stages if s.verdict is Verdict.REFUSED)

    @property
    def rests_on_outputs(self) -> bool:
        """Whether the comparison would be wrong if an earlier run committed one more batch to an output."""
        verdicts = {s.verdict for s in self.stages}
        changed = any(s.layout is not None or s.ends_batch for s in self.stages)
        return changed or Verdict.LEFT in verdicts or verdicts >= {Verdict.KEPT, Verdict.NEW}

    @property
    def ok(self) -> bool:
        """Whether the job starts."""
        return not (self.refused or self.obstacles)

    def reasons(self) -> str:
        """Return why the job does not start."""
        lines = [f"stage {s.stage!r}: {note}" for s in self.refused for note in s.notes]
        return "\n".join([f"the job as it is declared cannot go on from {self.where}:", *lines])

    def __str__(self) -> str:
        """Return the verdict on each stage, a line each and its notes below."""
        lines = [f"compared with {self.where}:"]
        for stage in self.stages:
            lines.append(f"{stage.stage}: {stage.verdict}")
            lines += [f"  {line}" for note in stage.notes for line in note.split("\n")]
        lines += [f"refused: {obstacle}" for obstacle in self.obstacles]
        return "\n".join(lines)
