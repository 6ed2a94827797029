"""A driver of the simulated cluster that starts a job declared otherwise than before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from spark_abs.errors import DamageError, Refused
from spark_abs.model import AttemptId, Barrier, CheckpointKind, StageId
from spark_abs.protocol import control
from spark_abs.protocol.changes import Begin, Comparison
from tests.simulator.cluster import Graph, Native, Stage
from tests.simulator.driver import Driver
from tests.simulator.process import Process
from tests.simulator.recovery import abort_open, fence
from tests.simulator.root import Root


@dataclass(frozen=True, slots=True)
class Declared:
    """A job and how it is to be started."""

    graph: Graph
    begin: Mapping[StageId, Begin] = field(default_factory=dict)
    leave: bool = False


class ChangingDriver(Driver):
    """A run that first makes the job that it was given the job of its root."""

    storage: Root
    declared: Declared
    on_record: Callable[[], None]
    """Called with the commit that does so."""

    def _boot(self) -> Iterator[None]:
        storage, declared = self.storage, self.declared
        self.graph = declared.graph
        storage.control.append(control.begin_run(storage.state, "sim", 1, self.clock()))
        run = storage.state.run
        assert run is not None
        floor = storage.state.last_claimed
        yield
        yield from abort_open(storage, run.id)
        comparison = self._compared()
        yield
        if comparison.rests_on_outputs:
            yield from storage.fence_recorded(run)
            comparison = self._compared()
        for change in comparison.stages:
            if change.ends_batch:
                storage.finish(change)
                self.seen["batches ended"] += 1
                yield
        if any(change.ends_batch for change in comparison.stages):
            comparison = self._compared()
        moved = {
            change.stage: storage.rearranged(change.stage, change.layout.sources)
            for change in comparison.stages
            if change.layout is not None
        }
        yield
        storage.record(run, declared.graph, comparison, moved)
        self.on_record()
        yield
        yield from storage.begin_stages()
        yield from fence(storage, run.id, before=AttemptId(0))
        self._begin(run.id, floor)

    def _compared(self) -> Comparison:
        found = self.storage.compare(self.declared.graph, self.declared.begin, self.declared.leave)
        if not found.ok:
            raise Refused(found.reasons())
        return found

    def _attach(self, process: Process) -> None:
        super()._attach(process)
        self.actors[f"life:{process.stage.id}"] = partial(self._turn, process)

    def _turn(self, process: Process) -> None:
        """Let a stage go on; after the savepoint with which the job ends it begins no batch."""
        _require_own(process.stage, process.native)
        if process.at is not None or not any(
            barrier.kind is CheckpointKind.SYNC_SAVEPOINT and self._is_behind(process, barrier)
            for barrier in self.run.open
        ):
            process.step()

    def _is_behind(self, process: Process, barrier: Barrier) -> bool:
        stands = [p.epoch for p in process.native.newest.positions]
        marks = [table.marker(process.path(table)) for _, table in process.channels]
        handed = (barrier.id, process.stage.id) in self.run.handed
        return handed or any(found and min(found) >= barrier.id for found in (stands, marks))

    def _start(self, stage: Stage) -> None:
        _require_own(stage, self.storage.native[self.run.attempt, stage.id])
        super()._start(stage)


def _require_own(stage: Stage, native: Native) -> None:
    """Raise DamageError unless each gate finds an offset of its own channel, as gates do."""
    found = tuple(p.channel for p in native.newest.positions)
    if found != stage.inputs:
        raise DamageError(f"3: the gates of {stage.id} read {stage.inputs} and find {found}")
