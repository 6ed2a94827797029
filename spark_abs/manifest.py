"""The manifest of a checkpoint, one row of `checkpoints/` (P14).

The commit of the row makes the checkpoint exist. All data that the row names is written before.
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
    """Where the bytes of a file are in `state/`: `chunks` consecutive rows of one pack, from `row` on."""

    pack: str
    row: int
    chunks: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a native checkpoint: its path there, its size and hash, and where its bytes are stored."""

    path: str
    size: int
    sha256: str
    at: Location


@dataclass(frozen=True, slots=True)
class OutputVersion:
    """The version of an output's table at the cut."""

    output: str
    kind: str
    """`channel`, `delta`, `function`, or `table`: a table that a sink function writes by itself."""
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
    """The uid of the stateful function whose state it holds. Empty for Spark's own operators, after an edit
    that removed the state, and in manifests of earlier versions."""


@dataclass(frozen=True, slots=True)
class StateFunction:
    """A stateful function of a stage as it was declared. This is the form of its stored state."""

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
    """Earlier names of the fields of the state."""
    dropped: tuple[str, ...] = ()
    """Names of dropped fields. Older state may still hold them."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """The value of a field in state that is older than the field, as JSON. A field without an entry is null
    there."""
    older: tuple[str, ...] = ()
    """Digests of its earlier forms, oldest first."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a stage's part of a checkpoint took, in milliseconds (P20)."""

    start_delay_ms: int = 0
    """From the trigger to the beginning of the stage's cut."""
    alignment_ms: int = 0
    """From the first input that reached the barrier to the last."""
    sync_ms: int = 0
    """How long processing was blocked."""
    async_ms: int = 0
    """Capture and copy, while processing continued."""
    alignment_bytes: int = 0
    """Bytes that queued up behind the barrier, on inputs that waited for others."""
    end_to_end_ms: int = 0
    """From the trigger to the stage's acknowledgement."""
    backpressured_ms: int = 0
    """Waiting for credit, since the stage's cut before or the start of the run."""


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """The part of a stage in a checkpoint, as it acknowledged it: its cut and where its state is stored."""

    stage: StageId
    cut_batch: BatchId
    """`NO_BATCH` if the stage had run no batch. A restore then starts it from the beginning."""
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
    """Bytes that the stage added to `state/` for this checkpoint."""
    dropped_late: int = 0
    """Rows dropped behind the watermark since the run began."""
    static_tables: Mapping[str, Version] = field(default_factory=dict)
    lookups: tuple[LookupVersion, ...] = ()
    """The versions of the lookups that the batch of the cut read."""
    timings: Timings = Timings()
    carried: CheckpointId | None = None
    """For a query that was not running: the earlier checkpoint whose snapshot is repeated here."""
    directory: str = ""
    """Of a watched query: its checkpoint directory, from which it was copied."""
    feeds: tuple[str, ...] = ()
    """Ids of Delta tables of which it is known that the query reads their change feed alone."""

    @property
    def size_full(self) -> int:
        """Bytes of all files that a restore of the stage needs."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class SourceShape:
    """A streaming source of a stage's query: one line in Spark's offset files."""

    kind: str
    """`channel`, or the name of a native source's format."""
    name: str
    """The channel. For a native source: the input, as far as its options name it."""
    feedback: bool = False
    """Whether the channel closes a loop."""
    at: str = field(default="", compare=False)
    """Distinguishes sources with the same name; a source whose `at` changes is still the same source.

    For Kafka the brokers, for files the `pathGlobFilter`, for Delta `changes` if the change data feed is
    read.
    """

    def __str__(self) -> str:
        return f"channel {self.name}" if self.kind == CHANNEL else f"{self.kind} source {self.name}".rstrip()


CHANNEL = "channel"
"""The `kind` of a channel as a source."""


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """A stateful operator of a stage's plan: the parts that determine its state, as SQL if possible."""

    name: str
    parts: tuple[str, ...] = ()
    """Keys with their types, functions, conditions; empty if its state depends on none of these."""
    sides: tuple[tuple[str, ...], ...] = ()
    """The sources of each side of a join."""
    computed: tuple[str, ...] | None = None
    """How the columns in its keys or condition are computed from the sources; None in manifests of earlier
    versions."""
    apart: tuple[tuple[str, ...], ...] = ()
    """The parts that identify the rows of each side of a join: sources, their locations and filters.

    Empty in manifests of earlier versions.
    """

    def __str__(self) -> str:
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
    """The streams that its query reads, in the order of Spark's offset files; empty in manifests of earlier
    versions."""
    operators: tuple[OperatorShape, ...] = ()
    """Its stateful operators in the order of the plan; not recorded by earlier versions."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Sink name to where its table is."""
    output_mode: str = ""
    """Empty in manifests of earlier versions."""
    by_place: tuple[tuple[str, ...], ...] | None = None
    """The values that Spark's operators store by position instead of by name. None if unknown.

    These are the functions of each aggregate and the columns of each side of a join, in the optimized plan.
    """
    lookups: Mapping[str, str] = field(default_factory=dict)
    """Lookup to where its table is."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rows in flight: entries of a channel before the barrier that the stage has not read (P16, P17).

    They are part of the checkpoint; after a restore the stage reads them first.
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
    """The mode of its barrier when it completed."""
    edited: Origin | None = None
    """The edited checkpoint, if an edit made this one. It then belongs to no attempt (`NO_ATTEMPT`) and is on
    no path until a restore goes to it."""
    outside: tuple[str, ...] | None = None
    """The sinks outside of its run; None in manifests of earlier versions."""
    v: int = FORMAT

    @property
    def cut(self) -> Origin:
        """The attempt and checkpoint that made the cut; for an edit, those of the original."""
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
        """Return the entry with the barrier of each channel: later entries are not part of the checkpoint."""
        return {
            channel_id(stage.stage, output.output): output.version
            for stage in self.stages
            for output in stage.outputs
            if output.kind == CHANNEL and output.version is not None
        }

    def in_flight(self) -> tuple[InFlight, ...]:
        """Return the entries between each stage's position and the barrier in its open inputs.

        Before a barrier that is not unaligned lie no rows but those that go round in a loop: a stage that
        stands before it has taken it without a batch.
        """
        cuts = self.channel_cuts()
        overtakes = self.mode is CheckpointMode.UNALIGNED
        found: dict[tuple[StageId, ChannelId], InFlight] = {}
        for stage in self.stages:
            for position in stage.positions:
                key, until = (stage.stage, position.channel), cuts.get(position.channel, position.version)
                known = found.get(key)
                if position.version >= until or position.is_closed(self.run):
                    continue
                if not (overtakes or position.feedback):
                    continue
                if known is None or position.version < known.after:
                    found[key] = InFlight(*key, position.version, until)
        return tuple(found.values())

    def stage(self, stage: StageId) -> StageSnapshot | None:
        """Return the snapshot of one stage, None if the job had no such stage."""
        return next((s for s in self.stages if s.stage == stage), None)
