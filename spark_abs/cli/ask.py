"""Talking to a running job, as verbs do."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType

from spark_abs.cli.verb import Context
from spark_abs.observe.asking import LOOK_EVERY_S, ask_run, ended
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.store.control import Control
from spark_abs.store.root import Root


def ask_job(
    ctx: Context,
    root: Root,
    kind: CommandKind,
    name: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    drain: bool = False,
) -> Command:
    """Ask the running job and wait for its answer; errors as `ask_run`."""
    command = Command(uuid.uuid4().hex, kind, name, ctx.now_ms(), drain, settings=dict(settings))
    return ask_run(root, command, ctx.now_ms, ctx.pause)


def wait_for_end(ctx: Context, root: Root) -> str:
    """Return when the newest run has ended, and how."""
    control = Control.open(root)
    run = control.state.run
    while run is not None and not ended(root, control, run.id, ctx.now_ms()):
        ctx.pause(LOOK_EVERY_S)
    last = next((r for r in control.state.runs if run is not None and r.id == run.id), None)
    return "killed" if last is None or last.ended is None else last.ended
