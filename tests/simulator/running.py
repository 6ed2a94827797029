"""What the processes of one run of the simulated job share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spark_abs.alignment import align
from spark_abs.manifest import OutputVersion, StageSnapshot, StoredFile
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    Barrier,
    BatchId,
    Branch,
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Entry,
    RunId,
    StageId,
)
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.messages import Acked
from tests.simulator.chance import Chance
from tests.simulator.cluster import Stage, Storage
from tests.simulator.memory import detached
from tests.simulator.parts import Parts
from tests.simulator.table import Planned

Capture = tuple[Barrier, Stage, BatchId]
"""A cut that the snapshotter is to copy: the batch of a stage that passed the barrier on."""
_NOTHING = align.Settled(NO_EPOCH, frozenset())


def is_it(entry: Entry, barrier: Barrier) -> bool:
    """Say whether an entry holds a barrier, whatever its mode was then."""
    return entry.barrier is not None and entry.barrier.id == barrier.id


@dataclass
class Run:
    """What the processes of one run share: durable storage, and a memory that dies with the driver."""

    storage: Storage
    chance: Chance
    parts: Parts
    id: RunId
    attempt: AttemptId
    floor: CheckpointId
    paths: dict[ChannelId, tuple[Branch, ...]]
    open: tuple[Barrier, ...] = ()
    """The barriers that sources are to take, and if they are unaligned every stage; oldest first."""
    handed: set[tuple[CheckpointId, str]] = field(default_factory=set)
    in_place: dict[StageId, CheckpointId] = field(default_factory=dict)
    """The newest barrier that each stage has taken where it stood; its gates may learn of it."""
    captures: list[Capture] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    _read: ControlState | None = None
    _settled: align.Settled = _NOTHING

    def copy(self, storage: Storage, chance: Chance) -> Run:
        """Return the same run on copied storage."""
        twin = detached(self)
        twin.storage, twin.chance = storage, chance
        return twin

    def settled(self) -> align.Settled:
        """Return what `control/` says about outcomes."""
        if self._read is not self.storage.state:
            self._read = self.storage.state
            aborted = frozenset(a.id for a in self._read.aborted)
            self._settled = align.Settled(self.floor, aborted, frozenset(self.storage.overtaken))
        return self._settled

    def dropped(self, checkpoint: CheckpointId) -> bool:
        """Say whether an id is known never to complete."""
        settled = self.settled()
        return checkpoint <= settled.floor or checkpoint in settled.aborted

    def claimed(self, checkpoint: CheckpointId) -> Barrier:
        """Return a barrier as stages know it now."""
        known = (barrier for barrier in self.open if barrier.id == checkpoint)
        return next(known, self.storage.claimed[checkpoint - 1])

    def overtake(self, checkpoint: CheckpointId) -> None:
        """Tell the stages that a barrier is unaligned from now on."""
        unaligned = replace(self.claimed(checkpoint), mode=CheckpointMode.UNALIGNED)
        self.open = tuple(unaligned if barrier.id == checkpoint else barrier for barrier in self.open)

    def hand(self, barrier: Barrier, stage: Stage, batch: BatchId) -> None:
        """Give a cut to the snapshotter."""
        self.handed.add((barrier.id, stage.id))
        self.captures.append((barrier, stage, batch))

    def output_versions(self, barrier: Barrier, stage: Stage, batch: BatchId) -> tuple[OutputVersion, ...]:
        """Return the version of every output at a cut."""
        found = []
        for output, table in self.storage.outputs(stage):
            if output not in stage.outputs:
                version = table.version_at(self.storage.app(stage, output, self.attempt), batch)
                found.append(OutputVersion(output, "delta", table.name, "", version))
                continue
            log = list(table.newest_first(self.paths[ChannelId(table.name)]))
            at = next((e.version for e in log if is_it(e, barrier)), log[0].version if log else 0)
            found.append(OutputVersion(output, "channel", table.name, "", at))  # type: ignore[arg-type]
        return tuple(found)

    def acknowledgement(
        self, barrier: Barrier, stage: Stage, batch: BatchId, planned: Planned, files: tuple[StoredFile, ...]
    ) -> Acked:
        """Return what a stage says of its cut."""
        snapshot = StageSnapshot(
            stage.id,
            batch,
            offsets=str(planned.native),
            positions=planned.positions,
            outputs=self.output_versions(barrier, stage, batch),
            files=files,
        )
        return Acked(0, barrier.id, snapshot)
