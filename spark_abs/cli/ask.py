"""Talking to a running job through `control/`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from spark_abs.cli.verb import Context
from spark_abs.errors import Refused
from spark_abs.observe.alive import lease_timeout_ms, live_run
from spark_abs.protocol.control import Command, CommandKind, ControlState, ask
from spark_abs.store.control import Control
from spark_abs.store.root import Root

LOOK_EVERY_S = 0.2


def ask_job(
    ctx: Context,
    root: Root,
    kind: CommandKind,
    name: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    drain: bool = False,
) -> Command:
    """Ask the running job and wait for its answer.

    Interrupted here, the command stays: the job answers it all the same.

    Raises:
        Refused: no run is alive, it ended before it answered, or its answer is no.
    """
    control = Control.open(root)
    run = _require_alive(ctx, root, control.state)
    command = Command(uuid.uuid4().hex, kind, name, ctx.now_ms(), drain, settings=dict(settings))
    control.update(lambda state: ask(state, command))
    while True:
        # Looked at in this order: an answer given just before the end is still seen.
        gone = ended(ctx, root, control, run)
        found = next(
            (c for c in control.state.commands if c.id == command.id), replace(command, answered=True)
        )
        if found.answered:
            break
        if gone:
            raise Refused(f"run {run} ended before it answered: see `spark-abs history {root.uri}`")
        ctx.pause(LOOK_EVERY_S)
    if not found.ok:
        raise Refused(found.message or f"the job dropped the command: see `spark-abs status {root.uri}`")
    return found


def wait_for_end(ctx: Context, root: Root) -> None:
    """Return when the newest run has ended."""
    control = Control.open(root)
    run = control.state.run
    while run is not None and not ended(ctx, root, control, run.id):
        ctx.pause(LOOK_EVERY_S)


def ended(ctx: Context, root: Root, control: Control, run: int) -> bool:
    """Say whether a run has ended, died or was replaced."""
    newest = control.state.run
    if newest is None or newest.id != run or newest.ended is not None:
        return True
    return live_run(root, ctx.now_ms(), lease_timeout_ms()) is None


def _require_alive(ctx: Context, root: Root, state: ControlState) -> int:
    live = live_run(root, ctx.now_ms(), lease_timeout_ms())
    if live is None or state.run is None or state.run.ended is not None:
        last = f": run {state.run.id} {state.run.ended or 'died'}" if state.run else ": it was never started"
        raise Refused(f"no run of job {state.job!r} is alive{last}; start it first")
    if not state.attempt.ready:
        raise Refused(f"job {state.job!r} is being restored: wait for the end of it, then start it")
    return state.run.id
