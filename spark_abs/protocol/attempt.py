"""An attempt: the job's life from one restore to the next, and the records of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_abs.advice import way
from spark_abs.manifest import StageShape, StateFunction
from spark_abs.model import AttemptId, BatchId, ChannelId, CheckpointId, LookupVersion, Position, StageId

NATIVES = "native"
"""Where native checkpoints are if nothing else is said: below the root."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A stage whose native checkpoint was lost, and is elsewhere since (P18)."""

    stage: StageId
    number: int
    """Of its directory, `<stage>.<number>`, from 2: a late upload may still land in an older one."""
    query: str
    """The query id that the new directory gets."""
    checkpoint: CheckpointId | None
    """Where its state comes from; None if it began with nothing."""
    done: bool = False
    """Whether it has repeated what its outputs held; until then no start goes past it."""

    @property
    def directory(self) -> str:
        """The name of its directory among the native checkpoints."""
        return f"{self.stage}.{self.number}"


@dataclass(frozen=True, slots=True)
class StartedFunctions:
    """The stateful functions with which a run started a stage: its state is theirs once a batch has ended."""

    stage: StageId
    after: BatchId
    """The last batch that had ended by then."""
    forms: tuple[StateFunction, ...]
    places: tuple[str, ...]
    """The uid at each place of the plan; empty for what is none of ours."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a stage begins to read a channel."""

    stage: StageId
    position: Position


@dataclass(frozen=True, slots=True)
class Attempt:
    """A life of the job between restores. Attempts form a tree (P18)."""

    id: AttemptId
    parent: AttemptId | None
    """The attempt that the checkpoint belongs to; None for the first."""
    checkpoint: CheckpointId | None
    """Where it branched off."""
    plan: str
    """The restore plan as JSON; empty for the first."""
    ready: bool
    created_ms: int
    natives: str = NATIVES
    """Where its native checkpoints are, `<natives>/<id>/<stage>`: relative to the root, or absolute."""
    rebuilt: tuple[Rebuilt, ...] = ()
    """Stages whose native checkpoint is not where it was at first."""
    drain: str | None = None
    """The savepoint before which event time is brought to its end; once set, a start goes on with that."""
    partitions: Mapping[str, int] = field(default_factory=dict)
    """Stages whose state the restore has spread over another number of partitions than its checkpoint had."""
    base: CheckpointId | None = None
    """The parent's checkpoint with the cut of `checkpoint`, if that was made from it by an edit."""
    root: str = ""
    """As which root it commits to tables outside of it; empty if an earlier version began it."""
    shapes: tuple[StageShape, ...] = ()
    """The stages as the newest run declared them; empty before the first, and from an earlier version."""
    starts: tuple[Start, ...] = ()
    """Where stages begin to read channels that were there before they were, until their first batch."""
    left: tuple[StageId, ...] = ()
    """Stages that were left out since it began; their positions and state are left behind."""
    functions: tuple[StartedFunctions, ...] = ()
    """Of each stage that has some, those that its state is of and those that it was last started with."""
    lookups: tuple[LookupVersion, ...] = ()
    """Of lookups that are never refreshed, the versions at which they were first read."""

    def functions_of(self, stage: StageId, newest: BatchId) -> StartedFunctions | None:
        """Return those that a stage's state is of after a batch, None if it is of none that a run started."""
        found = [f for f in self.functions if f.stage == stage and f.after < newest]
        return found[-1] if found else None

    @property
    def first_positions(self) -> Mapping[tuple[StageId, ChannelId], Position]:
        """Where stages begin to read channels, as far as it is recorded."""
        return {(start.stage, start.position.channel): start.position for start in self.starts}

    def rebuilt_stage(self, stage: StageId) -> Rebuilt | None:
        """Return how a stage was rebuilt last, None if it never was."""
        return next((r for r in self.rebuilt if r.stage == stage), None)

    @property
    def directories(self) -> Mapping[StageId, str]:
        """The names of directories that are not called like their stages."""
        return {rebuilt.stage: rebuilt.directory for rebuilt in self.rebuilt}

    def directory(self, stage: StageId) -> str:
        """Return the name of a stage's directory among the native checkpoints."""
        return self.directories.get(stage, str(stage))

    @property
    def command(self) -> str:
        """The command that finishes the restore with which the attempt began."""
        options = "".join(f" --shuffle-partitions {stage}={n}" for stage, n in self.partitions.items())
        argument = f", shuffle_partitions={dict(self.partitions)}" if self.partitions else ""
        return way(
            f"spark_abs.open(root).restore({self.checkpoint}{argument})",
            f"spark-abs restore ROOT --to {self.checkpoint}{options}",
        )
