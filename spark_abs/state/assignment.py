"""Which function of a stage continues with which state, decided before a start changes anything. Pure.

Spark numbers the stateful operators of a query by their position in the plan and finds state by the number:
if two functions changed places, each would get the other's state, and Spark would not notice. So the position
of each function is recorded by uid and compared with the plan to start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from spark_abs.manifest import Manifest, OperatorState, StateFunction
from spark_abs.model import NO_BATCH, CheckpointId, StageId
from spark_abs.snapshots.operators import TRANSFORM
from spark_abs.state.evolution import difference, evolve


@dataclass(frozen=True, slots=True)
class Functions:
    """The stateful functions of a stage: of its stored state, or of its declaration."""

    forms: tuple[StateFunction, ...]
    """The form of each."""
    places: tuple[str, ...] | None
    """The uid at each position, in the order of the plan; empty for other operators and where an edit has
    removed the state. None: an earlier version did not record it."""


class Fate(StrEnum):
    """The effect of a start on a declared function."""

    KEPT = "kept"
    """The function continues with its state."""
    NEW = "new"
    """The stage begins without state."""
    EMPTY = "empty"
    """An edit has removed the state at its position, so the function begins without state."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The effect of a start on the functions that a stage declares."""

    forms: tuple[StateFunction, ...]
    """The declared forms with the history of their state, in the order declared."""
    fates: Mapping[str, Fate] = field(default_factory=dict)
    """By uid, for the functions that can start."""
    obstacles: tuple[str, ...] = ()
    """Why the stage cannot start, one sentence for each reason; empty if it can."""


def match_functions(held: Functions | None, declared: Functions) -> Matched:
    """Decide for each function of a stage whether it continues or begins, or why it cannot start.

    Functions are identified by uid. A function that continues must be at the position of its state, with a
    form that the state can evolve to (`evolve`). In a stage that has run, Spark neither begins a new operator
    nor starts without an operator that has state. So a function can be added only where an edit has removed
    state, and none can be removed, whatever `allow_non_restored_state` says.

    Args:
        held: the functions of the stored state; None if the stage has run no batch.
        declared: the functions to start; `places` is not None.
    """
    if held is None:
        return Matched(declared.forms, {f.uid: Fate.NEW for f in declared.forms})
    stored = {form.uid: form for form in held.forms}
    forms, fates, obstacles = [], {}, list(_misplaced(held, declared))
    for form in declared.forms:
        if form.uid not in stored:
            fates[form.uid] = Fate.EMPTY
            forms.append(form)
            continue
        evolved = evolve(stored[form.uid], form)
        forms.append(evolved.form)
        fates[form.uid] = Fate.KEPT
        if evolved.obstacles:
            said = difference(stored[form.uid], form, evolved.obstacles)
            obstacles.append(f"function {form.uid!r} does not fit its state: {said}")
    return Matched(tuple(forms), {} if obstacles else fates, tuple(obstacles))


def _misplaced(held: Functions, declared: Functions) -> Iterator[str]:
    """Describe the functions that are not at the position of their state."""
    now = declared.places or ()
    stored, uids = [f.uid for f in held.forms], [f.uid for f in declared.forms]
    missing, added = [u for u in stored if u not in uids], [u for u in uids if u not in stored]
    for uid in missing:
        if held.places is None:
            heir = added[0] if len(stored) == len(uids) == len(added) == 1 else None
        else:
            heir = next((u for u in added if _at(now, u) == _at(held.places, uid)), None)
        if heir is not None:
            added.remove(heir)
            yield (
                f"function {uid!r} has state and is no longer declared, and {heir!r} takes its place in the "
                f"plan: if {heir!r} is the same function, give it uid={uid!r}"
            )
        else:
            yield f"function {uid!r} has state and is no longer declared"
    if held.places is None:
        return
    for uid in added:
        if any(place >= len(held.places) or held.places[place] for place in _at(now, uid)):
            yield (
                f"function {uid!r} is new, and a stage that has run takes no new functions: put the "
                "function into a separate stage"
            )
    moved = [uid for uid in stored if uid in uids and _at(held.places, uid) != _at(now, uid)]
    if moved:
        yield (
            f"functions {_listed(moved)} changed places, so Spark would give each the state of another: the "
            f"state was written by a plan with {_listed(held.places)}, this plan has {_listed(now)}"
        )


def _at(places: Sequence[str] | None, uid: str) -> tuple[int, ...]:
    return tuple(place for place, found in enumerate(places or ()) if found == uid)


def _listed(uids: Sequence[str]) -> str:
    return ", ".join(repr(uid) if uid else "(none)" for uid in uids)


def function_obstacles(
    stage: StageId, held: Functions | None, declared: Functions, checkpoint: CheckpointId | None
) -> tuple[str, ...]:
    """Say why a stage cannot be started with the functions that it declares; empty if it can.

    Args:
        stage: its name.
        held: as `match_functions` takes it.
        declared: as `match_functions` takes it.
        checkpoint: a checkpoint for an edit; None if there is none.
    """
    found = match_functions(held, declared).obstacles
    if not found:
        return ()
    ways = [
        "declare its functions with their earlier uids, in their earlier places, in a form that fits the "
        "state: a field may be new, renamed (renamed=), dropped (dropped=) or of a wider type",
        "give the stage another name and start with allow_non_restored_state=True: the stage then begins "
        "without state",
    ]
    if checkpoint is not None:
        edit = f"spark_abs.open(root).edit({checkpoint})"
        ways[1:1] = [
            f"edit a checkpoint: {edit}.rekey writes the state of a function in another form, .remove "
            "deletes it and keeps the stage's positions; then restore the savepoint that the edit wrote"
        ]
    return (*(f"stage {stage!r}: {one}" for one in found), f"stage {stage!r}: " + "; or ".join(ways))


def held_at(manifest: Manifest, stage: StageId) -> Functions | None:
    """Return the functions whose state a stage has at a checkpoint, None if it had run no batch."""
    snapshot = manifest.stage(stage)
    if snapshot is None or snapshot.cut_batch == NO_BATCH:
        return None
    forms = next((s.functions for s in manifest.graph if s.stage == stage), ())
    places = tuple(o.function for o in snapshot.operators if o.name in TRANSFORM)
    if forms and not any(places):
        return Functions(forms, (forms[0].uid,) if len(forms) == len(places) == 1 else None)
    return Functions(forms, places)


def placed(operators: Sequence[OperatorState], places: Sequence[str]) -> tuple[OperatorState, ...]:
    """Return the function of each operator of a stage, in the order of their numbers.

    Args:
        operators: as Spark's own metadata names them.
        places: the uids in the plan, as `Functions.places`.
    """
    transforms = [o.operator_id for o in operators if o.name in TRANSFORM]
    if len(transforms) != len(places):
        return tuple(operators)
    uids = dict(zip(transforms, places, strict=True))
    return tuple(replace(o, function=uids.get(o.operator_id, "")) for o in operators)
