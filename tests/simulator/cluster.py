"""The durable half of the simulated cluster: a graph, and what its stages leave on storage.

Channels are lists of entries, `control/` is a list of the real control states, `checkpoints/` a list of
outcomes. Nothing here is lost in a crash. Every method is one atomic commit, as a Delta commit is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from spark_abs.alignment.loops import find_loops
from spark_abs.errors import AbsError, DamageError
from spark_abs.manifest import StageSnapshot
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    AttemptId,
    Barrier,
    BatchId,
    Branch,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    Position,
    RunId,
    StageId,
    Version,
    app_id,
    channel_id,
    owner_of,
)
from spark_abs.protocol import control
from spark_abs.protocol.path import channel_path
from tests.simulator.table import JOB, Planned, Row, Table

LATE, AGAIN = "late", "again"
ROUNDS = 2  # how often a row goes round in loops
RETAINED_BATCHES = 8  # like Spark's minBatchesToRetain: state of older batches is gone

State = tuple[tuple[Row, ...], ...]
"""What a stage remembers: the rows of each input, native ones last."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the simulated job: the union of its inputs, or their join on the key."""

    id: StageId
    inputs: tuple[ChannelId, ...] = ()
    native: int = 0
    """Records of its native source; they are its last input."""
    join: bool = False
    outputs: tuple[str, ...] = ("main",)
    """Outputs that are channels; `late` carries the even keys only, `again` what has not gone round twice."""
    sink: bool = False
    feedback: tuple[ChannelId, ...] = ()
    """Those of the inputs that close a loop."""
    counts: bool = False
    """Whether it numbers the rows that it has seen, from 1."""
    table: str = ""
    """The table of its sink, which is its own if it has no name."""
    sink_name: str = "sink"

    @property
    def channels(self) -> tuple[ChannelId, ...]:
        """The channels it writes, in the order of its commits."""
        return tuple(channel_id(self.id, output) for output in self.outputs)

    @property
    def target(self) -> str:
        """The table that its sink writes, if it has one."""
        return self.table or f"{self.id}/sink"


Graph = tuple[Stage, ...]
"""Stages, producers before consumers."""


def record(stage: StageId, number: int) -> Row:
    """Return one record of a native source; keys of different sources meet, some of them twice."""
    return (number // 2 if stage.endswith("2") else number, f"{stage}#{number}")


def apply(stage: Stage, state: State, news: State) -> tuple[State, tuple[Row, ...]]:
    """Run one micro-batch of a stage: the new state, and the rows that come out."""
    seen = tuple(old + new for old, new in zip(state, news, strict=True))
    if stage.counts:
        begun = sum(map(len, state))
        rows = (row for new in news for row in new)
        return seen, tuple(
            (key, f"{stage.id}[{n}]({label})") for n, (key, label) in enumerate(rows, begun + 1)
        )
    if not stage.join:
        return seen, tuple((key, f"{stage.id}({label})") for new in news for key, label in new)
    pairs = [(a, b) for a in news[0] for b in state[1] if a[0] == b[0]]
    pairs += [(a, b) for a in seen[0] for b in news[1] if a[0] == b[0]]
    return seen, tuple((a[0], f"{stage.id}({a[1]},{b[1]})") for a, b in pairs)


def carried(output: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows that go to one output."""
    if output == AGAIN:
        return tuple((key, f"{AGAIN} {label}") for key, label in rows if label.count(AGAIN) < ROUNDS)
    return tuple((key, f"{LATE} {label}") for key, label in rows if key % 2 == 0) if output == LATE else rows


class Lost(AbsError):
    """Somebody else has written or removed this file of a native checkpoint: Spark ends the query."""


@dataclass
class Native:
    """A stage's Spark checkpoint: planned batches, committed ones, and state files by version.

    Twice evaluated batches leave two files of one version; the commit names its own by a unique id.
    """

    start: Planned
    offsets: dict[BatchId, Planned] = field(default_factory=dict)
    commits: dict[BatchId, str] = field(default_factory=dict)
    states: dict[int, dict[str, State]] = field(default_factory=dict)
    # In the place of a lost one: batches that are repeated as they were, and how far that one had read.
    script: dict[BatchId, Planned] = field(default_factory=dict)
    had_read: dict[ChannelId, Version] = field(default_factory=dict)

    @property
    def planned(self) -> BatchId:
        """The newest planned batch."""
        return next(reversed(self.offsets), NO_BATCH)

    @property
    def committed(self) -> BatchId:
        """The newest finished batch."""
        return next(reversed(self.commits), NO_BATCH)

    @property
    def newest(self) -> Planned:
        """Where the inputs stand."""
        return self.before(BatchId(self.planned + 1))

    @property
    def durable(self) -> Planned:
        """What has been consumed for good: the newest planned batch that is also finished."""
        return self.before(BatchId(self.committed + 1))

    def before(self, batch: BatchId) -> Planned:
        """Return where the inputs stood before a batch."""
        return self.offsets.get(BatchId(batch - 1), self.start)

    def state(self, batch: BatchId) -> State:
        """Return the state after a finished batch, by the id that its commit names."""
        if batch not in self.commits:
            raise Lost(f"state/{batch + 1}")
        return self.states[batch + 1][self.commits[batch]]

    def batch(self, batch: BatchId) -> Planned:
        """Read a file of the offset log."""
        if batch not in self.offsets:
            raise Lost(f"offsets/{batch}")
        return self.offsets[batch]

    def plans(self, since: int, upto: BatchId) -> dict[BatchId, Planned]:
        """Return what a commit says of its batch, and of those after the commit before that had no rows."""
        return {b: planned for b, planned in self.offsets.items() if since < b <= upto}

    def plan(self, batch: BatchId, planned: Planned) -> None:
        """Write a file of the offset log."""
        if batch in self.offsets:
            raise Lost(f"offsets/{batch}")
        self.offsets[batch] = planned

    def commit(self, batch: BatchId, unique: str) -> None:
        """Write a file of the commit log; old batches are forgotten."""
        if batch <= self.committed:
            raise Lost(f"commits/{batch}")
        self.commits[batch] = unique
        for old in [b for b in self.commits if b <= batch - RETAINED_BATCHES]:
            del self.commits[old], self.offsets[old]
            self.states.pop(old + 1, None)


SinkApp = Callable[[control.ControlState, AttemptId, StageId, str], str]
"""Names the application id of a sink."""


def named_by_writer(state: control.ControlState, attempt: AttemptId, stage: StageId, sink: str) -> str:
    """Name it as the product does."""
    (made,) = (a for a in state.attempts if a.id == attempt)
    return state.writer(made, stage, sink).app


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A row of `checkpoints/`."""

    id: CheckpointId
    attempt: AttemptId
    kind: CheckpointKind
    snapshots: tuple[StageSnapshot, ...]
    mode: CheckpointMode = CheckpointMode.ALIGNED
    graph: Graph = ()
    """The job that it is of."""

    @property
    def acked_ms(self) -> int:
        """Its age is counted in checkpoints."""
        return int(self.id)

    def snapshot(self, stage: StageId) -> StageSnapshot:
        """Return one stage's part."""
        return next(s for s in self.snapshots if s.stage == stage)


class Storage:
    """All that survives: one root."""

    def __init__(self, graph: Graph, root: str = "", sink_app: SinkApp = named_by_writer) -> None:
        self.graph = graph
        self.sink_app = sink_app
        self.loops = find_loops(
            (StageId(c.partition(".")[0]), c, stage.id) for stage in graph for c in stage.inputs
        )
        self.control: list[control.ControlState] = [control.begin_job(JOB, 0, root)]
        self.claimed: list[Barrier] = []
        # Ids that commits of `control/` have said to be unaligned by now, and the stages of an attempt that
        # hold rows from after the barrier where it branched off (P7).
        self.overtaken: set[CheckpointId] = set()
        self.replaying: dict[AttemptId, frozenset[StageId]] = {AttemptId(1): frozenset()}
        self.checkpoints: list[tuple[CheckpointId, Checkpoint | None]] = []
        self.retained: dict[CheckpointId, Checkpoint] = {}
        self.tables: dict[str, Table] = {}
        self.packs: dict[str, State] = {}
        self.captured: dict[CheckpointId, set[str]] = {}
        """Packs by the capture that wrote or reused them: sweeping spares those without an outcome."""
        self.native: dict[tuple[AttemptId, StageId], Native] = {}
        for stage in graph:
            self.tables |= {channel: Table(channel) for channel in stage.channels}
            if stage.sink:
                self.tables[stage.target] = Table(stage.target)
            self.native[AttemptId(1), stage.id] = self.fresh(stage, AttemptId(1))

    def fresh(self, stage: Stage, attempt: AttemptId) -> Native:
        """Return the native checkpoint of a stage that has run no batch."""
        start = tuple(
            Position(channel, attempt, Version(0), NO_EPOCH, feedback=channel in stage.feedback)
            for channel in stage.inputs
        )
        return Native(Planned(start, 0))

    @property
    def state(self) -> control.ControlState:
        """The newest state of `control/`."""
        return self.control[-1]

    def outputs(self, stage: Stage) -> list[tuple[str, Table]]:
        """Return a stage's outputs by name, channels first."""
        found = self.written(stage)
        return [*found, (stage.sink_name, self.tables[stage.target])] if stage.sink else found

    def written(self, stage: Stage) -> list[tuple[str, Table]]:
        """Return a stage's channels by name."""
        return [(o, self.tables[channel_id(stage.id, o)]) for o in stage.outputs]

    def owner(self, stage: Stage, output: str) -> str:
        """As what its runs are fenced on an output."""
        return JOB if output in stage.outputs else owner_of(JOB, self.state.root)

    def app(self, stage: Stage, output: str, attempt: AttemptId) -> str:
        """Name the application id of the batches of an output."""
        if output in stage.outputs:
            return app_id(JOB, stage.id, output, attempt)
        return self.sink_app(self.state, attempt, stage.id, output)

    def path(self, channel: ChannelId, attempt: AttemptId) -> tuple[Branch, ...]:
        """Return what counts in a channel for an attempt."""
        until_then = tuple(a for a in self.state.attempts if a.id <= attempt)
        return channel_path(replace(self.state, attempts=until_then), channel)

    def cut_version(self, checkpoint: CheckpointId, channel: str) -> Version:
        """Return the version of an output that a checkpoint recorded."""
        manifest = dict(self.checkpoints)[checkpoint]
        assert manifest is not None
        for snapshot in manifest.snapshots:
            for output in snapshot.outputs:
                if output.table == channel:
                    return output.version or Version(0)
        raise DamageError(f"checkpoint {checkpoint} does not name {channel}")

    def decide(self, checkpoint: CheckpointId, row: Checkpoint | None, run: RunId) -> bool:
        """Commit an outcome unless one stands; return whether the one that stands is a completion."""
        control.require_current(self.state, run)
        for settled, stands in self.checkpoints:
            if settled == checkpoint:
                return stands is not None
        self.checkpoints.append((checkpoint, row))
        if row is not None:
            self.retained[checkpoint] = row
        return row is not None


def digest(state: State) -> tuple[int, str]:
    """Return size and hash of a state file."""
    data = repr(state).encode()
    return len(data), hashlib.sha256(data).hexdigest()
