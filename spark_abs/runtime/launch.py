"""Start the queries of a run: channels and sinks, gates, stage runners, coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spark_abs.channels.gate import GateSpec, open_gate
from spark_abs.channels.writer import create_channel
from spark_abs.manifest import StageShape
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    ChannelId,
    Position,
    StageId,
    Version,
    channel_id,
)
from spark_abs.protocol.control import AttachedSink, attach
from spark_abs.protocol.path import channel_path
from spark_abs.runtime.context import RunContext
from spark_abs.runtime.coordination import Coordination
from spark_abs.runtime.frames import Frames, build_frames
from spark_abs.runtime.graph import JobGraph, PlanFacts
from spark_abs.runtime.job import PROVIDERS, Job, SinkSpec, StageSpec
from spark_abs.runtime.native import clear_unplanned
from spark_abs.runtime.outputs import Outputs, open_writers
from spark_abs.runtime.progress import LateRows
from spark_abs.runtime.run import Run
from spark_abs.runtime.snapshotter import Listener, Snapshotter, StageFacts
from spark_abs.runtime.stage import StageRunner
from spark_abs.runtime.tidy import Tidy
from spark_abs.sinks.delta import DeltaSink, ensure_sink
from spark_abs.snapshots.kept import KeptState
from spark_abs.store.checkpoints import Checkpoints
from spark_abs.store.control import Control

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_SOURCES_POLL_S = 0.02

FIRST_ENTRY = Version(0)
"""The commit that creates a channel: every input's first position."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is known when queries may start."""

    job: Job
    ctx: RunContext
    graph: JobGraph
    plans: Mapping[StageId, PlanFacts]
    drafts: Frames
    control: Control


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
    late = LateRows()
    queries: dict[StageId, StreamingQuery] = {}
    checkpoints = Checkpoints.open(ctx.root, ctx.job)
    kept = KeptState.open(ctx.root, ctx.job, ctx.run, checkpoints.load_all(), ctx.probe)
    ctx.probe("start.state.after")
    facts = {
        s.name: StageFacts(
            {t: Version(v) for t, v in given.plans[s.name].static_tables.items()},
            partial(_dropped_late, late, queries, s.name),
        )
        for s in graph.stages
    }
    snapshots = Snapshotter(ctx, kept, facts, Tidy(ctx, {s.name: s.inputs for s in graph.stages}, kept))
    runners: dict[StageId, StageRunner] = {}
    for stage in graph.stages:
        spec = job.stages[stage.name]
        writers = open_writers(ctx, spec, graph.consumed(stage.name))
        for writer in writers:
            writer.begin()
            ctx.probe(f"start.{stage.name}.fence-{writer.output}.after")
        sinks = sorted((s for s in job.sinks if s.source.stage == stage.name), key=lambda s: s.name)
        outputs = Outputs(ctx, spec, writers, tables, sinks)
        start = tuple(first_position(channel) for channel in stage.inputs)
        runners[stage.name] = StageRunner(ctx, stage.name, outputs, start, snapshots)
    frames = build_frames(job, graph, lambda stage, channel, schema: _gate(given, stage, channel, schema))
    run = Run(ctx, runners, snapshots, lambda: job.spark.streams.removeListener(late))
    coordination = Coordination(
        ctx, runners, partial(_shapes, graph, given.drafts, ids), snapshots, run.request_stop, run.fail
    )
    snapshots.report_to(Listener(coordination.put, lambda name: runners[name].turns.wake(), run.fail))
    job.spark.streams.addListener(late)
    try:
        for stage in graph.order():
            queries[stage.name] = _start_query(given, job.stages[stage.name], frames, runners[stage.name])
            ctx.probe(f"start.{stage.name}.query.after")
    except Exception as error:
        run.fail(error)
        run.begin(queries, coordination)
        run.await_termination()
        raise
    run.begin(queries, coordination)
    return run


def _attach(given: Launch, sink: SinkSpec, uri: str) -> DeltaSink:
    ctx, source = given.ctx, sink.source
    ensure_sink(ctx.root.storage.place(uri), given.drafts.schemas[source.channel])
    table = DeltaSink(
        ctx.root, uri, ctx.job, source.stage, sink.name, ctx.attempt, ctx.run, lambda: given.job.spark
    )
    table.begin()
    return table


def _dropped_late(late: LateRows, queries: Mapping[StageId, StreamingQuery], stage: StageId) -> int:
    return late.dropped(str(queries[stage].id)) if stage in queries else 0


def _start_query(given: Launch, spec: StageSpec, frames: Frames, runner: StageRunner) -> StreamingQuery:
    ctx, spark = given.ctx, given.job.spark
    native = ctx.native(spec.name)
    clear_unplanned(native)
    conf = {}
    if spec.shuffle_partitions is not None:
        conf["spark.sql.shuffle.partitions"] = str(spec.shuffle_partitions)
    if spec.state_provider is not None:
        conf["spark.sql.streaming.stateStore.providerClass"] = PROVIDERS[spec.state_provider]
    writer = (
        frames.stages[spec.name]
        .writeStream.outputMode(spec.output_mode)
        .queryName(f"{ctx.job}/{spec.name}")
        .option("checkpointLocation", native.uri)
        .foreachBatch(runner.run_batch)
    )
    if ctx.bounded and not spec.channels:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=spec.trigger or "0 seconds")
    with _session_conf(spark, conf), _pool(spark, f"{ctx.job}/{spec.name}"):
        query = writer.start()
    _await_sources(query)
    return query


def _await_sources(query: StreamingQuery) -> None:
    """Wait until a query has opened its sources, or has ended.

    Spark gives the process behind a gate ten seconds to come up: many at once, on few cores, take longer.
    """
    pause = threading.Event()
    while query.isActive and str(query.status["message"]).startswith("Initializing"):
        pause.wait(_SOURCES_POLL_S)


@contextmanager
def _session_conf(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Set session settings while a query starts: it takes a copy of the session."""
    before = {key: spark.conf.get(key, None) for key in values}
    for key, value in values.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


@contextmanager
def _pool(spark: SparkSession, name: str) -> Iterator[None]:
    """Start a query in a scheduler pool of its own: its thread inherits it."""
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    try:
        yield
    finally:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", None)  # type: ignore[arg-type]


def first_position(channel: ChannelId) -> Position:
    """Return where an input begins: constant, since Spark asks again when batch 0 is repeated."""
    return Position(channel, AttemptId(1), FIRST_ENTRY, NO_EPOCH)


def _gate(given: Launch, stage: StageId, channel: ChannelId, schema: StructType) -> DataFrame:
    ctx, native = given.ctx, given.ctx.native(stage)
    return open_gate(
        given.job.spark,
        GateSpec(
            root=ctx.root.uri,
            start=first_position(channel),
            schema=schema.json(),
            native=native.uri,
            path=channel_path(given.control.state, channel),
            run=ctx.run,
            attempt=ctx.attempt,
            floor=ctx.floor,
            control_version=ctx.control_version,
            max_entries=ctx.settings.max_entries_per_batch,
            max_bytes=ctx.settings.max_bytes_per_batch,
            partition_bytes=ctx.settings.partition_bytes,
            poll_ms=ctx.poll_ms(ctx.root.top),
            native_poll_ms=ctx.poll_ms(native),
        ),
        ctx.root.storage,
    )


def _shapes(graph: JobGraph, frames: Frames, ids: Mapping[ChannelId, str]) -> tuple[StageShape, ...]:
    return tuple(
        StageShape(
            stage=s.name,
            inputs=tuple(s.inputs),
            outputs={o: frames.schemas[channel_id(s.name, o)].json() for o in s.outputs},
            channels={o: ids[channel_id(s.name, o)] for o in graph.consumed(s.name)},
            sinks={k.name: k.output for k in graph.sinks_of(s.name)},
        )
        for s in graph.stages
    )
