"""Find the state that a person asks for, by stage, checkpoint, operator and store. No JVM."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.errors import UsageError
from spark_abs.manifest import Manifest, StageSnapshot, StateFunction
from spark_abs.manifests.find import lookup
from spark_abs.model import NO_BATCH
from spark_abs.snapshots.operators import Operator, Part, operators_of
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class StageAt:
    """A stage with state, at a checkpoint."""

    manifest: Manifest
    snapshot: StageSnapshot
    functions: tuple[StateFunction, ...]
    """Its stateful functions."""
    operators: tuple[Operator, ...]
    """All its stateful operators."""

    @property
    def names_functions(self) -> bool:
        """Whether the manifest names the function of each operator; those of earlier versions name none."""
        return any(o.function for o in self.operators) or not self.functions


@dataclass(frozen=True, slots=True)
class StateAt:
    """A part of the state of a stage at a checkpoint."""

    manifest: Manifest
    snapshot: StageSnapshot
    function: StateFunction | None
    """The stateful function that owns it; None if there is none, or if only the state itself names it."""
    operator: Operator
    part: Part | None
    """None for the rows of a function."""

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row; empty if rows may repeat."""
        return ("key",) if self.part is None else self.part.identity


def find_stage(root: Root, stage: str, checkpoint: str | int) -> StageAt:
    """Find the state of a stage.

    Raises:
        UsageError, CheckpointNotFound, DamageError: as `find_state`.
    """
    manifest = lookup(root, checkpoint).manifest
    snapshot = next((s for s in manifest.stages if s.stage == stage), None)
    if snapshot is None:
        known = ", ".join(s.stage for s in manifest.stages) or "none"
        raise UsageError(f"checkpoint {manifest.id} has no stage {stage!r}: it has {known}")
    if not snapshot.operators:
        why = "had run no batch" if snapshot.cut_batch == NO_BATCH else "has no stateful operator"
        others = ", ".join(s.stage for s in manifest.stages if s.operators) or "none"
        raise UsageError(
            f"stage {stage!r} {why} at checkpoint {manifest.id}: it has no state; stages with state: {others}"
        )
    shape = next((s for s in manifest.graph if s.stage == stage), None)
    functions = shape.functions if shape is not None else ()
    return StageAt(manifest, snapshot, functions, operators_of(root, snapshot))


def find_state(
    root: Root,
    stage: str,
    checkpoint: str | int = "latest",
    operator: int | str | None = None,
    store: str | None = None,
) -> StateAt:
    """Find the state of an operator, or raise an error that lists the choices.

    Args:
        root: the job's root.
        stage: its name.
        checkpoint: an id, the name of a savepoint, or `latest`.
        operator: its number, or the uid of a function; may be left out if there is one.
        store: the part of its state; may be left out if there is one.

    Raises:
        UsageError: there is no such stage, operator or store, the stage has no state, or there are several
            operators or stores to choose from.
        CheckpointNotFound: there is no such checkpoint.
        DamageError: the manifest or operator metadata is damaged.
    """
    found = find_stage(root, stage, checkpoint)
    chosen = choose_operator(found, operator)
    if chosen.ours and found.functions and (chosen.function or not found.names_functions):
        if store is not None:
            raise UsageError(
                f"operator {chosen.id} of stage {stage!r} is a function: its state has no stores: give none"
            )
        return StateAt(found.manifest, found.snapshot, function_of(found, chosen), chosen, None)
    if chosen.ours and found.manifest.edited is not None:
        raise UsageError(
            f"the state of the function of stage {stage!r}, operator {chosen.id}, was removed by the edit "
            f"that made checkpoint {found.manifest.id}: there is none"
        )
    part = _part(stage, chosen, store)
    return StateAt(found.manifest, found.snapshot, None, chosen, part)


def function_of(at: StageAt, operator: Operator) -> StateFunction | None:
    """Return the stateful function of an operator, None if the manifest names none."""
    if at.names_functions:
        return next((f for f in at.functions if f.uid == operator.function), None)
    only = len(at.functions) == 1 == sum(o.ours for o in at.operators)
    return at.functions[0] if only and operator.ours else None


def choose_operator(at: StageAt, asked: int | str | None) -> Operator:
    """Return the operator that is asked for, or the only one.

    Raises:
        UsageError: there is none, or more than one.
    """
    stage, found = at.snapshot.stage, at.operators
    if asked is not None:
        number = str(asked)
        found = tuple(o for o in at.operators if str(o.id) == number)
        if any(f.uid == number for f in at.functions):
            mine = tuple(o for o in at.operators if o.function == number)
            found = mine or tuple(o for o in at.operators if o.ours)
    listed = ", ".join(f"{o.id} ({o.function or o.name})" for o in at.operators)
    if len(found) > 1 and asked is not None:
        raise UsageError(
            f"stage {stage!r} has {len(found)} functions, {', '.join(f.uid for f in at.functions)}: name one "
            f"by the number of its operator: {listed}"
        )
    if len(found) != 1:
        what = f"no operator {asked!r}" if asked is not None else f"{len(found)} stateful operators"
        raise UsageError(f"stage {stage!r} has {what}: choose one of {listed}")
    return found[0]


def _part(stage: str, operator: Operator, asked: str | None) -> Part:
    found = [p for p in operator.parts if asked is None or p.name == asked]
    if len(found) != 1:
        listed = ", ".join(p.name for p in operator.parts) or "none"
        what = f"no store {asked!r}" if asked is not None else f"{len(found)} stores"
        raise UsageError(
            f"operator {operator.id} ({operator.name}) of stage {stage!r} has {what}: choose one of {listed}"
        )
    return found[0]


def same_at(root: Root, state: StateAt, checkpoint: str | int) -> StateAt:
    """Return the same part of the same operator at another checkpoint.

    Raises:
        UsageError: it is not there, or another operator has its number.
        CheckpointNotFound, DamageError: as `find_state`.
    """
    store = None if state.part is None else state.part.name
    there = find_stage(root, state.snapshot.stage, checkpoint)
    wanted = state.operator.function if any(o.function for o in there.operators) else ""
    other = find_state(root, state.snapshot.stage, checkpoint, wanted or state.operator.id, store)
    if (other.operator.name, other.operator.ours) != (state.operator.name, state.operator.ours):
        raise UsageError(
            f"operator {state.operator.id} of stage {state.snapshot.stage!r} is {state.operator.name} at "
            f"checkpoint {state.manifest.id} and {other.operator.name} at checkpoint {other.manifest.id}: "
            "their state cannot be compared"
        )
    return other
