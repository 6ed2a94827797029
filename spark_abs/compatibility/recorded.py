"""The recorded job of a root and the declared job: the input of `protocol.compare`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spark_abs.channels.channel_log import ChannelLog
from spark_abs.channels.entries import entry_of
from spark_abs.channels.follow import follow
from spark_abs.channels.trim import earliest
from spark_abs.manifest import CHANNEL, Manifest, SourceShape, StageShape, StageSnapshot
from spark_abs.model import (
    NO_BATCH,
    BatchId,
    ChannelId,
    Entry,
    Position,
    StageId,
    Version,
    channel_id,
    counts,
    positions_of,
    producer,
)
from spark_abs.observe.held import open_logs
from spark_abs.plan.frames import Frames
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.specs import JobSpec
from spark_abs.protocol.changes import (
    Begin,
    Comparison,
    Recorded,
    StageChange,
    StageProgress,
    UnderWay,
    Verdict,
    newly_read,
)
from spark_abs.protocol.compare import REBUILD_FIRST, compare
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.protocol.stage_progress import begins_at, current_cut, sources_after, under_way, whole_after
from spark_abs.sinks.delta.sink_log import SinkLog
from spark_abs.snapshots.materialise import METADATA
from spark_abs.snapshots.rearrange import source_offsets
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import NativeLog, check_native, native_of
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table


@dataclass(frozen=True, slots=True)
class Declared:
    """The declared job."""

    shapes: tuple[StageShape, ...]
    begin: Mapping[StageId, Begin]

    def shape(self, stage: StageId) -> StageShape | None:
        """Return the declared shape of a stage."""
        return next((s for s in self.shapes if s.stage == stage), None)


def declare(job: JobSpec, graph: JobGraph, drafts: Frames, plans: Mapping[StageId, PlanFacts]) -> Declared:
    """Return the declared job; its channels have no ids yet."""
    feedback = {(s.name, channel) for s in graph.stages for channel in s.feedback}
    shapes = tuple(
        StageShape(
            stage=s.name,
            inputs=tuple(s.inputs),
            outputs={o: drafts.schemas[channel_id(s.name, o)].json() for o in s.outputs},
            channels=dict.fromkeys(graph.consumed(s.name), ""),
            sinks={k.name: k.output for k in graph.sinks_of(s.name) if not k.outside},
            functions=tuple(drafts.declared[s.name].functions),
            sources=tuple(replace(x, feedback=(s.name, x.name) in feedback) for x in plans[s.name].streams),
            operators=plans[s.name].operators,
            tables={k.name: k.table for k in graph.sinks_of(s.name) if k.table is not None},
            output_mode=s.output_mode,
            by_place=plans[s.name].by_place,
            lookups={lookup.name: lookup.table for lookup in job.stages[s.name].lookups},
        )
        for s in graph.stages
    )
    begin = {name: spec.begin for name, spec in job.stages.items()}
    return Declared(shapes, begin)


class Knowledge:
    """The records of a root about its job, from the native checkpoints of its attempt or from a manifest."""

    def __init__(
        self, root: Root, state: ControlState, manifest: Manifest | None, *, at_checkpoint: bool = False
    ) -> None:
        """Take the root.

        Args:
            root: the job's root.
            state: the state of `control/`.
            manifest: the newest checkpoint of the attempt, or the checkpoint from which the attempt began;
                None without checkpoints.
            at_checkpoint: whether stages continue from that checkpoint, as after a restore to it.
        """
        self._root, self._state, self._manifest = root, state, manifest
        self._at_checkpoint = at_checkpoint
        self._attempt = state.attempt

    def compare(self, declared: Declared, leave: bool) -> Comparison:
        """Compare the declared job with the records.

        Raises:
            DamageError: the records of the root cannot be read.
        """
        shapes = self._shapes(declared)
        progress = {s.stage: self._progress(s) for s in shapes}
        begun = [
            (s.stage, c)
            for s in declared.shapes
            for c in newly_read(s, progress.get(s.stage, StageProgress()))
        ]
        begins = {c for _, c in begun if self._channel(c).exists()}
        wanted = {c for s, c in begun if c in begins and declared.begin.get(s) == "earliest"}
        recorded = Recorded(
            where=self._where,
            shapes=shapes,
            progress=progress,
            left=() if self._at_checkpoint else self._attempt.left,
            ends={c: self._end(c, progress) for c in begins},
            earliest={c: self._earliest(c, progress) for c in wanted},
            unread=self._unread,
            epoch=self._state.last_claimed,
        )
        comparison = compare(recorded, declared.shapes, begin=declared.begin, leave=leave)
        return replace(comparison, stages=tuple(self._checked(shapes, s) for s in comparison.stages))

    def _checked(self, shapes: Sequence[StageShape], change: StageChange) -> StageChange:
        """Refuse to rearrange a native checkpoint that is not whole."""
        if change.layout is None or self._at_checkpoint:
            return change
        shape = next(s for s in shapes if s.stage == change.stage)
        least = max([self._cut(change.stage), *_held(self._outputs(shape))])
        finding = check_native(self._native(change.stage), least)
        if finding is None:
            return change
        said = f"its inputs have changed, and its native checkpoint is lost ({finding}): {REBUILD_FIRST}"
        return StageChange(change.stage, Verdict.REFUSED, (said,))

    def outputs(self, declared: Declared) -> Iterator[tuple[StageId, Collection[str], Mapping[str, str]]]:
        """Iterate the recorded stages with the outputs that are channels, and the tables of their sinks."""
        for shape in self._shapes(declared):
            yield shape.stage, shape.channels, self._tables(shape)

    @property
    def _where(self) -> str:
        if self._manifest is not None and (self._at_checkpoint or not self._attempt.shapes):
            return f"checkpoint {self._manifest.id}"
        return "the last run"

    def _shapes(self, declared: Declared) -> tuple[StageShape, ...]:
        """Return the recorded shapes.

        Without a record, those of the declared stages from their native checkpoints.
        """
        if self._manifest is not None and (self._at_checkpoint or not self._attempt.shapes):
            return self._manifest.graph
        return self._attempt.shapes or tuple(
            StageShape(s.stage, (), {}, {}, {}) for s in declared.shapes if self._native(s.stage).exists()
        )

    def _snapshot(self, stage: StageId) -> StageSnapshot | None:
        return self._manifest.stage(stage) if self._manifest is not None else None

    def _native(self, stage: StageId) -> Place:
        return native_of(self._root, self._state, stage)

    def _channel(self, channel: ChannelId) -> Place:
        return self._root.place(self._root.channel(channel))

    def _progress(self, shape: StageShape) -> StageProgress:
        snapshot, cut = self._snapshot(shape.stage), self._cut(shape.stage)
        at_cut = snapshot.offsets if snapshot is not None and cut != NO_BATCH else None
        stateful = snapshot is not None and bool(snapshot.operators)
        if self._at_checkpoint:
            return StageProgress(self._sources(shape, at_cut), cut, stateful=stateful)
        native = self._native(shape.stage)
        log = NativeLog(native)
        finished, planned = log.newest_committed(), log.newest_planned()
        there = native.read(METADATA) is not None
        outputs = self._outputs(shape) if planned > finished or not there else ()
        held = _held(outputs)
        if planned < cut or (not there and max(held, default=NO_BATCH) != NO_BATCH):
            return StageProgress(self._sources(shape, at_cut), cut, stateful=stateful, lost=True)
        way = under_way(finished, planned, held)
        if way is UnderWay.TORN and _named(outputs, planned):
            way = UnderWay.NAMED
        newest, stands = sources_after(finished, planned, way)
        text = log.offsets_text(newest) if newest != NO_BATCH else None
        return StageProgress(
            self._sources(shape, text, stands, where=f"{native}/offsets/{newest}"),
            finished,
            way,
            stateful=native.below("state").exists(),
            calls_functions=bool(shape.sinks.keys() - self._tables(shape).keys()),
            lacks=tuple(
                channel_id(shape.stage, output)
                for output, last in zip(shape.channels, held, strict=False)
                if way is UnderWay.NAMED and last < planned
            ),
            first=self._sources(shape, text, False) if finished == NO_BATCH else (),
        )

    def _cut(self, stage: StageId) -> BatchId:
        snapshot = self._snapshot(stage)
        return snapshot.cut_batch if snapshot is not None else NO_BATCH

    def _sources(
        self, shape: StageShape, text: str | None, begun: bool = True, *, where: str = ""
    ) -> tuple[Position | None, ...]:
        """Return the positions in the text of an offset file, which `where` names for messages.

        Without text, the first positions of the sources.
        """
        if text is None:
            return tuple(
                self._start(shape.stage, ChannelId(s.name), s.feedback) if s.kind == CHANNEL else None
                for s in shape.sources or [SourceShape(CHANNEL, channel) for channel in shape.inputs]
            )
        found = []
        for offset in source_offsets(text, where):
            position = next(iter(positions_of([offset])), None) if offset is not None else None
            if position is not None and not begun:
                position = self._start(shape.stage, position.channel, position.feedback)
            found.append(position)
        return tuple(found)

    def _start(self, stage: StageId, channel: ChannelId, feedback: bool) -> Position:
        recorded = {} if self._at_checkpoint else self._attempt.first_positions
        snapshot = self._snapshot(stage)
        at_cut = snapshot.positions if snapshot is not None and snapshot.cut_batch == NO_BATCH else ()
        return begins_at(stage, channel, recorded, at_cut, feedback)

    def _tables(self, shape: StageShape) -> Mapping[str, str]:
        """Return the tables of a stage's sinks; shapes of earlier versions do not record them."""
        attached = {s.sink: s.table for s in self._state.sinks if s.stage == shape.stage}
        return shape.tables or {sink: attached[sink] for sink in shape.sinks if sink in attached}

    def _outputs(self, shape: StageShape) -> tuple[ChannelLog | SinkLog | None, ...]:
        """Open the log of each output of a stage, channels first; None for an output that does not exist."""
        return open_logs(
            self._root,
            self._state.job,
            shape.stage,
            attempt=self._attempt.id,
            writer=partial(self._state.writer, self._attempt),
            channels=shape.channels,
            sinks=self._tables(shape),
        )

    def _end(self, channel: ChannelId, progress: Mapping[StageId, StageProgress]) -> Version:
        """Return the channel entry after which a new stage begins."""
        if self._at_checkpoint and (cut := self._cuts().get(channel)) is not None:
            return cut
        table = Table.open(self._channel(channel))
        ended = progress.get(producer(channel), StageProgress()).ended
        return current_cut(_newest_first(table), table.version, ended, self._attempt.id)

    def _earliest(self, channel: ChannelId, progress: Mapping[StageId, StageProgress]) -> Version:
        """Return the entry after which a channel still has all rows of its producer."""
        table, path = Table.open(self._channel(channel)), channel_path(self._state, channel)
        entries = map(entry_of, table.backwards())
        counted = (entry for entry in entries if counts(path, entry.attempt, entry.version))
        ended = progress.get(producer(channel), StageProgress()).ended
        return max(earliest(self._root, channel), whole_after(counted, table.version, ended))

    def _unread(self, position: Position) -> int:
        """Count the entries with rows after a position."""
        channel = position.channel
        if not self._channel(channel).exists():
            return 0
        until = self._cuts().get(channel) if self._at_checkpoint else None
        entries = follow(self._root, channel, channel_path(self._state, channel)).after(position.version)
        return sum(1 for e in entries if e.files and (until is None or e.version <= until))

    def _cuts(self) -> dict[ChannelId, Version]:
        return self._manifest.channel_cuts() if self._manifest is not None else {}


def _held(outputs: Sequence[ChannelLog | SinkLog | None]) -> list[BatchId]:
    """Return the newest batch that each output holds."""
    return [NO_BATCH if output is None else output.last_batch() for output in outputs]


def _named(outputs: Sequence[ChannelLog | SinkLog | None], batch: BatchId) -> bool:
    """Say whether a commit of the batch names the files of all its outputs."""
    commits = (output.commit_of(batch) for output in outputs if output is not None)
    return any(commit[1].evaluated for commit in commits if commit is not None)


def _newest_first(table: Table) -> Iterator[Entry | None]:
    """Iterate the entries of a channel; None for one that was removed."""
    for version in range(table.version, -1, -1):
        commit = table.read_commit(version)
        yield entry_of(commit) if commit is not None else None
