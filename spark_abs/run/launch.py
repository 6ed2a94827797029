"""Start the queries of a run: channels and sinks, gates, stage runners, coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from spark_abs.catalog.target import enter
from spark_abs.channels.gate import BackEdge, GateSpec
from spark_abs.channels.opening import open_gate
from spark_abs.channels.schema import delta_schema
from spark_abs.channels.writer import create_channel
from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.checkpointing.coordination import Coordination, Events
from spark_abs.compatibility.adoption import fence_query
from spark_abs.compatibility.existing import is_recorded
from spark_abs.errors import CheckpointNotFound, Refused, UsageError
from spark_abs.manifest import StageShape
from spark_abs.manifests.checkpoints import Checkpoints
from spark_abs.model import (
    NO_RUN,
    ChannelId,
    RunId,
    StageId,
    channel_id,
)
from spark_abs.plan.columns import narrowed, widened
from spark_abs.plan.frames import Frames, build_frames
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.plan.specs import JobSpec, SinkSpec
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.control import AttachedSink, attach, taken_over
from spark_abs.protocol.credit import Capacity
from spark_abs.protocol.path import channel_path
from spark_abs.protocol.restarts import RestartPolicy
from spark_abs.run.drain import Drain
from spark_abs.run.lifecycle import Termination
from spark_abs.run.lookups import open_lookups, query_frame
from spark_abs.run.rebuild import Rebuild, repeat_batches
from spark_abs.run.recovery import Recovery
from spark_abs.run.renewal import Renewal
from spark_abs.run.run import Run
from spark_abs.run.running_stage import RunningStage, StageParts
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.create import ensure_sink
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.sinks.sending.sender import Sending
from spark_abs.sinks.sending.senders import Senders, open_senders
from spark_abs.snapshots.schema_log import SCHEMA_LOGS
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.spark.driver import drain_events, sleep_until_stopped
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.credit import Credit
from spark_abs.stages.native import NativeLog
from spark_abs.stages.outputs import Outputs, open_writers
from spark_abs.stages.progress import LateRows
from spark_abs.stages.queries import start_queries
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.stages.stage import StageRunner
from spark_abs.state.declared import NOTHING, Before
from spark_abs.store.control import Control

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is known when queries may start."""

    job: JobSpec
    ctx: RunContext
    graph: JobGraph
    plans: Mapping[StageId, PlanFacts]
    drafts: Frames
    shapes: Sequence[StageShape]
    """The stages as they are declared."""
    control: Control
    policy: RestartPolicy
    started: Callable[[], None]
    """Called when the coordinator is about to take over what keeps the lease until then."""
    laps: Laps
    rebuilds: Sequence[Rebuild] = ()
    """Stages that have to repeat their batches first."""
    drain: str | None = None
    """The savepoint of a drain that has begun: sources read no more, and the run ends with it."""


def launch(given: Launch) -> Run:
    """Start the queries and the coordinator; what started is stopped again if one does not."""
    job, ctx, graph = given.job, given.ctx, given.graph
    ids = {
        channel_id(s.name, o): create_channel(
            ctx.root, channel_id(s.name, o), given.drafts.schemas[channel_id(s.name, o)]
        )
        for s in graph.stages
        for o in graph.consumed(s.name)
    }
    ctx.failpoint("start.channels.after")
    tables = {s.name: _attach(given, s, s.table) for s in job.sinks if s.table is not None}
    for sink in job.sinks:
        if sink.epoch_table is not None:
            _ensure(given, sink, sink.epoch_table)
    attached = [
        AttachedSink(
            s.source.stage,
            s.name,
            tables[s.name].uri,
            tables[s.name].table_id,
            key=s.key,
            overwrites=tables[s.name].overwrites,
            changes=s.changes,
            name=s.table_name,
            attempt=ctx.attempt,
            took_over=_took_over(given, s, tables[s.name]),
        )
        for s in job.sinks
        if s.name in tables
    ]
    given.control.update(lambda state: attach(state, attached))
    ctx.failpoint("start.sinks.after")
    manifests = Checkpoints.open(ctx.root, ctx.job).load_all()
    kept = StateStorage.open(ctx.root, ctx.job, ctx.run, manifests, ctx.failpoint)
    outside = _sendings(job.sinks, given.drafts.schemas)
    senders = open_senders(job.spark, ctx, outside, given.control, manifests)
    ctx.failpoint("start.state.after")
    termination, events, late = Termination(), Events(), LateRows()
    cleaner = CheckpointCleaner(ctx, {s.name: s.inputs for s in graph.stages}, kept, senders)
    snapshots = Snapshotter(ctx, kept, cleaner, events.put, termination.fail)
    runners = {s.name: _runner(given, s, tables, snapshots, senders) for s in graph.stages}
    frames = build_frames(
        job,
        graph,
        open_gate=lambda stage, channel, schema: _gate(given, stage, channel, schema),
        before=partial(before, given),
        checked=given.drafts.declared,
        lookups=given.drafts.lookups,
        tracking=partial(_tracking, given),
    )
    stages = {
        s.name: _stage(
            given, s, frames=frames, runner=runners[s.name], snapshots=snapshots, senders=senders, late=late
        )
        for s in graph.stages
    }
    given.laps.over("channels and sinks")
    drain = Drain(ctx, given.control, graph, given.plans, stages)
    shapes = partial(_shapes, given.shapes, ids)
    coordination = Coordination(
        ctx,
        events,
        stages=runners,
        shapes=shapes,
        snapshots=snapshots,
        on_stop=termination.request,
        on_drain=drain.ask,
        on_forget=_refuse_forget,
        on_failure=termination.fail,
        on_completed=senders.completed,
        outside=tuple(one.name for one in outside),
    )
    restarts = {name: partial(stage.restart, coordination) for name, stage in stages.items()}
    run = Run(
        ctx,
        termination,
        stages=stages,
        loops=graph.loops(),
        coordination=coordination,
        snapshots=snapshots,
        recovery=Recovery(ctx, given.policy, restarts, {s for s in stages if _renewal(given, s).possible}),
        drain=drain,
        senders=senders,
        shapes=shapes,
        on_end=partial(_stop_listening, job.spark, late),
    )
    job.spark.streams.addListener(late)
    try:
        _start_queries(given, stages, drain)
    except BaseException as error:  # of an interrupt, too: nobody else knows the queries that have begun
        termination.fail(error if isinstance(error, Exception) else Refused("interrupted during its start"))
        given.started()
        run.begin()
        termination.over.wait()
        if isinstance(error, Exception):
            termination.raise_failure()
        raise
    given.started()
    run.begin()
    return run


def _start_queries(given: Launch, stages: Mapping[StageId, RunningStage], drain: Drain) -> None:
    """Let stages that were lost repeat their batches, then start all queries.

    Of a run that begins with a drain, those of sources are not started.
    """
    for rebuild in given.rebuilds:
        repeat_batches(given.ctx, given.control, rebuild, stages[rebuild.stage])
    if given.drain is not None:
        drain.ask(given.drain, None)
    starts = []
    for decl in reversed(given.graph.order()):  # consumers first: a source that is ahead takes their cores
        if given.drain is not None and not decl.inputs:
            stages[decl.name].read_no_more()
        else:
            starts.append(stages[decl.name].query_start())
    start_queries(given.job.spark, given.ctx, starts)
    given.laps.over("queries")
    log.info("job %s has started run %s in %s", given.job.name, given.ctx.run, given.laps)


def _stop_listening(spark: SparkSession, late: LateRows) -> None:
    spark.streams.removeListener(late)
    drain_events(spark)


def _refuse_forget(stage: StageId) -> str:
    raise UsageError(
        f"{stage!r} is a stage of a job: declare the job without it, and start with "
        "allow_non_restored_state=True"
    )


def _runner(
    given: Launch,
    stage: StageDecl,
    tables: Mapping[str, DeltaSink],
    snapshots: Snapshotter,
    senders: Senders,
) -> StageRunner:
    """Open the outputs of a stage, refusing older runs there, and make what runs its batches."""
    job, ctx = given.job, given.ctx
    spec = job.stages[stage.name]
    writers = open_writers(ctx, spec, given.graph.consumed(stage.name))
    for writer in writers:
        writer.begin()
        ctx.failpoint(f"start.{stage.name}.fence-{writer.output}.after")
    sinks = sorted((s for s in job.sinks if s.source.stage == stage.name), key=lambda s: s.name)
    certain = given.plans[stage.name].repeatable
    lookups = open_lookups(job, ctx, given.graph, given.drafts, stage)
    outputs = Outputs(
        ctx, spec, channels=writers, tables=tables, sinks=sinks, repeatable=certain, lookups=lookups
    )
    start = tuple(ctx.start(stage.name, channel, channel in stage.feedback) for channel in stage.inputs)
    credit = _credit(ctx, given.graph, stage.name, senders)
    runner = StageRunner(
        ctx, stage.name, outputs=outputs, start=start, snapshots=snapshots, credit=credit, wrote=senders.wrote
    )
    runner.batch_lock.await_stop = partial(sleep_until_stopped, job.spark)
    return runner


def _stage(
    given: Launch,
    stage: StageDecl,
    *,
    frames: Frames,
    runner: StageRunner,
    snapshots: Snapshotter,
    senders: Senders,
    late: LateRows,
) -> RunningStage:
    parts = StageParts(
        given.job.spark,
        given.ctx,
        graph=given.graph,
        decl=stage,
        spec=given.job.stages[stage.name],
        plan=given.plans[stage.name],
        frame=query_frame(frames, given.plans[stage.name], stage),
        declared=frames.declared[stage.name],
        snapshots=snapshots,
        late=late,
        renew=_renewal(given, stage.name),
        reopen=partial(_reopened, given, stage, snapshots, senders),
    )
    return RunningStage(parts, runner)


def _renewal(given: Launch, stage: StageId) -> Renewal:
    tracking = _tracking(given, stage)
    return Renewal(
        given.job,
        given.graph,
        stage=stage,
        plan=given.plans[stage],
        schemas=given.drafts.schemas,
        tracking=tracking,
    )


def _tracking(given: Launch, stage: StageId) -> str:
    """Say where Delta tracks the schemas of a stage's sources."""
    return given.ctx.native(stage).below(SCHEMA_LOGS).uri


def _reopened(given: Launch, stage: StageDecl, snapshots: Snapshotter, senders: Senders) -> StageRunner:
    mine = [s for s in given.job.sinks if s.source.stage == stage.name]
    tables = {s.name: _attach(given, s, s.table) for s in mine if s.table is not None}
    return _runner(given, stage, tables, snapshots, senders)


def _credit(ctx: RunContext, graph: JobGraph, stage: StageId, senders: Senders) -> Credit:
    consumers = Consumers(ctx, {s.name: s.forward for s in graph.stages}, senders.unsent)
    read = {channel for s in graph.stages for channel in s.forward}
    read |= {channel_id(s.stage, s.output) for s in graph.sinks if s.outside}
    channels = [c for o in graph.consumed(stage) if (c := channel_id(stage, o)) in read]
    return Credit(ctx, channels, consumers, FIRST_ENTRY, ctx.poll_ms(ctx.native(stage)))


def _attach(given: Launch, sink: SinkSpec, uri: str) -> DeltaSink:
    ctx, source, spark = given.ctx, sink.source, given.job.spark
    _ensure(given, sink, uri)
    overwrites = given.graph.stage(source.stage).output_mode == "complete"
    writer = ctx.writer(source.stage, sink.name)
    table = DeltaSink(
        ctx.root,
        uri,
        writer=writer,
        run=ctx.run,
        session=lambda: spark,
        key=sink.key,
        overwrites=overwrites,
        changes=sink.changes,
        in_order_since=ctx.in_order_since,
    )
    if given.job.stages[source.stage].adopt is not None:
        fence_query(ctx, source.stage, sink.name, uri, lambda: spark)
    table.begin(
        take_over=_took_over(given, sink, table) == ctx.run,
        alone=sink.existing is None and not is_recorded(given.control.state, sink, table.table_id),
    )
    return table


def _took_over(given: Launch, sink: SinkSpec, table: DeltaSink) -> RunId:
    """Return the run that takes a table over: it counts once, not as long as a script says it."""
    before = taken_over(given.control.state, sink.name, table.uri, table.table_id)
    return given.ctx.run if sink.existing == "take_over" and before == NO_RUN else before


def _ensure(given: Launch, sink: SinkSpec, uri: str) -> None:
    assert sink.delta is not None
    schema = given.drafts.schemas[sink.source.channel]
    ensure_sink(given.ctx.root.storage.place(uri), schema, sink.delta, given.job.spark)
    given.ctx.failpoint(f"start.{sink.name}.table.after")
    if sink.target is not None:
        enter(given.job.spark, sink.target)


def before(given: Launch, stage: StageId) -> Before:
    """Return the watermark and the functions that a repartitioning may not have copied to every partition.

    They may be missing in a later attempt, too, if a checkpoint came before its first batch had ended.
    """
    ctx, path = given.ctx, given.control.state.lineage()
    attempt = path[-1]
    if attempt.checkpoint is None or all(stage not in step.partitions for step in path):
        return NOTHING
    try:
        origin = Checkpoints.open(ctx.root, ctx.job).load(attempt.checkpoint).graph
    except CheckpointNotFound:
        origin = ()  # retired, and so there is a later one, and records
    functions = {f.uid: f for shape in origin if shape.stage == stage for f in shape.functions}
    return Before(NativeLog(ctx.native(stage)).watermark_ms(), functions)


def _gate(given: Launch, stage: StageId, channel: ChannelId, schema: StructType) -> DataFrame:
    ctx, native, decl = given.ctx, given.ctx.native(stage), given.graph.stage(stage)
    feedback, columns = decl.feedback, given.plans[stage].columns
    read = schema if columns is None else narrowed(schema, columns.get(channel, frozenset()))
    frame = open_gate(
        given.job.spark,
        GateSpec(
            root=ctx.root.uri,
            start=ctx.start(stage, channel, channel in feedback),
            schema=read.json(),
            native=native.uri,
            path=channel_path(given.control.state, channel),
            run=ctx.run,
            attempt=ctx.attempt,
            floor=ctx.floor,
            control_version=ctx.control_version,
            back=tuple(
                BackEdge(ctx.start(stage, back, True), channel_path(given.control.state, back))
                for back in (feedback if channel not in feedback else ())
            ),
            others=None if decl.has_native else tuple(other for other in decl.inputs if other != channel),
            capacity=Capacity(ctx.settings.capacity_entries, ctx.settings.capacity_bytes),
            max_entries=ctx.settings.max_entries_per_batch,
            max_bytes=ctx.settings.max_bytes_per_batch,
            partition_bytes=ctx.settings.partition_bytes,
            poll_ms=ctx.poll_ms(ctx.root.top),
            native_poll_ms=ctx.poll_ms(native),
        ),
        ctx.root.storage,
    )
    return widened(frame, channel, schema)


def _shapes(declared: Sequence[StageShape], ids: Mapping[ChannelId, str]) -> tuple[StageShape, ...]:
    return tuple(
        replace(s, channels={output: ids[channel_id(s.stage, output)] for output in s.channels})
        for s in declared
    )


def _sendings(sinks: Sequence[SinkSpec], schemas: Mapping[ChannelId, StructType]) -> list[Sending]:
    """Return the sinks outside of a job; `schemas` has the columns of each channel."""
    return [
        Sending(
            spec.name,
            spec.source.stage,
            output=spec.source.name,
            schema=delta_schema(schemas[spec.source.channel]),
            sink=spec.outside,
            kind=spec.kind,
            settings=spec.settings,
        )
        for spec in sinks
        if spec.outside is not None
    ]


class Laps:
    """A clock that is told when a part is over. For one thread."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: list[str] = []

    def over(self, part: str) -> None:
        """Say that a part is over which began when the one before was."""
        now = time.monotonic()
        self._parts.append(f"{part} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        """Return the time of the whole, and of each part."""
        return f"{self._last - self._began:.1f} s ({', '.join(self._parts)})"
