"""Whether a declared job can continue from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from spark_abs.errors import CheckpointNotFound, Refused
from spark_abs.manifest import Manifest, StageShape
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_BATCH, BatchId, StageId
from spark_abs.plan.frames import Frames
from spark_abs.protocol.attempt import StartedFunctions
from spark_abs.protocol.control import ControlState
from spark_abs.run_context import RunContext
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import NativeLog
from spark_abs.state.assignment import Functions, function_obstacles, held_at, match_functions
from spark_abs.state.declared import NOTHING, Before
from spark_abs.store.control import Control
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class Past:
    """The known facts of a job's stages before a start."""

    root: Root
    control: ControlState
    manifest: Manifest | None
    """The newest checkpoint of the attempt, or the checkpoint from which the attempt began."""

    def shape(self, stage: StageId) -> StageShape | None:
        """Return the shape of a stage's plan from the manifest."""
        graph = self.manifest.graph if self.manifest is not None else ()
        return next((shape for shape in graph if shape.stage == stage), None)

    def newest_batch(self, stage: StageId) -> BatchId:
        """Return the last finished batch of a stage.

        Reads the native checkpoint, at the cost of a listing.
        """
        attempt = self.control.attempt
        place = self.root.native(attempt.natives, attempt.id, attempt.directory(stage))
        return NativeLog(place).newest_committed()

    def cut_batch(self, stage: StageId) -> BatchId:
        """Return the cut from which a stage with a lost native checkpoint continues."""
        snapshot = self.manifest.stage(stage) if self.manifest is not None else None
        return NO_BATCH if snapshot is None else snapshot.cut_batch

    def functions(self, stage: StageId, newest: BatchId) -> Functions | None:
        """Return the functions that own a stage's state after its last batch; None if no batch has run."""
        started = self.control.attempt.functions_of(stage, newest)
        if started is not None:
            return Functions(started.forms, started.places)
        return held_at(self.manifest, stage) if self.manifest is not None else None


def past_of(root: Root, control: ControlState) -> Past:
    """Read the state from which a start continues."""
    return Past(root, control, Checkpoints.open(root, control.job).newest_on(control.attempt))


def check_functions(
    past: Past, drafts: Frames, plans: Mapping[StageId, PlanFacts], lost: Collection[StageId] = ()
) -> tuple[StartedFunctions, ...]:
    """Refuse stateful functions that cannot read the stored state; stores nothing.

    Afterwards the declared functions carry their state format with its history, so that manifests record
    both.

    Args:
        past: the state from which the start continues.
        drafts: the declared functions.
        plans: the analysed plans.
        lost: stages that are rebuilt from the checkpoint.

    Returns:
        The functions to record before a stage runs.

    Raises:
        Refused: the message names stages and functions, both state formats, and possible remedies.
    """
    started: list[StartedFunctions] = []
    obstacles: list[str] = []
    for stage, declared in drafts.declared.items():
        places = plans[stage].functions
        snapshot = past.manifest.stage(stage) if past.manifest is not None else None
        known = any(f.stage == stage for f in past.control.attempt.functions)
        if not (any(places) or known or (snapshot is not None and snapshot.operators)):
            continue
        newest = past.cut_batch(stage) if stage in lost else past.newest_batch(stage)
        held, now = past.functions(stage, newest), Functions(tuple(declared.functions), places)
        obstacles += function_obstacles(stage, held, now, past.manifest.id if past.manifest else None)
        declared.functions[:] = match_functions(held, now).forms
        started.append(StartedFunctions(stage, newest, tuple(declared.functions), places))
    if obstacles:
        raise Refused("\n".join(obstacles))
    return tuple(started)


def check_restored(past: Past, drafts: Frames, plans: Mapping[StageId, PlanFacts]) -> None:
    """Refuse as `check_functions` does, before the job goes back to the past's checkpoint.

    Raises:
        Refused: as `check_functions`.
    """
    state = past.control
    anew = replace(state, attempts=(*state.attempts[:-1], replace(state.attempt, functions=())))
    check_functions(replace(past, control=anew), drafts, plans, drafts.declared)


def functions_before(ctx: RunContext, control: Control, stage: StageId) -> Before:
    """Return the watermark and functions that a repartitioning may not have copied to every partition.

    A later attempt may lack them too, if a checkpoint was taken before the attempt's first batch ended.
    """
    path = control.state.lineage()
    attempt = path[-1]
    if attempt.checkpoint is None or all(stage not in step.partitions for step in path):
        return NOTHING
    try:
        origin = Checkpoints.open(ctx.root, ctx.job).load(attempt.checkpoint).graph
    except CheckpointNotFound:
        origin = ()  # retired, and so there is a later one, and records
    functions = {f.uid: f for shape in origin if shape.stage == stage for f in shape.functions}
    return Before(NativeLog(ctx.native(stage)).watermark_ms(), functions)
