"""An attempt: the job's life from one restore to the next, and the records of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_abs.advice import way
from spark_abs.manifest import StageShape, StateFunction
from spark_abs.model import AttemptId, BatchId, ChannelId, CheckpointId, LookupVersion, Position, StageId

NATIVES = "native"
"""The default directory of native checkpoints, below the root."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A stage whose native checkpoint was lost and is now in a new directory (P18)."""

    stage: StageId
    number: int
    """The number in the name of its directory, `<stage>.<number>`, from 2.

    A late upload may still write to an older directory.
    """
    query: str
    """The query id for the new directory."""
    checkpoint: CheckpointId | None
    """The checkpoint that gave the state; None if the stage began without state."""
    done: bool = False
    """Whether the stage has repeated the batches of its outputs.

    Until then every start continues the rebuild.
    """

    @property
    def directory(self) -> str:
        """The name of its directory among the native checkpoints."""
        return f"{self.stage}.{self.number}"


@dataclass(frozen=True, slots=True)
class StartedFunctions:
    """The stateful functions with which a run started a stage: they own its state once a batch has ended."""

    stage: StageId
    after: BatchId
    """The last finished batch at that start."""
    forms: tuple[StateFunction, ...]
    places: tuple[str, ...]
    """The uid at each position of the plan; empty for operators that are not of spark_abs."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first position of a stage in a channel."""

    stage: StageId
    position: Position


@dataclass(frozen=True, slots=True)
class Attempt:
    """A life of the job between restores. Attempts form a tree (P18)."""

    id: AttemptId
    parent: AttemptId | None
    """The attempt of the restored checkpoint; None for the first attempt."""
    checkpoint: CheckpointId | None
    """The restored checkpoint."""
    plan: str
    """The restore plan as JSON; empty for the first attempt."""
    ready: bool
    created_ms: int
    natives: str = NATIVES
    """The directory of its native checkpoints `<natives>/<id>/<stage>`, relative to the root or absolute."""
    rebuilt: tuple[Rebuilt, ...] = ()
    """Stages whose native checkpoint has moved to a new directory."""
    drain: str | None = None
    """The savepoint that ends a drain; once it is set, every start resumes the drain."""
    partitions: Mapping[str, int] = field(default_factory=dict)
    """Stages whose state the restore has repartitioned, with the new number of partitions."""
    base: CheckpointId | None = None
    """If `checkpoint` was made by an edit: the edited checkpoint of the parent, with the same cut."""
    root: str = ""
    """The identity of the root in commits to tables outside of it.

    Empty if an earlier version began the attempt.
    """
    shapes: tuple[StageShape, ...] = ()
    """The stages as the newest run declared them; empty before the first run, and from earlier versions."""
    starts: tuple[Start, ...] = ()
    """First positions of stages in channels that are older than the stage.

    Kept until the stage's first batch.
    """
    left: tuple[StageId, ...] = ()
    """Stages that were removed since the attempt began; their positions and state are left behind."""
    functions: tuple[StartedFunctions, ...] = ()
    """For each stage with stateful functions: the functions that own its state, and those of its last start.
    """
    lookups: tuple[LookupVersion, ...] = ()
    """The first version of each lookup that is never refreshed."""

    def functions_of(self, stage: StageId, newest: BatchId) -> StartedFunctions | None:
        """Return the functions that own a stage's state after a batch; None if no recorded start has them."""
        found = [f for f in self.functions if f.stage == stage and f.after < newest]
        return found[-1] if found else None

    @property
    def first_positions(self) -> Mapping[tuple[StageId, ChannelId], Position]:
        """The recorded first positions of stages in channels."""
        return {(start.stage, start.position.channel): start.position for start in self.starts}

    def rebuilt_stage(self, stage: StageId) -> Rebuilt | None:
        """Return the last rebuild of a stage; None without one."""
        return next((r for r in self.rebuilt if r.stage == stage), None)

    @property
    def directories(self) -> Mapping[StageId, str]:
        """The names of directories that differ from the names of their stages."""
        return {rebuilt.stage: rebuilt.directory for rebuilt in self.rebuilt}

    def directory(self, stage: StageId) -> str:
        """Return the name of a stage's directory among the native checkpoints."""
        return self.directories.get(stage, str(stage))

    @property
    def command(self) -> str:
        """The command that finishes the restore of this attempt."""
        options = "".join(f" --shuffle-partitions {stage}={n}" for stage, n in self.partitions.items())
        argument = f", shuffle_partitions={dict(self.partitions)}" if self.partitions else ""
        return way(
            f"spark_abs.open(root).restore({self.checkpoint}{argument})",
            f"spark-abs restore ROOT --to {self.checkpoint}{options}",
        )
