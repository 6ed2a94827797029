"""The root of a simulated job that changes: what is known of it, and what starts and restores write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from spark_abs.codec import to_json
from spark_abs.manifest import CHANNEL, Manifest, OperatorShape, SourceShape, StageShape, StageSnapshot
from spark_abs.model import (
    MAIN_OUTPUT,
    NO_BATCH,
    BatchId,
    ChannelId,
    Position,
    RunId,
    StageId,
    Version,
    app_id,
    channel_id,
)
from spark_abs.protocol import attempt_changes, control
from spark_abs.protocol.attempt import Rebuilt
from spark_abs.protocol.changes import (
    Begin,
    Comparison,
    Recorded,
    StageChange,
    StageProgress,
    first_position,
    newly_read,
)
from spark_abs.protocol.path import BranchPoint
from spark_abs.protocol.stage_progress import begins_at, current_cut, sources_after, whole_after
from tests.simulator.cluster import Checkpoint, Graph, Native, Stage, Storage
from tests.simulator.parts import Parts
from tests.simulator.recovery import Clock, abort_open, begun_from
from tests.simulator.rewiring import parted
from tests.simulator.table import JOB, Planned, Table

_NUMBERS = "numbers"


def shapes(graph: Graph) -> tuple[StageShape, ...]:
    """Return a job as it is recorded."""
    return tuple(
        StageShape(
            stage=stage.id,
            inputs=stage.inputs,
            outputs=dict.fromkeys(stage.outputs, ""),
            channels=dict.fromkeys(stage.outputs, ""),
            sinks={stage.sink_name: MAIN_OUTPUT} if stage.sink else {},
            sources=(
                *(SourceShape(CHANNEL, channel) for channel in stage.inputs),
                *([SourceShape(_NUMBERS, stage.id)] if stage.native else []),
            ),
            operators=(OperatorShape("count"),) if stage.counts else (),
            tables={stage.sink_name: stage.target} if stage.sink else {},
            output_mode="append",
        )
        for stage in graph
    )


def manifest_of(row: Checkpoint, graph: Graph) -> Manifest:
    """Return a checkpoint as it is stored."""
    return Manifest(row.id, row.attempt, RunId(1), JOB, row.kind, None, 0, 0, 0, shapes(graph), row.snapshots)


class Root(Storage):
    """All that survives of a job that changes; tables of sinks are shared with other roots."""

    def __init__(self, parts: Parts, tables: dict[str, Table], identity: str) -> None:
        super().__init__((), identity, parts.sink_app)
        self.parts = parts
        self.sinks = tables
        self.came: dict[str, Version] = {}
        """The version at which the job came to the table of a sink."""

    # -- what is known

    def compare(self, declared: Graph, begin: Mapping[StageId, Begin], leave: bool) -> Comparison:
        """Compare a declared job with what is known of the one before."""
        known = self._shapes()
        now = shapes(declared)
        progress = {shape.stage: self._progress(shape) for shape in known}
        begun = [(s.stage, c) for s in now for c in newly_read(s, progress.get(s.stage, StageProgress()))]
        begins = {c for _, c in begun if c in self.tables}
        read = {channel for stage in declared for channel in stage.inputs}
        recorded = Recorded(
            where="the last run",
            shapes=known,
            progress=progress,
            left=self.state.attempt.left,
            ends={c: self._end(c, progress) for c in read if c in self.tables},
            earliest={c: self._earliest(c, progress) for c in begins},
            unread=self._unread,
            epoch=self.state.last_claimed,
        )
        return self.parts.compare(recorded, now, begin=begin, leave=leave)

    def manifest(self) -> Checkpoint | None:
        """Return the newest checkpoint of the attempt, or the one where it began."""
        attempt = self.state.attempt
        mine = [row.id for row in self.retained.values() if row.attempt == attempt.id]
        known = max(mine) if mine else attempt.checkpoint
        return self.retained.get(known) if known is not None else None

    def _shapes(self) -> tuple[StageShape, ...]:
        manifest = self.manifest()
        if self.state.attempt.shapes or manifest is None:
            return self.state.attempt.shapes
        return shapes(manifest.graph)

    def _snapshot(self, stage: StageId) -> StageSnapshot | None:
        manifest = self.manifest()
        found = manifest.snapshots if manifest is not None else ()
        return next((s for s in found if s.stage == stage), None)

    def _progress(self, shape: StageShape) -> StageProgress:
        native = self.native.get((self.state.attempt.id, shape.stage), Native(Planned((), 0)))
        finished, planned = native.committed, native.planned
        way = self.parts.under_way(finished, planned, list(self._held(shape)))
        newest, stands = sources_after(finished, planned, way)
        positions = native.offsets[newest].positions if newest != NO_BATCH else ()
        channels = (
            [p.channel for p in positions]
            if newest != NO_BATCH
            else [ChannelId(s.name) for s in shape.sources if s.kind == CHANNEL]
        )
        begins = tuple(self._start(shape.stage, channel) for channel in channels)
        numbers = [None for s in shape.sources if s.kind != CHANNEL]
        return StageProgress(
            (*(positions if stands else begins), *numbers),
            finished,
            way,
            stateful=bool(shape.operators),
            first=(*begins, *numbers) if finished == NO_BATCH else (),
        )

    def _start(self, stage: StageId, channel: ChannelId) -> Position:
        snapshot = self._snapshot(stage)
        at_cut = snapshot.positions if snapshot is not None and snapshot.cut_batch == NO_BATCH else ()
        return begins_at(stage, channel, self.parts.first_positions(self.state), at_cut)

    def _held(self, shape: StageShape) -> Iterator[BatchId]:
        attempt = self.state.attempt.id
        apps = [
            (str(channel_id(shape.stage, o)), app_id(JOB, shape.stage, o, attempt)) for o in shape.channels
        ]
        apps += [(t, self.sink_app(self.state, attempt, shape.stage, s)) for s, t in shape.tables.items()]
        for name, app in apps:
            table = self.tables.get(name)
            batch = table.transactions.get(app) if table is not None else None
            yield NO_BATCH if batch is None else BatchId(batch)

    def _end(self, channel: ChannelId, progress: Mapping[StageId, StageProgress]) -> Version:
        table, (producer, _) = self.tables[channel], parted(channel)
        ended = progress.get(StageId(producer), StageProgress()).ended
        return current_cut(reversed(table.entries), table.version, ended, self.state.attempt.id)

    def _earliest(self, channel: ChannelId, progress: Mapping[StageId, StageProgress]) -> Version:
        table, (producer, _) = self.tables[channel], parted(channel)
        ended = progress.get(StageId(producer), StageProgress()).ended
        entries = table.newest_first(self.path(channel, self.state.attempt.id))
        kept = Version(max(table.entries.count(None) - 1, 0, *table.without_rows))
        return max(kept, whole_after(entries, table.version, ended))

    def _unread(self, position: Position) -> int:
        table = self.tables.get(position.channel)
        path = self.path(position.channel, self.state.attempt.id)
        return sum(bool(e.files) for e in table.after(position.version, path)) if table is not None else 0

    # -- what a start writes

    def fence_recorded(self, run: control.Run) -> Iterator[None]:
        """Refuse older runs on every output that the job had."""
        for shape in self._shapes():
            for output in shape.channels:
                if table := self.tables.get(channel_id(shape.stage, output)):
                    table.fence_runs(run.id)
                    yield
            for target in shape.tables.values():
                if table := self.tables.get(target):
                    table.fence_runs(run.id, self.owner_of_sinks)
                    yield

    def finish(self, change: StageChange) -> None:
        """Record the end of a batch that all outputs hold, of a stage without state."""
        native = self.native[self.state.attempt.id, change.stage]
        batch = native.planned
        before = native.state(BatchId(batch - 1)) if batch else ((),) * _sources(native)
        native.states.setdefault(batch + 1, {})["ended"] = before
        native.commit(batch, "ended")

    def rearranged(self, stage: StageId, sources: Sequence[int | Position | None]) -> Native:
        """Return the native checkpoint of a stage as of its last finished batch, its sources rearranged."""
        found = Native(Planned((), 0))
        native = self.native.get((self.state.attempt.id, stage), found)
        batch = native.committed
        if batch == NO_BATCH:
            return found
        planned, state = native.offsets[batch], native.state(batch)
        held: list[Position | int] = [*planned.positions, planned.native]
        moved = [held[s] if isinstance(s, int) else s for s in sources]
        numbers = [n for n in moved if isinstance(n, int)]
        positions = tuple(p for p in moved if isinstance(p, Position))
        found.offsets[batch] = Planned(positions, numbers[0] if numbers else 0)
        found.commits[batch] = "moved"
        first, *rest = (state[s] if isinstance(s, int) else () for s in sources)
        gone = (row for i, rows in enumerate(state) if i not in sources for row in rows)
        found.states[batch + 1] = {"moved": ((*first, *gone), *rest)}  # what it counts is of all its inputs
        return found

    def record(
        self, run: control.Run, graph: Graph, comparison: Comparison, moved: Mapping[StageId, Native]
    ) -> None:
        """Make a job the one of this root: one commit."""
        records = [Rebuilt(stage, max(int(run.id), 2), "", None, done=True) for stage in moved]
        state = attempt_changes.record_change(self.state, run.id, shapes(graph), records, comparison)
        self.control.append(state)
        self.graph = graph
        self.native |= {(state.attempt.id, stage): native for stage, native in moved.items()}

    def begin_stages(self) -> Iterator[None]:
        """Make channels and tables ready; a stage that has run no batch begins where it is recorded."""
        starts, attempt = self.parts.first_positions(self.state), self.state.attempt.id
        for stage in self.graph:
            for channel in stage.channels:
                self.tables.setdefault(channel, Table(channel))
            native = self.native.get((attempt, stage.id), Native(Planned((), 0)))
            if native.committed == NO_BATCH:
                first = (starts.get((stage.id, c), first_position(c)) for c in stage.inputs)
                native = replace(native, start=Planned(tuple(first), 0))
            native.had_read = {c: self.tables[c].version for c in stage.inputs}
            self.native[attempt, stage.id] = native
        yield
        for stage in self.graph:
            if stage.sink:
                table = self.sinks.setdefault(stage.target, Table(stage.target))
                self.tables[stage.target] = table
                self.came.setdefault(stage.target, table.version)
                attached = control.AttachedSink(stage.id, stage.sink_name, stage.target, stage.target)
                self.control.append(control.attach(self.state, [attached]))
                yield

    @property
    def owner_of_sinks(self) -> str:
        """As what its runs are fenced on tables of sinks."""
        return self.owner(Stage(StageId("")), "")

    # -- restore

    def restore(self, checkpoint: Checkpoint, clock: Clock) -> Iterator[None]:
        """Bring everything back to a checkpoint under a new attempt."""
        outputs = (o for s in checkpoint.snapshots for o in s.outputs if o.kind == CHANNEL)
        plan = to_json(BranchPoint({o.table: o.version for o in outputs if o.version is not None}))
        self.control.append(begun_from(self.state, checkpoint, plan, clock))
        yield
        run, attempt = self.state.run, self.state.attempt
        assert run is not None
        self.replaying[attempt.id] = frozenset()
        yield from self._burn(run)
        yield from abort_open(self, run.id)
        for snapshot in checkpoint.snapshots:
            if snapshot.cut_batch != NO_BATCH:
                self.native[attempt.id, snapshot.stage] = self._materialised(snapshot)
            yield
        for target, sinks in self._known_sinks().items():
            version = self.parts.table_version(checkpoint, target, sinks)
            back = self.came[target] if version is None else version
            self.tables[target].restore(back, self.owner_of_sinks)
            yield
        self.control.append(attempt_changes.finish_attempt(self.state, attempt.id))

    def _known_sinks(self) -> Mapping[str, Iterable[tuple[StageId, str]]]:
        found: dict[str, list[tuple[StageId, str]]] = {}
        for sink in self.state.sinks:
            found.setdefault(sink.table, []).append((sink.stage, sink.sink))
        return found

    def _burn(self, run: control.Run) -> Iterator[None]:
        old = [a for a in self.state.attempts if a.id < self.state.attempt.id]
        for name, table in self.tables.items():
            if name in self.came:
                continue
            stage, output = parted(table.channel)
            table.fence_runs(run.id)
            for attempt in old:
                table.burn(app_id(JOB, stage, output, attempt.id), attempt.id)
            yield
        for target, sinks in self._known_sinks().items():
            table = self.tables[target]
            table.fence_runs(run.id, self.owner_of_sinks)
            for attempt in old:
                for writer, sink in sinks:
                    table.burn(self.sink_app(self.state, attempt.id, writer, sink), attempt.id)
            yield

    def _materialised(self, snapshot: StageSnapshot) -> Native:
        native, batch, (file,) = Native(Planned((), 0)), snapshot.cut_batch, snapshot.files
        native.offsets[batch] = Planned(snapshot.positions, int(snapshot.offsets))
        native.commits[batch] = file.sha256
        native.states[batch + 1] = {file.sha256: self.packs[file.at.pack]}
        return native


def _sources(native: Native) -> int:
    return len(native.start.positions) or 1
