"""The attempts of a job: a restore begins an attempt, and no run uses it before it is ready (P18)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from spark_abs.errors import CheckpointNotFound
from spark_abs.manifest import StageShape
from spark_abs.model import AttemptId, CheckpointId, LookupVersion, RunId, RunKind
from spark_abs.protocol.attempt import Attempt, Rebuilt, StartedFunctions
from spark_abs.protocol.changes import Comparison, Verdict
from spark_abs.protocol.control import ControlState, require_current, with_run


def begin_attempt(
    state: ControlState,
    parent: AttemptId,
    *,
    checkpoint: CheckpointId,
    plan: str,
    host: str,
    pid: int,
    now_ms: int,
    natives: str | None = None,
    partitions: Mapping[str, int] = MappingProxyType({}),
    base: CheckpointId | None = None,
) -> ControlState:
    """Add an attempt under restore, and the run that restores it: both replace the earlier attempt and run.

    If the same checkpoint is already being restored, only the run is new. If the checkpoint, `natives` (the
    directory of native checkpoints; None: unchanged) or `partitions` differ, the unfinished attempt is
    abandoned: no run has used it. `base` is the original of a checkpoint that an edit made.

    Raises:
        CheckpointNotFound: the parent attempt does not exist.
    """
    where = state.attempt.natives if natives is None else natives
    number = attempt_for(state, parent, checkpoint, where, partitions)
    attempts = state.attempts
    if number != state.attempt.id:
        begun = Attempt(
            number,
            parent,
            checkpoint=checkpoint,
            plan=plan,
            ready=False,
            created_ms=now_ms,
            natives=where,
            partitions=dict(partitions),
        )
        before = (replace(a, shapes=(), starts=()) for a in attempts)  # nobody starts on them again
        attempts = (*before, replace(begun, base=base, root=state.root, lookups=state.attempt.lookups))
    return replace(
        state,
        attempts=attempts,
        runs=with_run(state, number, host=host, pid=pid, now_ms=now_ms, kind=RunKind.RESTORE),
    )


def attempt_for(
    state: ControlState,
    parent: AttemptId,
    checkpoint: CheckpointId,
    natives: str,
    partitions: Mapping[str, int] = MappingProxyType({}),
) -> AttemptId:
    """Return the attempt of a restore: the unfinished attempt if it restores the same, else a new one.

    Raises:
        CheckpointNotFound: the parent attempt does not exist.
    """
    if all(a.id != parent for a in state.attempts):
        raise CheckpointNotFound(f"checkpoint {checkpoint} names attempt {parent}, which does not exist")
    newest = state.attempt
    begun = (newest.parent, newest.checkpoint, newest.natives, dict(newest.partitions))
    if not newest.ready and begun == (parent, checkpoint, natives, dict(partitions)):
        return newest.id
    return AttemptId(newest.id + 1)


def replaced_by(state: ControlState, attempt: AttemptId) -> tuple[AttemptId, ...]:
    """Return the attempts that a restore must fence: the last that ran, and those abandoned after it."""
    before = [a for a in state.attempts if a.id < attempt]
    ran = max(a.id for a in before if a.ready)
    return tuple(a.id for a in before if a.id >= ran)


def start_functions(state: ControlState, run: RunId, started: Sequence[StartedFunctions]) -> ControlState:
    """Record the stateful functions of a run's stages, before any stage runs a batch.

    For each stage, the functions that own its state stay recorded; functions of starts without a finished
    batch are dropped.
    """
    require_current(state, run)
    attempt, functions = state.attempt, []
    for new in started:
        held = attempt.functions_of(new.stage, new.after)
        if held is not None:
            functions.append(held)
        if held is None or replace(held, after=new.after) != new:
            functions.append(new)
    stages = {new.stage for new in started}
    others = (f for f in attempt.functions if f.stage not in stages)
    attempt = replace(attempt, functions=(*others, *functions))
    return replace(state, attempts=(*state.attempts[:-1], attempt))


def pin_lookups(
    state: ControlState, run: RunId, pinned: Sequence[LookupVersion], declared: Collection[str]
) -> ControlState:
    """Record the versions of lookups that are never refreshed, before any stage reads one.

    Versions of lookups that are no longer `declared` stay recorded: a restore may go back to stages that read
    them.

    Raises:
        Fenced: a newer run has taken over.
    """
    require_current(state, run)
    others = (at for at in state.attempt.lookups if at.lookup not in declared)
    attempt = replace(state.attempt, lookups=(*others, *pinned))
    return replace(state, attempts=(*state.attempts[:-1], attempt))


def record_change(
    state: ControlState,
    run: RunId,
    shapes: tuple[StageShape, ...],
    moved: Sequence[Rebuilt],
    comparison: Comparison,
) -> ControlState:
    """Record the job that a run starts: this commit makes it the job of the root.

    Args:
        state: the newest state.
        run: the run.
        shapes: the declared stages.
        moved: the native checkpoints whose sources were rearranged.
        comparison: the effect of the start on each stage.

    Raises:
        Fenced: a newer run has taken over.
    """
    require_current(state, run)
    names, attempt = {record.stage for record in moved}, state.attempt
    left = {c.stage for c in comparison.stages if c.verdict is Verdict.LEFT}
    changed = replace(
        attempt,
        shapes=shapes,
        starts=tuple(start for change in comparison.stages for start in change.starts),
        left=tuple(sorted({*attempt.left, *left})),
        rebuilt=(*(r for r in attempt.rebuilt if r.stage not in names), *moved),
    )
    return replace(state, attempts=(*state.attempts[:-1], changed))


def finish_attempt(state: ControlState, attempt: AttemptId) -> ControlState:
    """Mark a restored attempt ready: the last step of a restore."""
    return replace(
        state, attempts=tuple(replace(a, ready=True) if a.id == attempt else a for a in state.attempts)
    )
