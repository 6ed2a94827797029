"""The values that the page shows, read from `control/`, `checkpoints/`, `history/` and channels.

Times and durations are milliseconds, sizes bytes. The page computes its figures from these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spark_abs.model import AttemptId, ChannelId, CheckpointId, RunId, StageId, Version
from spark_abs.store.activity import Skips

MOST_CHECKPOINTS = 10_000
"""The newest checkpoints that the page has; earlier ones are counted."""
MOST_STAGE_ROWS = 20_000
"""Rows of stages in the page: the parts of all stages in one checkpoint are there together, or none is."""
MOST_EVENTS = 500
MOST_CUT_ROWS = 6_000
"""Parts of stages in the checkpoints whose positions and table versions are in the page."""
MOST_CUTS = 200


class Outcome(StrEnum):
    """The state of a checkpoint."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """One checkpoint or savepoint; None where nothing is recorded."""

    id: CheckpointId
    outcome: Outcome = Outcome.OPEN
    attempt: AttemptId | None = None
    run: RunId | None = None
    kind: str = ""
    name: str = ""
    mode: str = ""
    """The mode of its barrier, at its end."""
    triggered_ms: int | None = None
    duration_ms: int | None = None
    """From the trigger to the outcome."""
    size_full: int | None = None
    size_new: int | None = None
    alignment_bytes: int | None = None
    inflight_bytes: int | None = None
    dropped_late: int | None = None
    acks: int | None = None
    stages: int | None = None
    reason: str = ""
    """Of an abort."""
    detail: str = ""
    overtaken: bool = False
    """It began aligned and became unaligned."""
    stored: bool = False
    """Its manifest is there: it can be restored unless it is damaged."""
    abandoned: bool = False
    """A restore went back to before it."""
    edited: bool = False
    damage: str = ""


@dataclass(frozen=True, slots=True)
class StageLine:
    """The part of one stage in one checkpoint, as it acknowledged it or as far as it was at an abort."""

    checkpoint: CheckpointId
    stage: StageId
    acked: bool
    duration_ms: int | None = None
    """From the trigger to the acknowledgement, or to the abort."""
    start_delay_ms: int | None = None
    """From the trigger to the barrier at the first input."""
    alignment_ms: int | None = None
    sync_ms: int | None = None
    async_ms: int | None = None
    backpressured_ms: int | None = None
    size_full: int | None = None
    size_new: int | None = None
    alignment_bytes: int | None = None
    inflight_bytes: int | None = None
    detail: str = ""
    """How far a stage was that had not acknowledged."""


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event that is no part of a checkpoint: a run, a restore, a restart, a changed setting."""

    at_ms: int
    event: str
    attempt: AttemptId
    run: RunId | None = None
    checkpoint: CheckpointId | None = None
    stage: StageId | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The checkpoints by id with the parts of their stages, and other events by time."""

    checkpoints: tuple[CheckpointLine, ...] = ()
    stages: tuple[StageLine, ...] = ()
    events: tuple[EventLine, ...] = ()
    earlier: int = 0
    """How many ids are below those of `checkpoints`."""


@dataclass(frozen=True, slots=True)
class Sink:
    """A sink of a stage."""

    name: str
    kind: str
    """`delta`, `function`, `table`, or the kind of a sink outside."""
    place: str = ""
    options: tuple[str, ...] = ()
    """How it writes: key, mode, settings without secrets."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One input of a stage that is a channel."""

    channel: ChannelId
    stage: StageId
    """The stage that reads it."""
    feedback: bool = False
    at: Version | None = None
    """The position of the stage; None if it is not known from here."""
    epoch: CheckpointId | None = None
    """The newest barrier that the stage has read here."""
    blocked: bool = False
    """The stage waits here at a barrier until its other inputs have reached it."""
    barrier: CheckpointId | None = None
    """The newest barrier in the channel that the stage has not read."""
    entries: int | None = None
    """Entries that the stage has not read, `rows` and `size` with them."""
    rows: int | None = None
    size: int | None = None
    more: bool = False
    """There are more than were counted."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as its job declared it, with its batches."""

    name: StageId
    sources: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    lookups: tuple[str, ...] = ()
    output_mode: str = ""
    sinks: tuple[Sink, ...] = ()
    finished: int | None = None
    """The newest finished batch; None before the first, and if it is not known from here."""
    planned: int | None = None
    passed: CheckpointId | None = None
    """The newest barrier that is known to have passed the stage."""


@dataclass(frozen=True, slots=True)
class AttemptLine:
    """A life of the job between two restores."""

    id: AttemptId
    parent: AttemptId | None
    checkpoint: CheckpointId | None
    """The checkpoint that was restored."""
    base: CheckpointId | None
    """The checkpoint of the parent with the same cut, if an edit made `checkpoint`."""
    created_ms: int
    ready: bool
    current: bool
    """It is on the current path."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """One start of the job, or a restore or an edit that took a number."""

    id: RunId
    attempt: AttemptId
    kind: str
    place: str
    started_ms: int
    ended: str | None


@dataclass(frozen=True, slots=True)
class StageCut:
    """Where a stage was at a checkpoint."""

    stage: StageId
    batch: int
    size_full: int
    files: int
    partitions: int
    watermark_ms: int | None


@dataclass(frozen=True, slots=True)
class SinkCut:
    """The version of a table at a checkpoint; None for a function."""

    stage: StageId
    sink: str
    kind: str
    place: str
    version: Version | None


@dataclass(frozen=True, slots=True)
class SourceCut:
    """How far a stage had read an input from outside the job."""

    stage: StageId
    source: str
    position: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The content of a checkpoint that the page compares with others."""

    checkpoint: CheckpointId
    stages: tuple[StageCut, ...] = ()
    sinks: tuple[SinkCut, ...] = ()
    sources: tuple[SourceCut, ...] = ()
    outside: tuple[str, ...] = ()
    """The sinks outside that took part."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page shows."""

    job: str
    root: str
    made_ms: int
    version: str
    """Of this package."""
    attempt: AttemptId
    restored_from: CheckpointId | None
    ready: bool
    """False while a restore is unfinished."""
    alive: str = ""
    """Where the run is at work; empty if none is."""
    heard_ms: int | None = None
    """When the run renewed its lease last."""
    stages: tuple[Stage, ...] = ()
    channels: tuple[Channel, ...] = ()
    timeline: Timeline = Timeline()
    attempts: tuple[AttemptLine, ...] = ()
    runs: tuple[RunLine, ...] = ()
    cuts: tuple[Cut, ...] = ()
    skips: Skips | None = None
    """Of the newest run, as it told last; None if it has told nothing."""
    problems: tuple[str, ...] = ()
    """Parts of the root that could not be read, and why."""
