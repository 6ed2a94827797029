"""A declared job as a value to read: stages, channels, sinks, and where each is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_abs.advice import named
from spark_abs.compatibility.inspection import Drafted, check_drafted, draft
from spark_abs.manifest import SourceShape
from spark_abs.manifests import manifest_table
from spark_abs.model import AttemptId, ChannelId, OutputMode, StageId, channel_id
from spark_abs.plan.graph import StageDecl
from spark_abs.protocol.attempt import NATIVES, Attempt
from spark_abs.protocol.changes import Comparison
from spark_abs.protocol.control import begin_job
from spark_abs.snapshots.layout import PARTITIONS_KEY
from spark_abs.snapshots.packs import PATH as STATE
from spark_abs.spark.plan_facts import Watermark
from spark_abs.spark.plans import task_slots
from spark_abs.stages.native import NativeLog
from spark_abs.stages.partitions import Partitions, partitions_of
from spark_abs.store import history
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.control import Control
from spark_abs.store.storage import location_of

if TYPE_CHECKING:
    from spark_abs.plan.specs import JobSpec, Lookup


@dataclass(frozen=True, slots=True)
class ExplainedStage:
    """A stage: one native streaming query."""

    name: StageId
    sources: tuple[SourceShape, ...]
    """The streams that the stage reads: channels and native sources."""
    static_tables: tuple[str, ...]
    """Delta tables that the stage reads at the version of the declaration."""
    lookups: tuple[str, ...]
    """The lookup tables of the stage, and the version of each."""
    outputs: tuple[str, ...]
    output_mode: OutputMode
    trigger: str | None
    """None: each batch begins as soon as the one before has ended."""
    watermarks: tuple[Watermark, ...]
    operators: tuple[str, ...]
    """Spark's stateful operators."""
    functions: tuple[str, ...]
    """The uids of its stateful functions."""
    partitions: Partitions | None
    """The stage's shuffle partitions; None if the stage has run and its log does not record them."""
    native: str
    """The place of the stage's native checkpoint."""

    def lines(self) -> Iterator[str]:
        """Yield the stage as lines of text."""
        yield f"stage {self.name}"
        for source in self.sources:
            yield f"  reads {source}{', the feedback edge of a loop' if source.feedback else ''}"
        for table in self.static_tables:
            yield f"  reads the table {table} at its present version"
        for lookup in self.lookups:
            yield f"  looks up {lookup}"
        for watermark in self.watermarks:
            yield f"  watermark on {watermark.column}, {watermark.delay_ms} ms late"
        if self.operators:
            uids = f", functions {', '.join(self.functions)}" if self.functions else ""
            spread = f", in {self.partitions}" if self.partitions is not None else ""
            yield f"  keeps state of {', '.join(self.operators)}{uids}{spread}"
        trigger = "" if self.trigger is None else f", every {self.trigger}"
        yield f"  writes {', '.join(self.outputs)} ({self.output_mode}){trigger}"
        yield f"  native checkpoint {self.native}"


@dataclass(frozen=True, slots=True)
class ExplainedChannel:
    """A channel: an output of a stage that other stages read."""

    id: ChannelId
    readers: tuple[StageId, ...]
    path: str

    def __str__(self) -> str:
        """Return it as text."""
        return f"channel {self.id} to {', '.join(self.readers)}: {self.path}"


@dataclass(frozen=True, slots=True)
class ExplainedSink:
    """A sink and its input."""

    name: str
    source: ChannelId
    table: str | None
    """The place of the Delta table; None for a function."""
    behind_checkpoints: bool = False
    """Whether the sink's rows become visible after each checkpoint instead of with each batch."""
    table_name: str = ""
    """The name of the Delta table in a catalog; empty if the table was declared by path."""

    def __str__(self) -> str:
        """Return it as text."""
        where = "a function, at least once"
        if self.table is not None:
            where = f"{named(self.table_name, self.table)}, exactly once"
        if self.behind_checkpoints:
            where += ", after each checkpoint"
        return f"sink {self.name} of {self.source}: {where}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `Job.explain`; print it to read it."""

    job: str
    root: str
    attempt: AttemptId
    """The attempt that a start would continue; 1 on a new root."""
    stages: tuple[ExplainedStage, ...]
    """Producers first."""
    channels: tuple[ExplainedChannel, ...]
    sinks: tuple[ExplainedSink, ...]
    start: Comparison
    """The effect of a start on each stage."""

    @property
    def state(self) -> str:
        """Where copies of state are stored, each byte once."""
        return f"{self.root}/{STATE}"

    @property
    def tables(self) -> tuple[str, ...]:
        """Where the job's own tables are."""
        return tuple(f"{self.root}/{path}" for path in (manifest_table.PATH, history.PATH, CONTROL))

    def __str__(self) -> str:
        """Return the job as text."""
        lines = [f"job {self.job} at {self.root}, attempt {self.attempt}"]
        for stage in self.stages:
            lines += stage.lines()
        lines += map(str, (*self.channels, *self.sinks))
        lines += [f"state of checkpoints: {self.state}", f"tables of the job: {', '.join(self.tables)}"]
        lines += [f"a start: {'refused' if not self.start.ok else 'possible'}"]
        return "\n".join([*lines, *(f"  {line}" for line in str(self.start).splitlines())])


def explain_job(job: JobSpec, leave: bool) -> Explanation:
    """Explain a job; see `Job.explain`."""
    drafted = draft(job)
    start = check_drafted(job, drafted, leave)
    attempt, natives = _attempt(job)
    return Explanation(
        job.name,
        job.root.uri,
        attempt=attempt.id,
        stages=tuple(_stage(job, drafted, decl, attempt, natives) for decl in drafted.graph.order()),
        channels=tuple(
            ExplainedChannel(channel, readers, job.root.place(job.root.channel(channel)).uri)
            for channel, readers in _channels(drafted)
        ),
        sinks=tuple(
            ExplainedSink(
                s.name, channel_id(s.stage, s.output), s.written, s.epoch_table is not None, s.table_name
            )
            for s in drafted.graph.sinks
        ),
        start=start,
    )


def _attempt(job: JobSpec) -> tuple[Attempt, str]:
    """Return the attempt that a start would continue, and the place of its native checkpoints."""
    wanted = job.settings.native_root
    if not job.root.place(CONTROL).exists():
        named = f"{location_of(wanted)}/{job.name}-NEW" if wanted else NATIVES
        return begin_job(job.name, 0).attempt, named
    control = Control.open(job.root)
    state = control.state
    return state.attempt, state.attempt.natives if state.runs else control.natives_at(wanted)


def _channels(drafted: Drafted) -> Iterator[tuple[ChannelId, tuple[StageId, ...]]]:
    for stage in drafted.graph.order():
        for output in drafted.graph.consumed(stage.name):
            channel = channel_id(stage.name, output)
            yield channel, tuple(s.name for s in drafted.graph.stages if channel in s.inputs)


def looked_up(lookup: Lookup) -> str:
    """Return the table and the version of a lookup as text."""
    match lookup.max_age_ms:
        case None:
            version = "the version of the first start, for ever"
        case 0:
            version = "the newest version in each batch"
        case age:
            version = f"a version that was the newest at most {age} ms ago"
    return f"{lookup.name}, table {lookup.table}: {version}"


def _stage(job: JobSpec, drafted: Drafted, decl: StageDecl, attempt: Attempt, natives: str) -> ExplainedStage:
    spec, facts = job.stages[decl.name], drafted.plans[decl.name]
    native = job.root.native(natives, attempt.id, attempt.directory(decl.name))
    session = job.spark.conf.get(PARTITIONS_KEY, None)
    slots = task_slots(job.spark)
    return ExplainedStage(
        name=decl.name,
        sources=tuple(replace(s, feedback=s.name in decl.feedback) for s in facts.streams),
        static_tables=tuple(facts.static_tables),
        lookups=tuple(map(looked_up, spec.lookups)),
        outputs=decl.outputs,
        output_mode=spec.output_mode,
        trigger=spec.trigger,
        watermarks=facts.watermarks,
        operators=tuple(o.name for o in facts.operators),
        functions=tuple(uid for uid in facts.functions if uid),
        partitions=partitions_of(NativeLog(native), spec.shuffle_partitions, session, slots),
        native=native.uri,
    )
