"""What a run does now: a small file beside the lease, for commands in other processes.

The run replaces it every few seconds. Nothing rests on it: a run without it, or with an old one, is as sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from spark_abs.codec import from_json, to_json
from spark_abs.errors import DamageError
from spark_abs.model import FORMAT, NO_BATCH, BatchId, ChannelId, CheckpointId, RunId, StageId
from spark_abs.store.root import Root

PATH = "control/_activity.json"
"""VACUUM and readers ignore files that begin with an underscore."""
WRITE_EVERY_MS = 2000
"""The least time between two writes of the file."""


class Phase(StrEnum):
    """What a stage does."""

    IDLE = "idle"
    PLANNING = "planning"
    """Spark asks the sources for new rows, or plans a batch."""
    WAITING = "waiting"
    """A planned batch waits: for credit, for a copy of state, or for the end of a savepoint."""
    READING = "reading"
    """The stage reads what its outputs hold of the batch, and decides which barrier the batch carries."""
    STATE = "state"
    """Spark runs the batch for its state alone: no output needs its rows."""
    WRITING = "writing"
    """Spark runs the batch for one output: it reads the input, updates the state and writes files."""
    COMMITTING = "committing"
    """The files are committed to one output."""
    CALLING = "calling"
    """A sink function is called. Spark may run the batch inside it."""
    ENDING = "ending"
    """The outputs have the batch, and Spark records its end."""


_SAID = {
    Phase.IDLE: "it waits for rows",
    Phase.PLANNING: "Spark looks for new rows or plans a batch",
    Phase.WAITING: "it waits",
    Phase.READING: "it reads what its outputs hold",
    Phase.STATE: "Spark updates its state",
    Phase.WRITING: "output {what!r} is written",
    Phase.COMMITTING: "it is committed to {what!r}",
    Phase.CALLING: "function {what!r} is called",
    Phase.ENDING: "Spark records its end",
}
_LONGEST = 100


def phase_said(phase: Phase, what: str) -> str:
    """Return what a stage does, as a sentence."""
    short = what if len(what) <= _LONGEST else f"{what[:_LONGEST]}…"
    if phase is Phase.WAITING and short:
        return f"it waits for {short}"
    return _SAID[phase].format(what=short)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a stage has not read of one of its channels."""

    channel: ChannelId
    entries: int = 0
    rows: int = 0
    size: int = 0
    """Bytes before compression."""
    oldest_ms: int | None = None
    """When the oldest of these rows was written; None if there are none."""
    more: bool = False
    """There are more: only so many entries are counted."""
    moved_ms: int | None = None
    """When the last batch that read from the channel began, in this run."""


@dataclass(frozen=True, slots=True)
class Longest:
    """The phase that took longest."""

    phase: Phase
    what: str
    ms: int


DORMANT = "the query does not run"
"""What a wrapped query does that does not run while others at its root do."""


@dataclass(frozen=True, slots=True)
class StageActivity:
    """What a stage does, by the clock of the driver. Times are in milliseconds since the epoch."""

    stage: StageId
    phase: Phase = Phase.IDLE
    what: str = ""
    """The output, the function or the channel."""
    since_ms: int | None = None
    """When the phase began."""
    batch: BatchId = NO_BATCH
    """The newest batch that began in this run."""
    began_ms: int | None = None
    """When that batch began."""
    ended_ms: int | None = None
    """When the newest finished batch of this run ended."""
    last_ms: int | None = None
    """How long the newest finished batch took."""
    last_waited_ms: int = 0
    """For how long of it that batch waited: for credit, for a copy of state, for the end of a pause."""
    waited_ms: int = 0
    """For how long the batch under way has waited before its phase."""
    slowest_ms: int | None = None
    """How long the slowest of the last twenty finished batches took."""
    longest: Longest | None = None
    """The longest phase of one of these batches: at most a quarter of them had a longer one."""
    rows: int | None = None
    """Rows that the last batch reported by Spark has read."""
    rows_per_s: float | None = None
    """Rows per second of that batch."""
    watermark_ms: int = 0
    """The watermark of the newest batch; 0 for none."""
    watermark_since_ms: int | None = None
    """When the first batch with this watermark began, in this run."""
    has_watermark: bool = False
    """Whether the last batch reported by Spark has one, also if no row has moved it yet."""
    state_rows: int | None = None
    """Rows in the state stores, None without state."""
    state_memory: int | None = None
    """Bytes of memory that the state stores use."""
    inputs: tuple[Backlog, ...] = ()

    @property
    def under_way(self) -> bool:
        """Whether a batch is under way."""
        return self.phase not in (Phase.IDLE, Phase.PLANNING)

    def running_ms(self, now: int) -> int:
        """Return the age of the batch under way, 0 if there is none."""
        return max(0, now - self.began_ms) if self.under_way and self.began_ms is not None else 0

    def lag_ms(self, now: int) -> int:
        """Return the age of the oldest row that it has not read of its channels, 0 if it has read all."""
        return max((now - one.oldest_ms for one in self.inputs if one.oldest_ms is not None), default=0)


@dataclass(frozen=True, slots=True)
class Late:
    """A stage for which an open checkpoint waits."""

    checkpoint: CheckpointId
    stage: StageId
    why: str
    first: bool
    """Whether it is late by itself, and not because a stage before it is."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The space of a disk that the driver uses."""

    path: str
    free: int
    total: int
    free_before: int
    """Free bytes at `before_ms`, up to an hour ago."""
    before_ms: int


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a stage had not read when it was furthest behind, in the older half of the last half hour."""

    stage: StageId
    at_ms: int
    rows: int
    lag_ms: int
    """The age of the oldest of these rows then."""


@dataclass(frozen=True, slots=True)
class Skips:
    """The periodic checkpoints that would have equalled the last completed one, and so were skipped.

    All but `in_run` begins anew with each completed checkpoint.
    """

    number: int = 0
    at_ms: int | None = None
    """When the last of them was due: until then the job had done nothing."""
    in_run: int = 0
    """Those of the whole run."""


@dataclass(frozen=True, slots=True)
class RunActivity:
    """What a run does."""

    run: RunId
    at_ms: int
    """When this was written, by the clock of the driver."""
    stages: tuple[StageActivity, ...] = ()
    late: tuple[Late, ...] = ()
    """Those that are late by themselves first."""
    write_ms: int | None = None
    """How long the slowest of the last twenty writes of this file took."""
    usual_write_ms: int | None = None
    """How long the median of them took."""
    ahead_of_store_ms: int | None = None
    """How far the clock of the driver is ahead of the store's, at least: that is seen at some moment of a
    write. Negative if it is behind; None if the store does not say."""
    disks: tuple[Disk, ...] = ()
    earlier: tuple[Earlier, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings as they are now: name to text."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages of the driver."""
    skips: Skips = Skips()
    v: int = FORMAT


def write_activity(root: Root, activity: RunActivity) -> None:
    """Replace the file; a reader sees the old one or the new one."""
    root.write_whole(PATH, to_json(activity).encode())


def read_activity(root: Root) -> RunActivity | None:
    """Read the file; None if there is none, or if it is damaged or of a later version."""
    data = root.read_whole(PATH)
    if data is None:
        return None
    try:
        found = from_json(RunActivity, data)
    except DamageError:
        return None
    return found if found.v <= FORMAT else None
