"""A job goes on from a checkpoint: whether it is declared so that it can."""

from __future__ import annotations

from spark_abs.codec import to_json
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.model import NO_BATCH
from spark_abs.runtime.frames import Frames
from spark_abs.runtime.graph import JobGraph
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.state.evolution import difference, evolve


def require_stages(manifest: Manifest, graph: JobGraph) -> None:
    """Refuse to leave behind, unasked, what a checkpoint has of a stage that is no longer declared.

    Follows Flink's `Checkpoints.loadAndValidateCheckpoint`: a renamed source would read all its input again.

    Raises:
        Refused: names the stages, and what each has.
    """
    declared = {stage.name for stage in graph.stages}
    left = [
        f"stage {snapshot.stage!r} ({held})"
        for snapshot in manifest.stages
        if snapshot.stage not in declared and (held := _held(snapshot))
    ]
    if left:
        raise Refused(
            f"checkpoint {manifest.id} has {', '.join(left)}, and the job declares no such stage now: name "
            "it as it was, or leave that behind: start with allow_non_restored_state=True"
        )


def _held(snapshot: StageSnapshot) -> str:
    if snapshot.cut_batch == NO_BATCH:
        return ""
    held = ["state"] if snapshot.operators else []
    if len(parse_offsets(snapshot.offsets).offsets) > len(snapshot.positions):  # those that are not channels
        held.append("positions in its sources")
    return " and ".join(held)


def check_functions(manifest: Manifest, drafts: Frames) -> None:
    """Refuse to start stateful functions on a state that they cannot go on from.

    What is declared then says the form with its past: so manifests record it.

    Raises:
        Refused: names stage and function, with both forms.
    """
    shapes = {shape.stage: shape for shape in manifest.graph}
    for stage, declared in drafts.declared.items():
        for stored in shapes[stage].functions if stage in shapes else ():
            where = f"stage {stage!r}: the state of function {stored.uid!r} in checkpoint {manifest.id}"
            edit = f"spark_abs.edit(root, {manifest.id})"
            at = next((i for i, f in enumerate(declared.functions) if f.uid == stored.uid), None)
            if at is None:
                raise Refused(
                    f"{where} was written as {to_json(stored)}; it is no longer declared. Declare it as it "
                    f"was; or let another function take its place: empty it with {edit}.remove({stage!r}), "
                    "which keeps the stage's positions, and restore what that wrote"
                )
            evolved = evolve(stored, declared.functions[at])
            if evolved.obstacles:
                said = difference(stored, declared.functions[at], evolved.obstacles)
                raise Refused(
                    f"{where} cannot be gone on from as it is declared: {said}\nDeclare it so that it can: "
                    "fields may be new, renamed with renamed=, given up with dropped=, or of a wider type; "
                    f"restore a checkpoint that it fits; write its state in the new form with {edit}.rekey, "
                    "or empty it, and keep the stage's positions, with .remove, and restore what that wrote"
                )
            declared.functions[at] = evolved.form
