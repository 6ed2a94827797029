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
"""Where a stage begins in a channel that existed before the stage read it."""
FIRST_ENTRY = Version(0)
"""The commit that creates a channel."""
LEAVE = "start with allow_non_restored_state=True"
"""How to leave state and positions behind, for messages."""


def first_position(channel: ChannelId, feedback: bool = False) -> Position:
    """Return the start of a channel, for a stage that reads it from its creation."""
    return Position(channel, AttemptId(1), FIRST_ENTRY, NO_EPOCH, feedback=feedback)


class Verdict(StrEnum):
    """The effect of a start on a stage."""

    KEPT = "kept"
    """The stage continues at its position."""
    NEW = "new"
    """It begins."""
    LEFT = "left"
    """The stage is no longer declared; its state and positions are left behind."""
    REFUSED = "refused"
    """The stage prevents the start of the job."""


class UnderWay(StrEnum):
    """How far the batch after a stage's last finished batch was written."""

    NOTHING = "nothing"
    """None was planned."""
    PLANNED = "planned"
    """No output holds the batch."""
    WRITTEN = "written"
    """Every output holds the batch; only Spark has not recorded its end."""
    TORN = "torn"
    """Some outputs hold the batch."""
    NAMED = "named"
    """Some outputs hold the batch, and its first commit names the files of the other outputs."""

    @property
    def decided(self) -> bool:
        """Whether every output holds the batch, or can get it without the query."""
        return self in (UnderWay.WRITTEN, UnderWay.NAMED)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The position of a recorded stage."""

    sources: tuple[Position | None, ...] = ()
    """The position of each source, in the order of Spark's offset file; None for a native source."""
    finished: BatchId = NO_BATCH
    under_way: UnderWay = UnderWay.NOTHING
    stateful: bool = False
    calls_functions: bool = False
    """Whether a sink of the stage is a function: the batches passed to it are not recorded."""
    lost: bool = False
    """Whether the stage's native checkpoint is damaged or missing."""
    first: tuple[Position | None, ...] = ()
    """For a stage without a finished batch: the positions at which its first batch begins.

    Empty if the positions are the same.
    """
    lacks: Collection[ChannelId] = ()
    """Channels that lack the unfinished batch and get the files that its first commit names for them."""

    @property
    def positions(self) -> tuple[Position, ...]:
        """The stage's positions in its channels."""
        return tuple(p for p in self.sources if p is not None)

    @property
    def ended(self) -> BatchId:
        """The last batch that all outputs hold completely."""
        return BatchId(self.finished + 1) if self.under_way.decided else self.finished


def newly_read(shape: StageShape, reached: StageProgress) -> frozenset[ChannelId]:
    """Return the declared channels of a stage that it did not read before."""
    return frozenset(_read(shape)) - {p.channel for p in reached.positions}


def less_read(reached: StageProgress, shape: StageShape | None) -> tuple[Position, ...]:
    """Return the least position of a stage in each channel that it is now declared to read less often."""
    now = _read(shape) if shape is not None else Counter[ChannelId]()
    gone = Counter(p.channel for p in reached.positions) - now
    found = {p.channel: p for p in sorted(reached.positions, key=lambda p: -p.version) if p.channel in gone}
    return tuple(found.values())


def _read(shape: StageShape) -> Counter[ChannelId]:
    return Counter(ChannelId(s.name) for s in shape.sources if s.kind == CHANNEL)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The job as the root has recorded it."""

    where: str
    """The origin of the record, for messages: `the last run`, `checkpoint 7`."""
    shapes: tuple[StageShape, ...] = ()
    progress: Mapping[StageId, StageProgress] = field(default_factory=dict)
    left: Collection[StageId] = ()
    """Stages that were removed since the attempt began."""
    ends: Mapping[ChannelId, Version] = field(default_factory=dict)
    """The entry of each channel after which a new stage begins; a channel that is not named begins at 0."""
    earliest: Mapping[ChannelId, Version] = field(default_factory=dict)
    """The entry of each channel after which no entry was removed."""
    unread: Callable[[Position], int] = lambda _: 0
    """Counts the entries with rows after a position in its channel."""
    epoch: CheckpointId = NO_EPOCH
    """The newest claimed checkpoint id; it has an outcome."""

    def shape(self, stage: StageId) -> StageShape | None:
        """Return the record of a stage."""
        return next((s for s in self.shapes if s.stage == stage), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources of a continuing stage, in their new order."""

    sources: tuple[int | Position | None, ...]
    """For each source its old index; for a new channel its first position; None for a new native source."""


@dataclass(frozen=True, slots=True)
class StageChange:
    """The effect of a start on one stage, with reasons."""

    stage: StageId
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """The differences and their effect; for a refused stage the reasons."""
    starts: tuple[Start, ...] = ()
    """The first positions in the stage's channels, if the stage has finished no batch."""
    layout: Layout | None = None
    """Set if the sources or their order have changed.

    It is set even before the first batch: a frozen driver may still plan that batch from the old sources in
    the old directory.
    """
    ends_batch: bool = False
    """Whether the unfinished batch must first be written to all outputs and recorded as finished."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on every stage, declared ones first."""

    where: str
    """The origin of the record with which the job is compared."""
    stages: tuple[StageChange, ...]
    obstacles: tuple[str, ...] = ()
    """Further reasons that prevent the start."""
    drops_sinks: bool = False
    """Whether the job has a sink no more, or has it at another table."""

    @property
    def refused(self) -> tuple[StageChange, ...]:
        """The stages that prevent the start."""
        return tuple(s for s in self.stages if s.verdict is Verdict.REFUSED)

    @property
    def rests_on_outputs(self) -> bool:
        """Whether the comparison would be wrong if an earlier run committed one more batch to an output.

        A sink that leaves the job has its last rows: no start fences its table later.
        """
        verdicts = {s.verdict for s in self.stages}
        changed = any(s.layout is not None or s.ends_batch for s in self.stages)
        return (
            changed or self.drops_sinks or Verdict.LEFT in verdicts or verdicts >= {Verdict.KEPT, Verdict.NEW}
        )

    @property
    def ok(self) -> bool:
        """Whether the job starts."""
        return not (self.refused or self.obstacles)

    def reasons(self) -> str:
        """Return why the job cannot start."""
        lines = [f"stage {s.stage!r}: {note}" for s in self.refused for note in s.notes]
        return "\n".join([f"the job as declared cannot continue from {self.where}:", *lines])

    def __str__(self) -> str:
        """Return a line with the verdict for each stage, followed by its notes."""
        lines = [f"compared with {self.where}:"]
        for stage in self.stages:
            lines.append(f"{stage.stage}: {stage.verdict}")
            lines += [f"  {line}" for note in stage.notes for line in note.split("\n")]
        lines += [f"refused: {obstacle}" for obstacle in self.obstacles]
        return "\n".join(lines)
