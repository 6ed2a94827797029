"""The manifest: the values that one row of `checkpoints/` holds (P14).

A checkpoint exists from the moment its row is committed. Everything the row names was written before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_abs.model import (
    FORMAT,
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    LookupVersion,
    Position,
    RunId,
    StageId,
    Version,
    channel_id,
)


@dataclass(frozen=True, slots=True)
class Location:
    """Where in `state/` the bytes of a file are: `chunks` consecutive rows of one pack, from `row`."""

    pack: str
    row: int
    chunks: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a native checkpoint: its path in there, its size and hash, and where its bytes are kept."""

    path: str
    size: int
    sha256: str
    at: Location


@dataclass(frozen=True, slots=True)
class OutputVersion:
    """The version of an output's table at the cut."""

    output: str
    kind: str
    """`channel`, `delta`, `function`, or `table`: one that a sink function writes by itself."""
    table: str
    """Path of a channel relative to the root; URI of a Delta sink; name of a function sink."""
    table_id: str
    version: Version | None
    """None for a function sink, which has no versions."""
    name: str = ""
    """The name in a catalog that led to a Delta table; empty if it was declared by its path."""


@dataclass(frozen=True, slots=True)
class OperatorState:
    """A stateful operator of a stage, as Spark's own operator metadata names it."""

    operator_id: int
    name: str
    partitions: int
    stores: tuple[str, ...]
    schema: str
    """The newest state schema as Spark wrote it, text or base64 where it is binary."""
    function: str = ""
    """The uid of the function whose state it holds; empty if that is none of ours, if an edit has removed it,
    or if an earlier version wrote this."""


@dataclass(frozen=True, slots=True)
class StateFunction:
    """A stateful function of a stage, as it was declared: the form in which its state is kept."""

    uid: str
    key_groups: int
    key: tuple[str, ...]
    """Name and type of each key column."""
    state: tuple[str, ...]
    """Name and type of each field of the state."""
    timeout: str
    """`none`, `processing-time` or `event-time`: the clock of its timers."""
    ttl_ms: int | None = None
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names that a field of the state had before."""
    dropped: tuple[str, ...] = ()
    """Names of fields that are gone: state that was written before may still hold them."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """What a field has in state from before it was there, as JSON; null where it is not named."""
    older: tuple[str, ...] = ()
    """Digests of the forms that it had before, oldest first."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a stage's part took, in milliseconds (P20)."""

    start_delay_ms: int = 0
    """From the trigger to the stage's cut beginning."""
    alignment_ms: int = 0
    """From the first input at the barrier to the last."""
    sync_ms: int = 0
    """While processing had to wait."""
    async_ms: int = 0
    """Capture and copy, beside processing."""
    alignment_bytes: int = 0
    """Bytes that had queued up behind the barrier, on inputs that had to wait for others."""
    end_to_end_ms: int = 0
    """From the trigger to the stage's acknowledgement."""
    backpressured_ms: int = 0
    """Waiting for credit, since the stage's cut before this one or since the run began."""


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """What a stage acknowledged: its cut and the handles of its state."""

    stage: StageId
    cut_batch: BatchId
    """`NO_BATCH` if the stage had run none: it then starts afresh on restore."""
    offsets: str = ""
    """The text of `offsets/<cut_batch>`."""
    watermark_ms: int | None = None
    positions: tuple[Position, ...] = ()
    outputs: tuple[OutputVersion, ...] = ()
    operators: tuple[OperatorState, ...] = ()
    shuffle_partitions: int = 0
    provider: str = ""
    files: tuple[StoredFile, ...] = ()
    size_new: int = 0
    """Bytes that this checkpoint added to `state/` for the stage."""
    dropped_late: int = 0
    """Rows dropped behind the watermark since this run began."""
    static_tables: Mapping[str, Version] = field(default_factory=dict)
    lookups: tuple[LookupVersion, ...] = ()
    """The versions at which the batch of the cut has read its lookups."""
    timings: Timings = Timings()
    carried: CheckpointId | None = None
    """The checkpoint whose part this is, for a query that was not running: as it was then, unchanged."""

    @property
    def size_full(self) -> int:
        """Bytes of all files that the stage needs to come back."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class SourceShape:
    """A streaming source of a stage's query: one line in Spark's offset files."""

    kind: str
    """`channel`, or the name of a native source's format."""
    name: str
    """The channel; of a native source what it reads, as far as its options say it."""
    feedback: bool = False
    """Whether the channel closes a loop."""
    at: str = field(default="", compare=False)
    """What tells sources of one name apart: of Kafka its brokers, of files the `pathGlobFilter`; of Delta
    `changes` if it reads the change data feed. It may change: a source stays the same."""

    def __str__(self) -> str:
        """Return it as messages name it."""
        return f"channel {self.name}" if self.kind == CHANNEL else f"{self.kind} source {self.name}".rstrip()


CHANNEL = "channel"
"""The kind of a source that is a channel."""


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """A stateful operator of a stage's plan: what its state depends on, in SQL where that can be had."""

    name: str
    parts: tuple[str, ...] = ()
    """Keys with their types, functions, conditions; empty if its state depends on nothing of the kind."""
    sides: tuple[tuple[str, ...], ...] = ()
    """Of a join, the sources of each side."""
    computed: tuple[str, ...] | None = None
    """How columns in its keys or its condition are computed below it, down to the sources; None in what
    earlier versions recorded."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Of a join, what the rows of each side are known by: its sources with where they are, and what it is
    filtered by. Empty in what earlier versions recorded."""

    def __str__(self) -> str:
        """Return it as messages show it."""
        further = [sql for sql in self.computed or () if not any(sql in part for part in self.parts)]
        computed = f", from {', '.join(further)}" if further else ""
        known = zip(("left", "right"), self.apart or self.sides, strict=False)
        sides = "".join(f"; {name}: {', '.join(side)}" for name, side in known)
        return f"{self.name}({'; '.join(self.parts)}{computed}{sides})"


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage as the job declared it: part of the fingerprint of a job."""

    stage: StageId
    inputs: tuple[str, ...]
    """Channel ids, in order."""
    outputs: Mapping[str, str]
    """Output name to schema as JSON text."""
    channels: Mapping[str, str]
    """Output name to the table id of its channel, for outputs that are channels."""
    sinks: Mapping[str, str]
    """Sink name to the output it takes."""
    functions: tuple[StateFunction, ...] = ()
    """Its stateful functions, in the order of their declaration."""
    sources: tuple[SourceShape, ...] = ()
    """What its query reads as streams, in the order of Spark's offset files; empty in what earlier versions
    recorded."""
    operators: tuple[OperatorShape, ...] = ()
    """Its stateful operators, from the first in the plan; not recorded by earlier versions."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Sink name to where its table is."""
    output_mode: str = ""
    """Empty in what earlier versions recorded."""
    by_place: tuple[tuple[str, ...], ...] | None = None
    """What Spark's operators keep by place and not by name: the functions of each aggregate, the columns of
    each side of a join, as the optimizer leaves them. None if that is not known."""
    lookups: Mapping[str, str] = field(default_factory=dict)
    """Lookup to where its table is."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Entries of a channel that are part of a checkpoint as data: before its barrier, in no state (P16, P17).

    The stage reads them first when the checkpoint is restored.
    """

    stage: StageId
    channel: ChannelId
    after: Version
    """The last entry that the stage had read."""
    until: Version
    """The entry with the barrier."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a savepoint was made from by an edit, and its attempt."""

    attempt: AttemptId
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Manifest:
    """One completed checkpoint or savepoint."""

    id: CheckpointId
    attempt: AttemptId
    run: RunId
    job: str
    kind: CheckpointKind
    name: str | None
    triggered_ms: int
    acked_ms: int
    completed_ms: int
    graph: tuple[StageShape, ...]
    stages: tuple[StageSnapshot, ...]
    mode: CheckpointMode = CheckpointMode.ALIGNED
    """What it was when it was completed."""
    edited: Origin | None = None
    """Where it comes from if an edit made it. It is then of no attempt, `NO_ATTEMPT`, and on no path until a
    restore goes to it."""
    outside: tuple[str, ...] | None = None
    """The sinks outside that its run had; None in what earlier versions recorded."""
    v: int = FORMAT

    @property
    def cut(self) -> Origin:
        """The attempt that made its cut, and the checkpoint of that attempt which has the same."""
        return self.edited or Origin(self.attempt, self.id)

    @property
    def size_full(self) -> int:
        """Bytes needed to restore everything."""
        return sum(stage.size_full for stage in self.stages)

    @property
    def size_new(self) -> int:
        """Bytes that this checkpoint wrote."""
        return sum(stage.size_new for stage in self.stages)

    def channel_cuts(self) -> dict[ChannelId, Version]:
        """Return the entry of each channel that holds the barrier: those after it are not part of this."""
        return {
            channel_id(stage.stage, output.output): output.version
            for stage in self.stages
            for output in stage.outputs
            if output.kind == CHANNEL and output.version is not None
        }

    def in_flight(self) -> tuple[InFlight, ...]:
        """Return what lies between each stage and the barrier in its open inputs, rows or not."""
        cuts = self.channel_cuts()
        found: dict[tuple[StageId, ChannelId], InFlight] = {}
        for stage in self.stages:
            for position in stage.positions:
                key, until = (stage.stage, position.channel), cuts.get(position.channel, position.version)
                known = found.get(key)
                if position.version >= until or position.is_closed(self.run):
                    continue
                if known is None or position.version < known.after:
                    found[key] = InFlight(*key, position.version, until)
        return tuple(found.values())

    def stage(self, stage: StageId) -> StageSnapshot | None:
        """Return the snapshot of one stage, None if the job had no such stage."""
        return next((s for s in self.stages if s.stage == stage), None)
