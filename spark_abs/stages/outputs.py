"""The outputs of one stage: a batch is committed to channels and sinks in a fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from deltalake.exceptions import DeltaError

from spark_abs.channels.channel_log import ChannelLog
from spark_abs.channels.writer import ChannelWriter
from spark_abs.errors import AbsError, CommitConflict
from spark_abs.manifest import OutputVersion, StageSnapshot
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    Barrier,
    BatchId,
    CheckpointId,
    Entry,
    LookupVersion,
    StageId,
    Version,
)
from spark_abs.observe.held import held, open_logs
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.specs import SinkSpec, StageSpec
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.commit_metadata import PlannedBatch
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.sinks.delta.sink_log import SinkLog
from spark_abs.stages.activity import Activity
from spark_abs.stages.barriers import BarrierProgress
from spark_abs.stages.batch import BatchFacts, Committed, Current, Marker, Repeated, within
from spark_abs.stages.evaluation import Evaluated, Evaluator
from spark_abs.stages.lookups import StageLookups
from spark_abs.stages.native import NativeLog
from spark_abs.stages.watched import WATCHED, WatchedTables
from spark_abs.store.activity import Phase


@dataclass(frozen=True, slots=True)
class IdleCut:
    """The cut of an idle stage: its last finished batch, and where the barrier stands in its channels."""

    batch: BatchId
    channels: Mapping[str, Version]


def open_writers(ctx: RunContext, spec: StageSpec, channels: Sequence[str]) -> tuple[ChannelWriter, ...]:
    """Open one writer for each output that is a channel."""
    return tuple(
        ChannelWriter(
            ctx.root,
            ctx.job,
            stage=spec.name,
            output=o,
            attempt=ctx.attempt,
            run=ctx.run,
            in_order_since=ctx.in_order_since,
        )
        for o in channels
    )


def output_logs(ctx: RunContext, graph: JobGraph, stage: StageId) -> list[ChannelLog | SinkLog]:
    """Open the logs of a stage's outputs, those that are there already."""
    sinks = {sink.name: sink.table for sink in graph.sinks_of(stage) if sink.table is not None}
    found = open_logs(
        ctx.root,
        ctx.job,
        stage,
        attempt=ctx.attempt,
        writer=ctx.writer,
        channels=graph.consumed(stage),
        sinks=sinks,
    )
    return [log for log in found if log is not None]


def newest_output(ctx: RunContext, graph: JobGraph, stage: StageId) -> BatchId:
    """Return the newest batch of this attempt that an output of a stage holds."""
    return max((log.last_batch() for log in output_logs(ctx, graph, stage)), default=NO_BATCH)


class Outputs:
    """The outputs of one stage, used by the holder of its batch lock: a batch, or the agent of an idle stage.

    Channels come before sinks, each group by name: agent and batch meet at the first channel.
    """

    def __init__(
        self,
        ctx: RunContext,
        spec: StageSpec,
        *,
        channels: Sequence[ChannelWriter],
        tables: Mapping[str, DeltaSink],
        sinks: Sequence[SinkSpec],
        watched: WatchedTables | None = None,
        repeatable: bool = True,
        row_by_row: bool = False,
        lookups: StageLookups | None = None,
    ) -> None:
        """Take the handles over.

        Args:
            ctx: the run.
            spec: the stage.
            channels: its channels, in order.
            tables: handles of the Delta sinks, by name.
            sinks: its sinks, in order.
            watched: the tables that a sink function writes by itself, None if it names none.
            repeatable: whether the stage's frame has the same rows however often it is evaluated.
            row_by_row: whether the stage's frame has no rows in a batch that reads none.
            lookups: its lookups.
        """
        self._ctx = ctx
        self._spec = spec
        self.channels = tuple(channels)
        self._tables = [(s, tables[s.name]) for s in sinks if s.table is not None]
        self._functions = [s for s in sinks if s.function is not None]
        self._watched = watched
        self.activity = Activity()
        """What the stage does; the batch thread writes, any thread reads."""
        self._searched = Version(-1)
        """The entry of the first channel up to which every barrier is on the others, too."""
        self.progress = BarrierProgress()
        """The progress of barriers; the coordinator's thread may read it, too."""
        if newest := [writer.newest() for writer in self.channels]:
            first, every = newest[0], min(n.epoch for n in newest)
            by_itself = first.marker is not None and first.marker.batch == NO_BATCH
            self.progress = BarrierProgress(first.epoch, every, first.epoch if by_itself else NO_EPOCH)
            self._searched = first.version
            if first.marker is not None and every < first.epoch:  # a barrier that is to be completed
                self._searched = Version(first.marker.version - 1)
        self._by_table: Mapping[str, ChannelWriter | DeltaSink] = {
            **{ctx.root.channel(writer.channel): writer for writer in self.channels},
            **{table.uri: table for _, table in self._tables},
        }
        self.row_by_row = row_by_row and lookups is None and not spec.outputs
        """Whether a batch that reads no rows has none in any output; nothing is evaluated then.

        The frame of a further output is made of the batch: a sum of no rows is a row.
        """
        self._newest = max((output.log.last_batch() for output in self._by_table.values()), default=NO_BATCH)
        """The newest batch that an output may hold."""
        last = self.repeated(self._newest) if lookups is not None and self._newest != NO_BATCH else None
        self.evaluated = Evaluator(
            ctx,
            spec,
            channels=self.channels,
            tables=self._tables,
            functions=self._functions,
            repeatable=repeatable,
            row_by_row=self.row_by_row,
            lookups=lookups,
            newest=self._newest,
            activity=self.activity,
            last=last,
        ).evaluated
        self._lookups = lookups
        self._certain = repeatable and lookups is None

    def repeated(self, batch: BatchId) -> Repeated | None:
        """Return what the outputs hold of a batch; None, without reading, for a batch that never began."""
        if batch > self._newest:
            self._newest = batch
            return None
        for output in self._by_table.values():
            output.refresh()
        found = held({table: output.log for table, output in self._by_table.items()})
        if found.batch < batch:
            return None
        commits = (writer.log.commit_of(batch) for writer in self.channels)
        note = next((commit[1] for commit in commits if commit is not None), None)
        marker = None if note is None else Marker(note.barrier, note.cancel)
        if found.batch > batch:  # tables that lack it had no rows in it
            return Repeated(frozenset(found.last), marker, ())
        notes = tuple(found.notes())
        return Repeated(
            frozenset(table for table in found.last if not found.lacks(table)),
            marker,
            next((note.evaluated for note in notes if note.evaluated), ()),
            next((note.lookups for note in notes if note.lookups), ()),
        )

    def holding(self, batch: BatchId) -> tuple[str, ...]:
        """Return the channels and tables that have committed a batch, with their versions, for a person."""
        found = []
        for output in self._by_table.values():
            output.refresh()
            if (commit := output.log.commit_of(batch)) is not None:
                found.append(output.said_at(commit[0]))
        return tuple(found)

    @property
    def calls_functions(self) -> bool:
        """Whether a batch calls sink functions: of their effects the outputs know nothing."""
        return bool(self._functions)

    @property
    def replaces(self) -> bool:
        """Whether each batch replaces the rows of a table, and only new rows change what it writes."""
        return self._certain and any(table.overwrites for _, table in self._tables)

    def commit(self, given: Evaluated, facts: BatchFacts, marker: Marker) -> Committed:
        """Commit a batch to every channel, with the marker that is decided."""
        entries = {w.output: self._commit_one(w, given, facts, marker, None) for w in self.channels}
        self._stands(marker)
        return Committed(marker.barrier, entries)

    def commit_free(self, given: Evaluated, facts: BatchFacts, open_: Barrier | None) -> Committed:
        """Commit a batch that carries an open barrier, if one is given that no channel has yet.

        The agent may have put a barrier before the batch, perhaps on the first channel only: then that
        barrier is completed on the others before the batch goes anywhere.
        """
        if not self.channels:
            return Committed(open_, {})
        first, *rest = self.channels
        while True:
            at = self._complete_barriers(rest)
            barrier = open_ if open_ is not None and open_.id > self.progress.first else None
            try:
                entry = self._commit_one(first, given, facts, Marker(barrier), at)
                break
            except CommitConflict:
                continue
        chosen = Marker(entry.barrier, entry.cancel)
        others = {w.output: self._commit_one(w, given, facts, chosen, None) for w in rest}
        self._stands(chosen)
        return Committed(chosen.barrier, {first.output: entry, **others})

    def _stands(self, marker: Marker) -> None:
        self.progress.in_every(marker.id)
        if marker.cancel is not None:
            self.progress.went_past(marker.cancel)

    def commit_sinks(self, given: Evaluated, facts: BatchFacts) -> None:
        """Commit a batch to the tables; one without rows gets no commit. The first commit names the files."""
        named, lookups = ((), ()) if self.channels else (given.named, given.lookups)
        for sink, table in self._tables:
            self.activity.enter(Phase.COMMITTING, sink.name)
            files = given.files.get(table.uri)
            commits = files is not None and bool(files.written.files or table.overwrites)
            plans = self._plans(table, facts) if commits else ()
            if table.commit_batch(files, facts.batch, plans, named, lookups) is not None:
                named, lookups = (), ()
            self._ctx.failpoint(f"batch.{self._spec.name}.commit-{sink.name}.after")

    def call_functions(self, given: Evaluated, batch: BatchId, epoch: CheckpointId) -> None:
        """Call the sink functions with the rows that the commits have settled, if any may be there.

        Raises:
            UsageError: a table that a function should write is not there after it.
        """
        for sink in self._functions:
            if sink.source.name not in given.frames:
                continue
            app = self._ctx.app_id(self._spec.name, sink.name)
            value = Current(
                self._ctx.job,
                self._spec.name,
                attempt=self._ctx.attempt,
                run=self._ctx.run,
                batch=batch,
                epoch=epoch,
                app_id=app,
            )
            assert sink.function is not None
            self.activity.enter(Phase.CALLING, sink.name)
            within(value, partial(sink.function, given.frames[sink.source.name], int(batch)))
        if self._watched is not None:
            self._watched.require(batch)

    def _plans(self, table: DeltaSink, facts: BatchFacts) -> tuple[PlannedBatch, ...]:
        """Return the offsets of batches since the sink's last commit or checkpoint, for its next commit.

        The entries of a channel hold them for every batch; a sink has no commit for a batch without rows.
        """
        if self.channels:
            return ()
        native = NativeLog(self._ctx.native(self._spec.name))
        retained = facts.batch - self._ctx.batches_retained
        oldest = max(self.progress.checkpointed, table.log.last_batch(), retained)
        before = [BatchId(b) for b in range(max(oldest, NO_BATCH) + 1, facts.batch)]
        texts = [(batch, native.find_offsets(batch)) for batch in before]
        found = [PlannedBatch(batch, text) for batch, text in texts if text is not None]
        return (*found, PlannedBatch(facts.batch, facts.offsets))

    @property
    def lookup_versions(self) -> tuple[LookupVersion, ...]:
        """The versions at which the newest batch has read its lookups."""
        return () if self._lookups is None else self._lookups.last

    def versions(self, batch: BatchId, channels: Mapping[str, Version]) -> tuple[OutputVersion, ...]:
        """Return the version of every output at a cut after `batch`."""
        found = [
            OutputVersion(
                w.output, "channel", self._ctx.root.channel(w.channel), w.table_id, channels[w.output]
            )
            for w in self.channels
        ]
        for sink, table in self._tables:
            found.append(
                OutputVersion(
                    sink.name,
                    "delta",
                    table=table.uri,
                    table_id=table.table_id,
                    version=table.version_at(batch),
                    name=sink.table_name,
                )
            )
        found += [OutputVersion(s.name, "function", s.name, "", None) for s in self._functions]
        return (*found, *(self._watched.versions() if self._watched is not None else ()))

    def stand_at(self, cut: StageSnapshot) -> bool:
        """Say whether the tables that a function writes by itself have the versions of a cut.

        Others may write them too. The other outputs change with a batch only, as far as they are this job's.
        """
        if self._watched is None:
            return True
        return self._watched.versions() == tuple(o for o in cut.outputs if o.kind == WATCHED)

    def commit_barrier(self, barrier: Barrier, last_batch: Callable[[], BatchId | None]) -> IdleCut | None:
        """Commit an entry that holds only the barrier to every channel of an idle stage.

        Look at every channel; then ask `last_batch`, which must see that no batch is planned beyond the
        last finished one; then commit in order, the first at exactly the version seen. Returns None if the
        stage is not idle or a batch came first: that batch carries the barrier. A batch that comes second
        completes the barrier on the other channels before it goes anywhere.
        """
        seen = [writer.refresh() for writer in self.channels]
        batch = last_batch()
        if batch is None:
            return None
        versions: dict[str, Version] = {}
        for writer, at in zip(self.channels, seen, strict=True):
            try:
                standing = writer.commit_barrier(barrier, None if versions else at)
            except CommitConflict:
                return None
            versions[writer.output] = standing.entry.version
            self.progress.in_first(barrier.id)
            self._ctx.failpoint(f"agent.{self._spec.name}.commit-{writer.output}.after")
        self.progress.in_every(barrier.id)
        return IdleCut(batch, versions)

    def end(self) -> None:
        """Mark every channel as ended by this run (P10)."""
        for writer in self.channels:
            writer.commit_end()

    def _complete_barriers(self, rest: Sequence[ChannelWriter]) -> Version:
        """Commit barriers of the agent in the first channel to the others; return its newest entry."""
        first = self.channels[0]
        at = first.refresh()
        for entry in first.log.after(self._searched):
            self.progress.in_first(Marker(entry.barrier, entry.cancel).id)
            barrier = entry.barrier if entry.batch < 0 and entry.run == self._ctx.run else None
            # Of one that all have, the entries of the others may have been cleaned up.
            if barrier is not None and barrier.id > self.progress.every:
                for writer in rest:
                    writer.commit_barrier(barrier)
                self.progress.in_every(barrier.id)
        self._searched = at
        return at

    def _commit_one(
        self,
        writer: ChannelWriter,
        given: Evaluated,
        facts: BatchFacts,
        marker: Marker,
        at: Version | None,
    ) -> Entry:
        self.activity.enter(Phase.COMMITTING, writer.output)
        entry = writer.commit_batch(
            given.written(self._ctx.root.channel(writer.channel)),
            facts.batch,
            barrier=marker.barrier,
            cancel=marker.cancel,
            watermark_ms=facts.watermark_ms,
            offsets=facts.offsets,
            evaluated=given.named if writer is self.channels[0] else (),
            lookups=given.lookups if writer is self.channels[0] else (),
            at=at,
        ).entry
        self._ctx.failpoint(f"batch.{self._spec.name}.commit-{writer.output}.after")
        if writer is self.channels[0]:
            self.progress.in_first(Marker(entry.barrier, entry.cancel).id)
        return entry


log = logging.getLogger(__name__)


def fixed_rows(ctx: RunContext, outputs: Outputs, batch: BatchId) -> str:
    """Describe after an error which outputs hold the failed batch, with the consequence; empty if none does.

    Without such an output the batch is evaluated anew, with the code of the next start.
    """
    try:
        held = outputs.holding(batch)
        back = bool(held) and bool(Checkpoints.open(ctx.root, ctx.job).summaries())
    except (AbsError, DeltaError, OSError) as error:
        log.warning("it could not be read which outputs hold batch %s: %s", batch, error)
        return ""
    return said_of(batch, held, back)


def said_of(batch: BatchId, held: tuple[str, ...], back: bool) -> str:
    """Say which outputs hold a batch; `back` says whether there is a checkpoint to go back to."""
    if not held:
        return ""
    way = (
        "start with restart='checkpoint', which goes back to before it"
        if back
        else "start over on a new root: no checkpoint was completed that one could go back to"
    )
    return (
        f"; the rows of batch {batch} are fixed: {', '.join(held)} {'has' if len(held) == 1 else 'have'} "
        f"committed them. Every start repeats the batch with these rows, also with other code in the stage; "
        f"if the rows are what is wrong, {way}"
    )
