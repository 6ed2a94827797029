"""The outputs of one stage: a batch is committed to channels and sinks in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spark_abs.channels.writer import ChannelWriter, Standing
from spark_abs.errors import CommitConflict
from spark_abs.manifest import OutputVersion
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    Barrier,
    BatchId,
    CheckpointId,
    Entry,
    Position,
    StageId,
    Version,
    app_id,
    channel_id,
)
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.specs import SinkSpec, StageSpec
from spark_abs.sinks.delta import DeltaSink
from spark_abs.sinks.note import PlannedBatch
from spark_abs.stages.context import Current, RunContext, within
from spark_abs.stages.evaluation import Evaluated, Evaluator
from spark_abs.stages.native import NativeLog
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Marker:
    """What stands behind the rows of an entry."""

    barrier: Barrier | None = None
    cancel: CheckpointId | None = None

    @property
    def id(self) -> CheckpointId:
        """The id of the barrier or cancel marker, `NO_EPOCH` if there is neither."""
        return self.barrier.id if self.barrier else (self.cancel or NO_EPOCH)


@dataclass(frozen=True, slots=True)
class IdleCut:
    """The cut of an idle stage: its last finished batch, and where the barrier stands in its channels."""

    batch: BatchId
    channels: Mapping[str, Version]


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What every commit of a batch says of its cause."""

    batch: BatchId
    offsets: str
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch as Spark's offset log has it: what caused it, and where the gates stand at its two ends."""

    facts: BatchFacts
    before: tuple[Position, ...]
    after: tuple[Position, ...]


def open_writers(ctx: RunContext, spec: StageSpec, channels: Sequence[str]) -> tuple[ChannelWriter, ...]:
    """Open one writer for each output that is a channel."""
    return tuple(ChannelWriter(ctx.root, ctx.job, spec.name, o, ctx.attempt, ctx.run) for o in channels)


def newest_output(ctx: RunContext, graph: JobGraph, stage: StageId) -> BatchId:
    """Return the newest batch of this attempt that an output of a stage holds."""
    places = [
        (ctx.root.place(ctx.root.channel(channel_id(stage, o))), app_id(ctx.job, stage, o, ctx.attempt))
        for o in graph.consumed(stage)
    ]
    places += [
        (ctx.root.storage.place(sink.table), ctx.writer(stage, sink.name).app)
        for sink in graph.sinks_of(stage)
        if sink.table is not None
    ]
    found = NO_BATCH
    for place, app in places:
        with suppress(FileNotFoundError):
            written = Table.open(place).transaction(app)
            found = max(found, NO_BATCH if written is None else BatchId(written))
    return found


class Outputs:
    """The outputs of one stage, used from its batch thread alone.

    Channels come before sinks, each group by name: agent and batch meet at the first channel.
    """

    def __init__(
        self,
        ctx: RunContext,
        spec: StageSpec,
        channels: Sequence[ChannelWriter],
        tables: Mapping[str, DeltaSink],
        sinks: Sequence[SinkSpec],
        watched: Sequence[str] = (),
        repeatable: bool = True,
    ) -> None:
        """Take the handles over.

        Args:
            ctx: the run.
            spec: the stage.
            channels: its channels, in order.
            tables: handles of the Delta sinks, by name.
            sinks: its sinks, in order.
            watched: Delta tables that a sink function writes by itself: their versions are recorded.
            repeatable: whether the stage's frame has the same rows however often it is evaluated.
        """
        self._ctx = ctx
        self._spec = spec
        self.channels = tuple(channels)
        self._tables = [(s, tables[s.name]) for s in sinks if s.table is not None]
        self._functions = [s for s in sinks if s.function is not None]
        self._watched = tuple(watched)
        self.secured = NO_BATCH
        """The batch of the newest completed checkpoint: whoever rebuilds the stage begins behind it."""
        self._seen = Version(-1)
        self._epoch = NO_EPOCH
        newest = [writer.newest() for writer in self.channels]
        self.passed = min((n.epoch for n in newest), default=NO_EPOCH)
        """The newest id that every channel has carried, as of the last look."""
        if newest:
            first = newest[0]
            self._seen, self._epoch = first.version, first.epoch
            if first.marker is not None and self.passed < first.epoch:
                self._seen = Version(first.marker.version - 1)  # a barrier that is to be completed
        self._evaluator = Evaluator(ctx, spec, self.channels, self._tables, self._functions, repeatable)

    @property
    def epoch(self) -> CheckpointId:
        """The newest id that the first channel has carried, as of the last look."""
        return self._epoch

    def standing(self, batch: BatchId) -> Marker | None:
        """Return the marker with which an output already holds a batch, None if none holds it.

        What the first committed output says decides for all: its marker, or the absence of one.
        """
        for writer in self.channels:
            writer.refresh()
            entry = writer.entry_of_batch(batch)
            if entry is not None:
                return Marker(entry.barrier, entry.cancel)
        return None

    def evaluated(self, frame: DataFrame, batch: BatchId) -> AbstractContextManager[Evaluated]:
        """Evaluate every output once and write the files of all that lack the batch, see `Evaluator`."""
        return self._evaluator.evaluated(frame, batch)

    def commit(self, given: Evaluated, facts: BatchFacts, marker: Marker) -> dict[str, Standing]:
        """Commit a batch whose marker is decided to every channel."""
        stood = {w.output: self._commit_one(w, given, facts, marker, None) for w in self.channels}
        self.passed = max(self.passed, marker.id)
        return stood

    def commit_free(
        self, given: Evaluated, facts: BatchFacts, pending: Barrier | None
    ) -> tuple[Barrier | None, dict[str, Standing]]:
        """Commit a batch of a stage that takes barriers like a source; returns the barrier it carries.

        The agent may have put a barrier before the batch, perhaps on the first channel only: then that
        barrier is completed on the others before the batch goes anywhere.
        """
        if not self.channels:
            return pending, {}
        first, *rest = self.channels
        while True:
            at = self._observe(rest)
            barrier = pending if pending is not None and pending.id > self._epoch else None
            try:
                standing = self._commit_one(first, given, facts, Marker(barrier), at)
                break
            except CommitConflict:
                continue
        chosen = Marker(standing.entry.barrier, standing.entry.cancel)
        others = {w.output: self._commit_one(w, given, facts, chosen, None) for w in rest}
        self.passed = max(self.passed, chosen.id)
        return chosen.barrier, {first.output: standing, **others}

    def commit_sinks(self, given: Evaluated, facts: BatchFacts) -> None:
        """Commit a batch to the tables; one without rows gets no commit. The first commit names the files."""
        named = () if self.channels else given.named
        for sink, table in self._tables:
            files = given.files.get(table.uri)
            plans = self._plans(table, facts) if files is not None and files.written.files else ()
            if table.commit_batch(files, facts.batch, plans, named) is not None:
                named = ()
            self._ctx.probe(f"batch.{self._spec.name}.commit-{sink.name}.after")

    def call_functions(self, given: Evaluated, batch: BatchId, epoch: CheckpointId) -> None:
        """Call the sink functions with the rows that the commits have settled."""
        for sink in self._functions:
            app = self._ctx.app_id(self._spec.name, sink.name)
            value = Current(
                self._ctx.job, self._spec.name, self._ctx.attempt, self._ctx.run, batch, epoch, app
            )
            assert sink.function is not None
            within(value, partial(sink.function, given.frames[sink.source.name], int(batch)))

    def _plans(self, table: DeltaSink, facts: BatchFacts) -> tuple[PlannedBatch, ...]:
        """Return what a sink's commit says of batches since the one before it, or the last checkpoint.

        The entries of a channel say it of every batch; a sink has no commit for one without rows.
        """
        if self.channels:
            return ()
        native = NativeLog(self._ctx.native(self._spec.name))
        oldest = max(self.secured, table.last_batch(), facts.batch - self._ctx.batches_retained)
        before = [BatchId(b) for b in range(max(oldest, NO_BATCH) + 1, facts.batch)]
        texts = [(batch, native.find_offsets(batch)) for batch in before]
        found = [PlannedBatch(batch, text) for batch, text in texts if text is not None]
        return (*found, PlannedBatch(facts.batch, facts.offsets))

    def versions(self, batch: BatchId, channels: Mapping[str, Version]) -> tuple[OutputVersion, ...]:
        """Return the version of every output at a cut behind `batch`."""
        found = [
            OutputVersion(
                w.output, "channel", self._ctx.root.channel(w.channel), w.table_id, channels[w.output]
            )
            for w in self.channels
        ]
        for sink, table in self._tables:
            found.append(
                OutputVersion(sink.name, "delta", table.uri, table.table_id, table.version_at(batch))
            )
        found += [OutputVersion(s.name, "function", s.name, "", None) for s in self._functions]
        storage = self._ctx.root.storage
        return (*found, *(_watched(self._spec.name, storage.place(uri)) for uri in self._watched))

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
            self._epoch = max(self._epoch, barrier.id)
            self._ctx.probe(f"agent.{self._spec.name}.commit-{writer.output}.after")
        self.passed = max(self.passed, barrier.id)
        return IdleCut(batch, versions)

    def end(self) -> None:
        """Mark every channel as ended by this run (P10)."""
        for writer in self.channels:
            writer.commit_end()

    def _observe(self, rest: Sequence[ChannelWriter]) -> Version:
        first = self.channels[0]
        at = first.refresh()
        for entry in first.after(self._seen):
            self._epoch = max(self._epoch, Marker(entry.barrier, entry.cancel).id)
            if _holds_only_barrier(entry) and entry.run == self._ctx.run and entry.barrier is not None:
                for writer in rest:
                    writer.commit_barrier(entry.barrier)
                self.passed = max(self.passed, entry.barrier.id)
        self._seen = at
        return at

    def _commit_one(
        self,
        writer: ChannelWriter,
        given: Evaluated,
        facts: BatchFacts,
        marker: Marker,
        at: Version | None,
    ) -> Standing:
        standing = writer.commit_batch(
            given.written(self._ctx.root.channel(writer.channel)),
            facts.batch,
            barrier=marker.barrier,
            cancel=marker.cancel,
            watermark_ms=facts.watermark_ms,
            offsets=facts.offsets,
            evaluated=given.named if writer is self.channels[0] else (),
            at=at,
        )
        self._ctx.probe(f"batch.{self._spec.name}.commit-{writer.output}.after")
        if writer is self.channels[0]:
            self._epoch = max(self._epoch, Marker(standing.entry.barrier, standing.entry.cancel).id)
        return standing


def _watched(stage: StageId, place: Place) -> OutputVersion:
    """Record a table between two batches of the stage that writes it."""
    try:
        table = Table.open(place)
    except FileNotFoundError:
        return OutputVersion(stage, "table", place.uri, "", None)
    return OutputVersion(stage, "table", place.uri, table.id, table.version)


def _holds_only_barrier(entry: Entry) -> bool:
    return entry.barrier is not None and entry.batch < 0
