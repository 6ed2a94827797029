"""Forget a wrapped query that is gone for good."""

from __future__ import annotations

from collections.abc import Callable

from spark_abs.errors import AttemptNotReady, Refused, UsageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import StageId
from spark_abs.observe.client import ask_run, carried_out, commanded, is_alive, new_command
from spark_abs.protocol.control import WRAPPED_JOB, Command, CommandKind, ControlState, forgotten
from spark_abs.protocol.control import forget as record
from spark_abs.store.root import Root


def forget_query(
    root: Root, stage: str, clock_ms: Callable[[], int], pause: Callable[[float], None]
) -> Command:
    """Forget a query, through the run if one is alive, and return the answered command.

    Args:
        root: where checkpoints are kept.
        stage: the query's uid.
        clock_ms: the wall clock.
        pause: called with seconds between two looks at the run.

    Raises:
        UsageError: the root has no wrapped queries, or none of this name.
        Refused: the query runs, or it is the root of a watcher.
    """
    control = commanded(root)
    state = control.state
    name = _known(state, Checkpoints.open(root, state.job).newest_on(state.attempt), stage)
    command = new_command(CommandKind.FORGET, clock_ms(), name)
    if is_alive(root, state, clock_ms()):
        return ask_run(root, command, clock_ms, pause)

    def change(newer: ControlState) -> ControlState:
        if newer.run != state.run or newer.attempt != state.attempt:
            raise Refused(f"a run began meanwhile at {root.uri}: run the command again")
        return record(newer, name, clock_ms())

    control.update(change)
    said = f"query {name!r} is forgotten; no run is alive"
    return carried_out(root, command, said, state.attempt.id, clock_ms())


def _known(state: ControlState, manifest: Manifest | None, stage: str) -> StageId:
    if state.job != WRAPPED_JOB:
        raise UsageError(
            f"{stage!r} is a stage of job {state.job!r}: declare the job without it, and start with "
            "allow_non_restored_state=True"
        )
    if not state.attempt.ready:
        raise AttemptNotReady(
            f"a restore to checkpoint {state.attempt.checkpoint} is not finished: run "
            f"`{state.attempt.command}` again"
        )
    parts = {s.stage for s in manifest.stages} if manifest is not None else set()
    known = (parts | {s.stage for s in state.sinks if s.version is not None}) - forgotten(state)
    if stage not in known:
        raise UsageError(
            f"no query {stage!r} takes part in checkpoints of {state.job!r}: "
            f"known are {', '.join(sorted(known)) or 'none'}"
        )
    return StageId(stage)
