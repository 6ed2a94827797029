"""Talking to a running job through `control/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spark_abs.errors import Refused
from spark_abs.observe.alive import lease_timeout_ms, live_run
from spark_abs.protocol.control import Command, ControlState, ask
from spark_abs.store.control import Control
from spark_abs.store.root import Root

LOOK_EVERY_S = 0.2


def ask_run(
    root: Root, command: Command, now_ms: Callable[[], int], pause: Callable[[float], None]
) -> Command:
    """Ask the running job and wait for its answer.

    Interrupted here, the command stays: the job answers it all the same.

    Args:
        root: the job's root.
        command: what to ask; its id is new.
        now_ms: the wall clock.
        pause: called with seconds between two looks.

    Raises:
        Refused: no run is alive, it ended before it answered, or its answer is no.
    """
    control = Control.open(root)
    run = _require_alive(root, control.state, now_ms())
    control.update(lambda state: ask(state, command))
    while True:
        # Looked at in this order: an answer given just before the end is still seen.
        gone = ended(root, control, run, now_ms())
        found = next(
            (c for c in control.state.commands if c.id == command.id), replace(command, answered=True)
        )
        if found.answered:
            break
        if gone:
            raise Refused(f"run {run} {how_ended(control.state, run)} before it answered")
        pause(LOOK_EVERY_S)
    if not found.ok:
        raise Refused(found.message or f"the job dropped the command: see `spark-abs status {root.uri}`")
    return found


def ended(root: Root, control: Control, run: int, now_ms: int) -> bool:
    """Say whether a run has ended, died or was replaced."""
    newest = control.state.run
    if newest is None or newest.id != run or newest.ended is not None:
        return True
    return live_run(root, now_ms, lease_timeout_ms()) is None


def how_ended(state: ControlState, run: int) -> str:
    """Say how a run ended, as the rest of a sentence that begins with it."""
    how = next((r.ended for r in state.runs if r.id == run), None)
    return "died" if how is None else f"ended ({how})"


def _require_alive(root: Root, state: ControlState, now_ms: int) -> int:
    live = live_run(root, now_ms, lease_timeout_ms())
    if live is None or state.run is None or state.run.ended is not None:
        last = ": it was never started"
        if state.run is not None:
            last = f": run {state.run.id} {how_ended(state, state.run.id)}"
        raise Refused(f"no run of job {state.job!r} is alive{last}; start it first")
    if not state.attempt.ready:
        raise Refused(f"job {state.job!r} is being restored: wait for the end of it, then start it")
    return state.run.id
