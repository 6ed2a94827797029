"""Start the queries of a run: channels and sinks, gates, stage runners, coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from spark_abs.channels.gate import BackEdge, GateSpec
from spark_abs.channels.opening import open_gate
from spark_abs.channels.writer import create_channel
from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.checkpointing.coordination import Coordination
from spark_abs.checkpointing.sending import Senders, open_senders, sendings
from spark_abs.errors import CheckpointNotFound, DamageError, UsageError
from spark_abs.manifest import StageShape
from spark_abs.model import (
    NO_BATCH,
    ChannelId,
    StageId,
    Version,
    channel_id,
)
from spark_abs.plan.columns import narrowed, widened
from spark_abs.plan.frames import Frames, build_frames
from spark_abs.plan.graph import JobGraph, PlanFacts, StageDecl
from spark_abs.plan.specs import JobSpec, SinkSpec
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.control import AttachedSink, attach
from spark_abs.protocol.credit import Capacity
from spark_abs.protocol.path import channel_path
from spark_abs.protocol.restarts import RestartPolicy
from spark_abs.run.drain import Drain
from spark_abs.run.laps import Laps
from spark_abs.run.rebuild import Rebuild, repeat_batches
from spark_abs.run.recovery import Recovery
from spark_abs.run.run import Run
from spark_abs.sinks.create import ensure_sink
from spark_abs.sinks.delta import DeltaSink
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.context import RunContext
from spark_abs.stages.credit import Credit
from spark_abs.stages.driver_jvm import drain_events, sleep_until_stopped
from spark_abs.stages.native import NativeLog, check_native
from spark_abs.stages.outputs import Outputs, newest_output, open_writers
from spark_abs.stages.progress import LateRows
from spark_abs.stages.queries import QueryStart, start_queries
from spark_abs.stages.snapshotter import Listener, Snapshotter, StageFacts
from spark_abs.stages.stage import StageRunner
from spark_abs.state.declared import NOTHING, Before, Declared
from spark_abs.store.checkpoints import Checkpoints
from spark_abs.store.control import Control

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_WELCOME_POLL_S = 0.1
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
    ctx.probe("start.channels.after")
    tables = {s.name: _attach(given, s, s.table) for s in job.sinks if s.table is not None}
    attached = [
        AttachedSink(s.source.stage, s.name, tables[s.name].uri, tables[s.name].table_id)
        for s in job.sinks
        if s.name in tables
    ]
    given.control.update(lambda state: attach(state, attached))
    ctx.probe("start.sinks.after")
    late, declared = LateRows(), dict(given.drafts.declared)
    queries: dict[StageId, StreamingQuery] = {}
    manifests = Checkpoints.open(ctx.root, ctx.job).load_all()
    kept = StateStorage.open(ctx.root, ctx.job, ctx.run, manifests, ctx.probe)
    senders = open_senders(ctx, sendings(job.sinks, given.drafts.schemas), given.control, manifests)
    ctx.probe("start.state.after")
    facts = {
        s.name: StageFacts(
            {t: Version(v) for t, v in given.plans[s.name].static_tables.items()},
            partial(_dropped_late, late, queries, declared, s.name),
            given.plans[s.name].functions,
        )
        for s in graph.stages
    }
    cleaner = CheckpointCleaner(ctx, {s.name: s.inputs for s in graph.stages}, kept, senders)
    snapshots = Snapshotter(ctx, kept, facts, cleaner)
    runners: dict[StageId, StageRunner] = {}
    for stage in graph.stages:
        runners[stage.name] = _runner(given, stage, tables, snapshots, senders)
    frames = build_frames(
        job,
        graph,
        lambda stage, channel, schema: _gate(given, stage, channel, schema),
        partial(before, given),
        given.drafts.declared,
    )
    declared.update(frames.declared)  # from now on: these count what they drop
    given.laps.over("channels and sinks")

    def restart(stage: StageDecl) -> None:
        _restart(given, stage, frames, snapshots, senders, runners, queries, coordination)

    recovery = Recovery(ctx, given.policy, {s.name: partial(restart, s) for s in graph.stages})
    drain = Drain(
        ctx,
        given.control,
        graph,
        given.plans,
        runners,
        queries,
        lambda name: _start(given, name, frames, runners[name]),
    )
    run = Run(
        ctx,
        runners,
        graph.loops(),
        snapshots,
        recovery,
        drain,
        senders,
        partial(_stop_listening, job.spark, late),
    )
    coordination = Coordination(
        ctx,
        runners,
        partial(_shapes, given.shapes, ids),
        snapshots,
        run.request_stop,
        run.request_drain,
        _refuse_forget,
        run.fail,
        senders.completed,
    )
    snapshots.report_to(Listener(coordination.put, lambda name: runners[name].batch_lock.wake(), run.fail))
    job.spark.streams.addListener(late)
    try:
        for rebuild in given.rebuilds:
            name = rebuild.stage
            again = partial(_start, given, name, frames, runners[name])
            repeat_batches(ctx, given.control, rebuild, runners[name], again)
        if given.drain is not None:
            run.request_drain(given.drain, None)
        starts = []
        for stage in reversed(graph.order()):  # consumers first: a source that is ahead takes their cores
            if given.drain is not None and not stage.inputs:
                drain.halted.add(stage.name)
                runners[stage.name].only = NO_BATCH
                continue
            take = partial(_started, ctx, queries, stage.name)
            starts.append(_query_start(given, stage.name, frames, runners[stage.name], take))
        start_queries(job.spark, ctx, starts)
        given.laps.over("queries")
        log.info("job %s has started run %s in %s", job.name, ctx.run, given.laps)
    except Exception as error:
        run.fail(error)
        given.started()
        run.begin(queries, coordination)
        run.await_termination()
        raise
    given.started()
    run.begin(queries, coordination)
    return run


def _stop_listening(spark: SparkSession, late: LateRows) -> None:
    spark.streams.removeListener(late)
    drain_events(spark)


def _started(
    ctx: RunContext, queries: dict[StageId, StreamingQuery], stage: StageId, query: StreamingQuery
) -> None:
    queries[stage] = query
    ctx.probe(f"start.{stage}.query.after")


def _query_start(
    given: Launch,
    stage: StageId,
    frames: Frames,
    runner: StageRunner,
    take: Callable[[StreamingQuery], None],
) -> QueryStart:
    keeps_state = given.plans[stage].keeps_state
    return QueryStart(given.job.stages[stage], frames.stages[stage], runner, keeps_state, take)


def _start(given: Launch, stage: StageId, frames: Frames, runner: StageRunner) -> StreamingQuery:
    """Start the query of one stage."""
    started: list[StreamingQuery] = []
    one = _query_start(given, stage, frames, runner, started.append)
    start_queries(given.job.spark, given.ctx, [one])
    return started[0]


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
        ctx.probe(f"start.{stage.name}.fence-{writer.output}.after")
    sinks = sorted((s for s in job.sinks if s.source.stage == stage.name), key=lambda s: s.name)
    certain = given.plans[stage.name].repeatable
    outputs = Outputs(ctx, spec, writers, tables, sinks, repeatable=certain)
    start = tuple(ctx.start(stage.name, channel, channel in stage.feedback) for channel in stage.inputs)
    credit = _credit(ctx, given.graph, stage.name, senders)
    runner = StageRunner(ctx, stage.name, outputs, start, snapshots, credit)
    runner.batch_lock.await_stop = partial(sleep_until_stopped, job.spark)
    return runner


def _restart(
    given: Launch,
    stage: StageDecl,
    frames: Frames,
    snapshots: Snapshotter,
    senders: Senders,
    runners: dict[StageId, StageRunner],
    queries: dict[StageId, StreamingQuery],
    coordination: Coordination,
) -> None:
    """Start a stage whose query has failed again, from its native checkpoint, within the same run.

    1. The failed query is over, in all its threads.  2. A query that found nothing would begin with batch 0
    in silence: look.  3. A new runner with new handles.  4. It takes over what the old one was told, in the
    coordinator's thread, so that nothing is told to the old one any more.  5. The query.

    Raises:
        DamageError: the native checkpoint is missing or damaged.
    """
    ctx, name = given.ctx, stage.name
    runners[name].batch_lock.stop()  # 1
    with suppress(StreamingQueryException):
        queries[name].awaitTermination()
    finding = check_native(ctx.native(name), newest_output(ctx, given.graph, name))  # 2
    if finding is not None:
        raise DamageError(f"{finding}; start the job again: it says what can be done about it")
    mine = [s for s in given.job.sinks if s.source.stage == name]
    tables = {s.name: _attach(given, s, s.table) for s in mine if s.table is not None}  # 3
    runner = _runner(given, stage, tables, snapshots, senders)
    welcomed = coordination.join(runner)  # 4
    while not welcomed.wait(_WELCOME_POLL_S):
        if not coordination.is_alive:
            return  # the run ends with the error of the coordination
    runners[name] = runner
    queries[name] = _start(given, name, frames, runner)  # 5


def _credit(ctx: RunContext, graph: JobGraph, stage: StageId, senders: Senders) -> Credit:
    consumers = Consumers(ctx, {s.name: s.forward for s in graph.stages}, senders.unsent)
    read = {channel for s in graph.stages for channel in s.forward}
    read |= {channel_id(s.stage, s.output) for s in graph.sinks if s.outside}
    channels = [c for o in graph.consumed(stage) if (c := channel_id(stage, o)) in read]
    return Credit(ctx, channels, consumers, FIRST_ENTRY, ctx.poll_ms(ctx.native(stage)))


def _attach(given: Launch, sink: SinkSpec, uri: str) -> DeltaSink:
    ctx, source = given.ctx, sink.source
    ensure_sink(ctx.root.storage.place(uri), given.drafts.schemas[source.channel])
    writer = ctx.writer(source.stage, sink.name)
    table = DeltaSink(ctx.root, uri, writer, ctx.run, lambda: given.job.spark)
    table.begin(take_over=sink.existing == "take_over")
    return table


def before(given: Launch, stage: StageId) -> Before:
    """Say what the records said that a repartitioning has not left in every partition.

    They may be missing in a later attempt, too: of a checkpoint before the next batch had ended.
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


def _dropped_late(
    late: LateRows,
    queries: Mapping[StageId, StreamingQuery],
    declared: Mapping[StageId, Declared],
    stage: StageId,
) -> int:
    return declared[stage].dropped() + (late.dropped(str(queries[stage].id)) if stage in queries else 0)


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
