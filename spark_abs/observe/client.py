"""Talking to a running job through `control/`."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from spark_abs.advice import way
from spark_abs.errors import AbsError, CheckpointPending, Refused, UsageError
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.model import AttemptId, StageId
from spark_abs.observe.status import lease_timeout_ms, live_run
from spark_abs.protocol.control import (
    WATCHED_JOB,
    Command,
    CommandKind,
    ControlState,
    ask,
    paused_of,
    resume,
)
from spark_abs.protocol.messages import Answer
from spark_abs.settings import Settings
from spark_abs.store.control import Control
from spark_abs.store.history import command_row, record_event
from spark_abs.store.root import Root

LOOK_EVERY_S = 0.2
PATIENCE_S = 60.0
"""How long to wait for an answer that a run gives at once."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


def new_command(
    kind: CommandKind,
    now_ms: int,
    name: str | None = None,
    *,
    drain: bool = False,
    settings: Mapping[str, str] = _NOTHING,
    stages: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Command:
    """Return a new command of this user, under an id of its own."""
    return Command(
        uuid.uuid4().hex,
        kind,
        name,
        now_ms,
        drain,
        settings=dict(settings),
        stages=tuple(StageId(stage) for stage in stages),
        by=asker(),
        files=tuple(files),
    )


def asker() -> str:
    """Return the user of this process and the host, as commands and `history/` name them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def commanded(root: Root) -> Control:
    """Open `control/` for a command.

    Raises:
        Refused: it is the root of a watcher.
    """
    control = Control.open(root)
    if control.state.job == WATCHED_JOB:
        raise Refused(
            f"{root.uri} is the root of a watcher, which takes no commands: end its process to stop it"
        )
    return control


def ask_run(
    root: Root,
    command: Command,
    now_ms: Callable[[], int],
    pause: Callable[[float], None],
    timeout_s: float | None = None,
) -> Command:
    """Ask the running job and wait for its answer.

    If this call is interrupted, the job still carries the command out.

    Args:
        root: the job's root.
        command: from `new_command`; it is sent once.
        now_ms: the wall clock.
        pause: called with seconds between two looks.
        timeout_s: how long to wait for the answer; None: as long as the run is alive.

    Raises:
        Refused: no run is alive, the run ended before it answered, or it refused.
        CheckpointPending: the run has not answered in time.
    """
    control = commanded(root)
    began_ms = now_ms()
    run = _require_alive(root, control.state, began_ms, command.kind)
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
        if timeout_s is not None and now_ms() - began_ms >= timeout_s * 1000:
            raise _late(command, timeout_s, root)
        pause(LOOK_EVERY_S)
    if not found.ok:
        raise Refused(found.message or f"the job dropped the command: see `spark-abs status {root.uri}`")
    return found


def _late(command: Command, timeout_s: float, root: Root) -> AbsError:
    """Return the error of a command without an answer in time."""
    said, name = f"no answer within {timeout_s:g} s", f" {command.name!r}" if command.name else ""
    if command.kind in (CommandKind.SAVEPOINT, CommandKind.CHECKPOINT):
        return CheckpointPending(
            f"{said}: {command.kind}{name} may still complete, see `spark-abs list {root.uri}`"
        )
    return Refused(
        f"{said}: the run may still carry out {command.kind}{name}; `spark-abs status {root.uri}` shows "
        f"whether it waits, and `spark-abs history {root.uri}` its answer"
    )


def resume_sources(
    root: Root, stages: Sequence[str], now_ms: Callable[[], int], pause: Callable[[float], None]
) -> Command:
    """Let paused sources read again: through the run if one is alive, else in `control/`; return the answer.

    Args:
        root: the job's root.
        stages: the names of the sources; empty for all.
        now_ms: the wall clock.
        pause: called with seconds between two looks at the run.

    Raises:
        UsageError: a source is not paused.
        Refused: as `ask_run`, if a run is alive; or a run began meanwhile; or a watcher's root.
    """
    control = commanded(root)
    before = control.state
    command = new_command(CommandKind.RESUME, now_ms(), stages=stages)
    if is_alive(root, before, now_ms()):
        return ask_run(root, command, now_ms, pause, PATIENCE_S)
    resumed = paused_of(before, command.stages)

    def change(state: ControlState) -> ControlState:
        if state.newest_run != before.newest_run:
            raise Refused(f"a run began meanwhile at {root.uri}: run the command again")
        return resume(state, resumed)

    control.update(change)
    said = f"resumed: {', '.join(resumed)}; no run is alive" if resumed else "no source was paused"
    return carried_out(root, command, said, before.attempt.id, now_ms())


def carried_out(root: Root, command: Command, said: str, attempt: AttemptId, now_ms: int) -> Command:
    """Record in `history/` a command that was carried out while no run is alive; return its answer."""
    row = command_row(command, Answer(command.id, None, True, said), now_ms, attempt, None)
    record_event(root, row)
    return replace(command, answered=True, ok=True, message=said)


def stop_run(
    root: Root,
    savepoint: str | None,
    drain: bool,
    now_ms: Callable[[], int],
    pause: Callable[[float], None],
) -> tuple[Command, str]:
    """Stop the running job gracefully, and wait for its end; return its answer, and how it ended.

    Raises:
        UsageError: the name of the savepoint is not valid, or a drain is asked for without a savepoint.
        Refused: as `ask_run`; or the run was killed or failed before it had stopped.
    """
    if savepoint is not None:
        check_savepoint_name(savepoint)
    elif drain:
        raise UsageError(f"a drain ends with a savepoint: give {way('savepoint=NAME', '--savepoint NAME')}")
    answer = ask_run(root, new_command(CommandKind.STOP, now_ms(), savepoint, drain=drain), now_ms, pause)
    how = _wait_for_end(root, now_ms, pause)
    if how is None:
        raise Refused("the job was killed before it had stopped gracefully")
    if how.startswith("failed"):
        raise Refused(f"the job {how}")
    return answer, how


def set_live(
    root: Root, given: Mapping[str, str], now_ms: Callable[[], int], pause: Callable[[float], None]
) -> Command:
    """Change settings of the running job; `given` maps names of arguments to values as text.

    Raises:
        ConfigError: a setting cannot be changed while a job runs, or not to this value. Nothing was sent.
        Refused: as `ask_run`.
    """
    Settings.resolve(None, os.environ, {}, {}).changed(given)
    return ask_run(root, new_command(CommandKind.SET, now_ms(), settings=given), now_ms, pause)


def _wait_for_end(root: Root, now_ms: Callable[[], int], pause: Callable[[float], None]) -> str | None:
    """Wait for the end of the newest run, and return how it ended; None if it died."""
    control = Control.open(root)
    run = control.state.run
    while run is not None and not ended(root, control, run.id, now_ms()):
        pause(LOOK_EVERY_S)
    return next((r.ended for r in control.state.runs if run is not None and r.id == run.id), None)


def ended(root: Root, control: Control, run: int, now_ms: int) -> bool:
    """Say whether a run has ended, died or was replaced."""
    newest = control.state.run
    if newest is None or newest.id != run or newest.ended is not None:
        return True
    return live_run(root, now_ms, lease_timeout_ms()) is None


def is_alive(root: Root, state: ControlState, now_ms: int) -> bool:
    """Say whether the newest run has recorded no end, and a lease holds."""
    begun = state.run is not None and state.run.ended is None
    return begun and live_run(root, now_ms, lease_timeout_ms()) is not None


def how_ended(state: ControlState, run: int) -> str:
    """Return how a run ended, as the rest of a sentence that begins with `run N`."""
    how = next((r.ended for r in state.runs if r.id == run), None)
    return "died" if how is None else f"ended ({how})"


def _require_alive(root: Root, state: ControlState, now_ms: int, kind: CommandKind | str) -> int:
    if state.run is None or not is_alive(root, state, now_ms):
        last = ": it was never started"
        if state.run is not None:
            last = f": run {state.run.id} {how_ended(state, state.run.id)}"
        then = "" if kind is CommandKind.STOP else "; start the job first"
        raise Refused(f"no run of job {state.job!r} is alive{last}{then}")
    if not state.attempt.ready:
        raise Refused(
            f"job {state.job!r} is being restored: wait for the end of the restore, then start the job"
        )
    return state.run.id
