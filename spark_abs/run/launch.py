"""Start the queries of a run: channels and sinks, gates, stage runners, coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark import SparkFiles

from spark_abs.catalog.target import enter
from spark_abs.channels.gate import BackEdge, GateSpec, open_gate
from spark_abs.channels.schema import delta_schema
from spark_abs.channels.taken import TakenNote
from spark_abs.channels.writer import create_channel
from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.checkpointing.commands import Abilities
from spark_abs.checkpointing.coordination import Coordination, Events
from spark_abs.compatibility.adoption import fence_query
from spark_abs.compatibility.existing import is_recorded
from spark_abs.compatibility.inspection import Drafted
from spark_abs.compatibility.restored import functions_before
from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import StageShape
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import (
    NO_RUN,
    ChannelId,
    Entry,
    RunId,
    StageId,
    channel_id,
)
from spark_abs.observe.skipping import refuse_read
from spark_abs.plan.columns import narrowed, widened
from spark_abs.plan.frames import Frames, build_frames
from spark_abs.plan.graph import StageDecl
from spark_abs.plan.specs import JobSpec, SinkSpec
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.control import AttachedSink, attach, taken_over
from spark_abs.protocol.credit import Capacity
from spark_abs.protocol.path import channel_path
from spark_abs.protocol.restarts import RestartPolicy
from spark_abs.run.asked_restarts import AskedRestarts
from spark_abs.run.drain import Drain
from spark_abs.run.lifecycle import Termination
from spark_abs.run.lookups import open_lookups, query_frame
from spark_abs.run.paused_sources import PausedSources
from spark_abs.run.rebuild import Rebuild, repeat_batches
from spark_abs.run.recovery import Recovery
from spark_abs.run.renewal import Renewal
from spark_abs.run.run import Run
from spark_abs.run.running_stage import RunningStage, StageParts
from spark_abs.run.skipped_files import SkippedFiles
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.create import ensure_sink
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.sinks.sending.sender import Sending
from spark_abs.sinks.sending.senders import Senders, open_senders
from spark_abs.snapshots.schema_log import SCHEMA_LOGS
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.spark.driver import drain_events, sleep_until_stopped
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.credit import Credit
from spark_abs.stages.in_place import InPlace
from spark_abs.stages.late_rows import LateRows
from spark_abs.stages.outputs import Outputs, open_writers
from spark_abs.stages.queries import start_queries
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.stages.stage import StageRunner
from spark_abs.stages.unread import Unread
from spark_abs.store.control import Control

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)


class Laps:
    """Measures the parts of a start. For one thread."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: list[str] = []

    def over(self, part: str) -> None:
        """End a part of the start; the next part begins."""
        now = time.monotonic()
        self._parts.append(f"{part} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        """Return the total time and the time of each part, as text."""
        return f"{self._last - self._began:.1f} s ({', '.join(self._parts)})"


class Launch:
    """Starts the queries and the coordinator of a run whose root is prepared. Used once."""

    def __init__(
        self,
        job: JobSpec,
        ctx: RunContext,
        drafted: Drafted,
        *,
        shapes: Sequence[StageShape],
        control: Control,
        policy: RestartPolicy,
        started: Callable[[], None],
        laps: Laps,
        rebuilds: Sequence[Rebuild] = (),
        drain: str | None = None,
    ) -> None:
        """Take the results of the earlier steps of a start.

        Args:
            job: the job.
            ctx: the run.
            drafted: its graph, plans and frames.
            shapes: the stages as they are declared.
            control: the start's handle on `control/`.
            policy: how stages that fail are restarted.
            started: called when the coordinator is about to renew the lease instead of the start.
            laps: measures the start.
            rebuilds: the stages that repeat their batches first.
            drain: the savepoint of an unfinished drain: sources do not read, and the run ends with this
                savepoint.
        """
        self._job, self._ctx, self._control = job, ctx, control
        self._graph, self._plans, self._drafts = drafted.graph, drafted.plans, drafted.frames
        self._declared_shapes, self._policy, self._rebuilds = shapes, policy, rebuilds
        self._started, self._laps, self._drain_to = started, laps, drain
        self._termination, self._events, self._late = Termination(), Events(), LateRows()
        self._notes = f"spark_abs-taken-{uuid4().hex}"
        self._unread = Unread(ctx)
        paused = [one.stage for one in control.state.paused]
        self._paused = PausedSources(self._graph, ctx.bounded, paused)
        self._skipped = SkippedFiles(ctx, control.state.skipped)
        self._senders: Senders
        self._snapshots: Snapshotter

    def start(self) -> Run:
        """Start the run; if a part of it cannot start, stop the parts that have.

        1. Create the channels.  2. Create and attach the sinks in Delta tables.  3. Open the storage of
        state.  4. Fence and open the sinks outside.  5. Fence the outputs of each stage and make its runner.
        6. Build the frames, which read through gates.  7. Join the parts.  8. Start the queries.  9. Start
        the coordinator, which renews the lease from then on.
        """
        ctx, graph = self._ctx, self._graph
        shapes = self._create_channels()  # 1
        ctx.failpoint("start.channels.after")
        tables = self._attach_sinks()  # 2
        ctx.failpoint("start.sinks.after")
        manifests = Checkpoints.open(ctx.root, ctx.job).load_all()
        storage = StateStorage.open(ctx.root, ctx.job, ctx.run, manifests, ctx.failpoint)  # 3
        outside = self._outside()
        self._senders = open_senders(self._job.spark, ctx, outside, self._control, manifests)  # 4
        ctx.failpoint("start.state.after")
        cleaner = CheckpointCleaner(ctx, {s.name: s.inputs for s in graph.stages}, storage, self._senders)
        self._snapshots = Snapshotter(ctx, storage, cleaner, self._events.put, self._termination.fail)
        runners = {s.name: self._runner(s, tables) for s in graph.stages}  # 5
        refuse_read(ctx.root, self._control.state)
        frames = build_frames(  # 6
            self._job,
            graph,
            open_gate=self._gate,
            before=partial(functions_before, ctx, self._control),
            checked=self._drafts.declared,
            lookups=self._drafts.lookups,
            tracking=self._schema_log,
        )
        stages = {s.name: self._stage(s, frames, runners[s.name]) for s in graph.stages}
        self._laps.over("channels and sinks")
        drain = Drain(ctx, self._control, graph, self._plans, stages)
        run = self._joined(stages, runners, drain, shapes, tuple(one.name for one in outside))  # 7
        self._job.spark.streams.addListener(self._late)
        try:
            self._start_queries(stages, drain)  # 8
        except BaseException as error:  # of an interrupt, too: nobody else knows the queries that have begun
            failed = error if isinstance(error, Exception) else Refused("interrupted during its start")
            self._termination.fail(failed)
            self._started()
            run.begin()
            self._termination.over.wait()
            if isinstance(error, Exception):
                self._termination.raise_failure()
            raise
        self._started()
        run.begin()  # 9
        return run

    def _create_channels(self) -> tuple[StageShape, ...]:
        """Create the channels that are missing; return the stages as declared, with the ids of channels."""
        ids = {}
        for stage in self._graph.stages:
            for output in self._graph.consumed(stage.name):
                channel = channel_id(stage.name, output)
                ids[channel] = create_channel(self._ctx.root, channel, self._drafts.schemas[channel])
        return tuple(
            replace(s, channels={output: ids[channel_id(s.stage, output)] for output in s.channels})
            for s in self._declared_shapes
        )

    def _attach_sinks(self) -> dict[str, DeltaSink]:
        """Create the tables of sinks that are missing, fence them, and record them in `control/`."""
        sinks = self._job.sinks
        tables = {s.name: self._attach(s, s.table) for s in sinks if s.table is not None}
        for sink in sinks:
            if sink.epoch_table is not None:
                self._create_table(sink, sink.epoch_table)
        attached = [self._record(sink, tables[sink.name]) for sink in sinks if sink.name in tables]
        self._control.update(lambda state: attach(state, attached))
        return tables

    def _attach(self, sink: SinkSpec, uri: str) -> DeltaSink:
        ctx, source, spark = self._ctx, sink.source, self._job.spark
        self._create_table(sink, uri)
        table = DeltaSink(
            ctx.root,
            uri,
            writer=ctx.writer(source.stage, sink.name),
            run=ctx.run,
            session=lambda: spark,
            key=sink.key,
            overwrites=self._graph.stage(source.stage).output_mode == "complete",
            changes=sink.changes,
            in_order_since=ctx.in_order_since,
        )
        if self._job.stages[source.stage].adopt is not None:
            fence_query(ctx, source.stage, sink.name, uri, lambda: spark)
        recorded = is_recorded(self._control.state, sink, table.table_id)
        table.begin(
            take_over=self._took_over(sink, table) == ctx.run, alone=sink.existing is None and not recorded
        )
        return table

    def _create_table(self, sink: SinkSpec, uri: str) -> None:
        assert sink.delta is not None
        schema = self._drafts.schemas[sink.source.channel]
        ensure_sink(self._ctx.root.storage.place(uri), schema, sink.delta, self._job.spark)
        self._ctx.failpoint(f"start.{sink.name}.table.after")
        if sink.target is not None:
            enter(self._job.spark, sink.target)

    def _record(self, sink: SinkSpec, table: DeltaSink) -> AttachedSink:
        return AttachedSink(
            sink.source.stage,
            sink.name,
            table.uri,
            table.table_id,
            key=sink.key,
            overwrites=table.overwrites,
            changes=sink.changes,
            name=sink.table_name,
            attempt=self._ctx.attempt,
            took_over=self._took_over(sink, table),
        )

    def _took_over(self, sink: SinkSpec, table: DeltaSink) -> RunId:
        """Return the run that took a table over: the first run that did, whatever later starts declare."""
        before = taken_over(self._control.state, sink.name, table.uri, table.table_id)
        return self._ctx.run if sink.existing == "take_over" and before == NO_RUN else before

    def _outside(self) -> list[Sending]:
        schemas = self._drafts.schemas
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
            for spec in self._job.sinks
            if spec.outside is not None
        ]

    def _runner(self, stage: StageDecl, tables: Mapping[str, DeltaSink]) -> StageRunner:
        """Open the outputs of a stage, which fences older runs, and make the runner of its batches."""
        job, ctx = self._job, self._ctx
        spec = job.stages[stage.name]
        writers = open_writers(ctx, spec, self._graph.consumed(stage.name))
        for writer in writers:
            writer.begin()
            ctx.failpoint(f"start.{stage.name}.fence-{writer.output}.after")
        outputs = Outputs(
            ctx,
            spec,
            channels=writers,
            tables=tables,
            sinks=sorted(self._sinks_of(stage), key=lambda s: s.name),
            repeatable=self._plans[stage.name].repeatable,
            row_by_row=self._plans[stage.name].row_by_row,
            lookups=open_lookups(job, ctx, self._graph, self._drafts, stage),
        )
        runner = StageRunner(
            ctx,
            stage.name,
            outputs=outputs,
            start=tuple(
                ctx.start(stage.name, channel, channel in stage.feedback) for channel in stage.inputs
            ),
            snapshots=self._snapshots,
            credit=self._credit(stage.name),
            wrote=self._wrote,
            unread=self._unread,
            in_place=self._in_place(stage),
            paused=partial(self._paused.holds, stage.name),
        )
        runner.batch_lock.await_stop = partial(sleep_until_stopped, job.spark)
        return runner

    def _in_place(self, stage: StageDecl) -> InPlace | None:
        """Return the look at the inputs of a stage that may take barriers where it stands."""
        note = self._note(stage)
        if not note:
            return None
        paths = {channel: channel_path(self._control.state, channel) for channel in stage.inputs}
        return InPlace(self._ctx, paths, TakenNote(note))

    def _note(self, stage: StageDecl) -> str:
        """Return the file by which a stage tells its gates what it has taken; empty if it takes nothing so.

        It is in Spark's directory of the session, which Spark deletes.
        """
        if self._ctx.bounded or stage.has_native or stage.feedback or not stage.inputs:
            return ""
        return f"{SparkFiles.getRootDirectory()}/{self._notes}-{stage.name}"

    def _wrote(self, entries: Mapping[ChannelId, Entry]) -> None:
        self._unread.wrote(entries)
        self._senders.wrote(entries)

    def _reopened(self, stage: StageDecl) -> StageRunner:
        """Make a further runner of a stage, with separate handles."""
        tables = {s.name: self._attach(s, s.table) for s in self._sinks_of(stage) if s.table is not None}
        return self._runner(stage, tables)

    def _sinks_of(self, stage: StageDecl) -> list[SinkSpec]:
        return [sink for sink in self._job.sinks if sink.source.stage == stage.name]

    def _credit(self, stage: StageId) -> Credit:
        ctx, graph = self._ctx, self._graph
        consumers = Consumers(ctx, {s.name: s.forward for s in graph.stages}, self._senders.unsent)
        read = {channel for s in graph.stages for channel in s.forward}
        read |= {channel_id(s.stage, s.output) for s in graph.sinks if s.outside}
        channels = [c for o in graph.consumed(stage) if (c := channel_id(stage, o)) in read]
        return Credit(ctx, channels, consumers, FIRST_ENTRY, ctx.poll_ms(ctx.native(stage)))

    def _gate(self, stage: StageId, channel: ChannelId, schema: StructType) -> DataFrame:
        ctx, decl, state = self._ctx, self._graph.stage(stage), self._control.state
        native, feedback, columns = ctx.native(stage), decl.feedback, self._plans[stage].columns
        read = schema if columns is None else narrowed(schema, columns.get(channel, frozenset()))
        frame = open_gate(
            self._job.spark,
            GateSpec(
                root=ctx.root.uri,
                start=ctx.start(stage, channel, channel in feedback),
                schema=read.json(),
                native=native.uri,
                path=channel_path(state, channel),
                run=ctx.run,
                attempt=ctx.attempt,
                floor=ctx.floor,
                control_version=ctx.control_version,
                back=tuple(
                    BackEdge(ctx.start(stage, back, True), channel_path(state, back))
                    for back in (feedback if channel not in feedback else ())
                ),
                taken=self._note(decl),
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

    def _schema_log(self, stage: StageId) -> str:
        """Return where Delta tracks the schemas of a stage's sources."""
        return self._ctx.native(stage).below(SCHEMA_LOGS).uri

    def _stage(self, stage: StageDecl, frames: Frames, runner: StageRunner) -> RunningStage:
        plan = self._plans[stage.name]
        parts = StageParts(
            self._job.spark,
            self._ctx,
            graph=self._graph,
            decl=stage,
            spec=self._job.stages[stage.name],
            plan=plan,
            frame=query_frame(frames, plan, stage),
            declared=frames.declared[stage.name],
            snapshots=self._snapshots,
            late=self._late,
            renew=self._renewal(stage.name),
            reopen=partial(self._reopened, stage),
            skipped=partial(self._skipped.of, stage.name),
        )
        return RunningStage(parts, runner)

    def _renewal(self, stage: StageId) -> Renewal:
        return Renewal(
            self._job,
            self._graph,
            stage=stage,
            plan=self._plans[stage],
            schemas=self._drafts.schemas,
            tracking=self._schema_log(stage),
        )

    def _joined(
        self,
        stages: Mapping[StageId, RunningStage],
        runners: Mapping[StageId, StageRunner],
        drain: Drain,
        shapes: tuple[StageShape, ...],
        outside: tuple[str, ...],
    ) -> Run:
        """Join the parts to a run; nothing runs yet."""
        ctx, termination = self._ctx, self._termination
        asked = AskedRestarts(stages, partial(_refuse_restart, ctx, drain))
        coordination = Coordination(
            ctx,
            self._events,
            stages=runners,
            shapes=lambda: shapes,
            snapshots=self._snapshots,
            can=Abilities(
                termination.request,
                drain.ask,
                _refuse_forget,
                sources=self._paused.named,
                hold=self._paused.hold,
                restart=asked.ask,
                skip=partial(self._skipped.ask, asked),
            ),
            on_failure=termination.fail,
            on_completed=self._senders.completed,
            outside=outside,
        )
        restarts = {name: partial(stage.restart, coordination) for name, stage in stages.items()}
        renewable = {name for name in stages if self._renewal(name).possible}
        return Run(
            ctx,
            termination,
            stages=stages,
            loops=self._graph.loops(),
            coordination=coordination,
            snapshots=self._snapshots,
            recovery=Recovery(ctx, self._policy, restarts, renewable),
            drain=drain,
            restarts=asked,
            senders=self._senders,
            shapes=shapes,
            on_end=self._stop_listening,
        )

    def _start_queries(self, stages: Mapping[StageId, RunningStage], drain: Drain) -> None:
        """Let rebuilt stages repeat their batches, then start all queries.

        If the run begins with a drain, the queries of sources are not started.
        """
        for rebuild in self._rebuilds:
            repeat_batches(self._ctx, self._control, rebuild, stages[rebuild.stage])
        if self._drain_to is not None:
            drain.ask(self._drain_to, None)
        starts = []
        # Consumers first: a source that is ahead takes their cores.
        for decl in reversed(self._graph.order()):
            if self._drain_to is not None and not decl.inputs:
                stages[decl.name].read_no_more()
            else:
                starts.append(stages[decl.name].query_start())
        start_queries(self._job.spark, self._ctx, starts)
        self._laps.over("queries")
        log.info("job %s has started run %s in %s", self._job.name, self._ctx.run, self._laps)

    def _stop_listening(self) -> None:
        self._job.spark.streams.removeListener(self._late)
        drain_events(self._job.spark)


def _refuse_forget(stage: StageId) -> str:
    raise UsageError(
        f"{stage!r} is a stage of a job: declare the job without it, and start with "
        "allow_non_restored_state=True"
    )


def _refuse_restart(ctx: RunContext, drain: Drain) -> None:
    if ctx.bounded:
        raise UsageError("a bounded run ends with its input: its stages are not restarted on request")
    if drain.asked is not None:
        raise UsageError("the job is being drained, and restarts no stage meanwhile")
