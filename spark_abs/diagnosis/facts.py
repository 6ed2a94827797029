"""The facts that diagnoses rest on, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_abs.keep import Keep
from spark_abs.model import CheckpointId, StageId, is_number
from spark_abs.observe.status import AbortedInRow, StageStatus
from spark_abs.protocol.control import Paused
from spark_abs.store.activity import Disk, Earlier, StageActivity


@dataclass(frozen=True, slots=True)
class StateSize:
    """The state of a stage in a checkpoint, in bytes."""

    checkpoint: CheckpointId
    at_ms: int
    size: int


@dataclass(frozen=True, slots=True)
class Partitions:
    """The bytes of each state partition of an operator in the newest checkpoint, by its number."""

    stage: StageId
    operator: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file in `state/` that no commit names: one of a copy under way, or one that a kill has left."""

    size: int
    at_ms: int
    """When it was written, by the clock of the store."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a job at one moment. What is not known is None or empty, and diagnoses nothing."""

    root: str
    now_ms: int
    alive: bool = False
    job: str = ""
    """Its name; that of wrapped queries and that of watched ones are fixed."""
    stages: tuple[StageStatus, ...] = ()
    ended: str = ""
    """How the newest run has ended, if it is not alive and did not end in order."""
    unfinished_restore: str = ""
    """The command of a restore that was begun and is not finished."""
    damaged: tuple[str, ...] = ()
    """Why checkpoints cannot be read."""
    aborted: AbortedInRow | None = None
    paused: tuple[Paused, ...] = ()
    last_completed_ms: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the live run."""
    keep: Keep | None = None
    """How long the live run keeps checkpoints."""
    earlier: tuple[Earlier, ...] = ()
    disks: tuple[Disk, ...] = ()
    usual_write_ms: int | None = None
    """How long the median of the last small writes into the root took."""
    ahead_of_store_ms: int | None = None
    """How far the clock of the driver is ahead of the store's; negative if it is behind."""
    heard_ahead_ms: int = 0
    """How far the lease is in the future of this machine's clock."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages of the live driver."""
    own_versions: Mapping[str, str] = field(default_factory=dict)
    """Packages of this process."""
    sizes: Mapping[StageId, tuple[StateSize, ...]] = field(default_factory=dict)
    """Of the newest completed checkpoints, oldest first."""
    partitions: tuple[Partitions, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    restore_ms: int | None = None
    """How long the last restore of this root took."""
    retained_ms: int | None = None
    """From the oldest to the newest checkpoint that can be restored; 0 if there is one."""
    retained: int = 0
    """How many these are, without savepoints."""

    @property
    def activities(self) -> tuple[StageActivity, ...]:
        """What each stage of the live run does."""
        return tuple(stage.activity for stage in self.stages if stage.activity is not None)

    def setting_ms(self, name: str) -> int | None:
        """Return a setting of the live run that is a number, None if it is not set or not known."""
        text = self.settings.get(name, "")
        return int(text) if is_number(text) else None
