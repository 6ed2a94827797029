"""Requests to a running job, from `spark-abs` through `control/` or from its own process.

Each is carried out once, answered, and recorded in `history/`. A request whose run ends before it answers is
answered by the next run, see `protocol.control.begin_run`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from spark_abs.errors import UsageError
from spark_abs.model import CheckpointKind, StageId
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind, ControlState
from spark_abs.protocol.messages import Answer
from spark_abs.protocol.trigger import Request
from spark_abs.run_context import RunContext
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.history import command_row, record_event

Change = Callable[[ControlState], ControlState]


@dataclass(frozen=True, slots=True)
class Abilities:
    """The commands that a job and wrapped queries carry out differently; `UsageError` refuses one."""

    stop: Callable[[], None]
    """Begins an orderly stop."""
    drain: Callable[[str, str], None]
    """Drains for a savepoint and the id of a command; `Commands.answer` hears of it."""
    forget: Callable[[StageId], str]
    """Does without a query; returns what was done."""
    sources: Callable[[Sequence[StageId]], tuple[StageId, ...]]
    """Returns the sources that a pause names, all for none."""
    restart: Callable[[StageId, str], None]
    """Restarts a stage for the id of a command; `Commands.answer` hears of it."""
    skip: Callable[[Command], str | None]
    """Lets a stage go past files; returns what was done, or None: `Commands.answer` hears of it."""
    hold: Callable[[frozenset[StageId]], None]
    """Takes the sources that begin no batch from now on."""


class Commands:
    """Reads the commands of one run and answers them. For the coordinator's thread."""

    def __init__(
        self,
        ctx: RunContext,
        control: Control,
        can: Abilities,
        *,
        change: Callable[[Mapping[str, object]], str],
        check_name: Callable[[str | None], None],
        request: Callable[[Request], None],
        cancel: Callable[[Command], None],
    ) -> None:
        """Take the run, and what its commands do.

        Args:
            ctx: the run.
            control: its handle on `control/`.
            can: carries out the commands that differ between runs.
            change: changes settings; returns what has changed.
            check_name: refuses a savepoint name that is invalid or taken.
            request: asks for a checkpoint; `answer` hears of it.
            cancel: asks for the abort of a checkpoint; `answer` hears of it.
        """
        self._ctx = ctx
        self._control = control
        self._can = can
        self._change, self._check_name = change, check_name
        self._request, self._cancel = request, cancel
        self._seen: set[str] = set()
        self._open: dict[str, Command] = {}
        """Commands that were begun and have no answer."""
        self._own: dict[str, queue.SimpleQueue[Answer]] = {}
        """Those of them that this process asked."""

    def read(self) -> None:
        """Begin with the commands that are new.

        Raises:
            Fenced: the run was replaced.
        """
        state = self._control.state
        ledger.require_current(state, self._ctx.run)
        for command in state.commands:
            if not command.answered and command.id not in self._seen:
                self._seen.add(command.id)
                self._begin(command)

    def ask(self, command: Command, answers: queue.SimpleQueue[Answer]) -> None:
        """Begin with a command of this process, whose answer comes through the queue."""
        self._own[command.id] = answers
        self._begin(command)

    def answer(self, answer: Answer) -> None:
        """Record an answer if it is one to a command; a stop that has its savepoint begins."""
        self._settle(answer, lambda state: state)

    def _settle(self, answer: Answer, change: Change) -> None:
        """Change `control/` as a command demands and answer the command, in one commit; then record it."""
        command = self._open.pop(answer.request_id, None)
        if command is None:
            return

        def settled(state: ControlState) -> ControlState:
            return ledger.answer(change(state), answer.request_id, answer.ok, answer.id, answer.message)

        self._ctx.failpoint(f"command.{command.kind}.answer.before")
        self._control.update(settled)
        self._ctx.failpoint(f"command.{command.kind}.answer.after")
        ctx = self._ctx
        record_event(ctx.root, command_row(command, answer, now_ms(), ctx.attempt, ctx.run))
        if (waiter := self._own.pop(command.id, None)) is not None:
            waiter.put(answer)
        if command.kind is CommandKind.STOP and answer.ok and not command.drain:
            self._can.stop()  # a drain ends by itself, when sinks outside have all rows

    def _begin(self, command: Command) -> None:
        self._open[command.id] = command
        try:
            done = self._carry_out(command)
        except UsageError as error:
            self.answer(Answer(command.id, None, False, str(error)))
        else:
            if done is not None:
                self.answer(Answer(command.id, None, True, done))

    def _carry_out(self, command: Command) -> str | None:
        """Return what was done, None if the answer comes later."""
        if not isinstance(command.kind, CommandKind):
            raise UsageError(
                f"this run has a version of spark_abs that does not know the command {command.kind!r}: "
                "start the job again with the version that sent it"
            )
        match command.kind:
            case CommandKind.SET:
                return self._change(command.settings)
            case CommandKind.FORGET:
                return self._can.forget(StageId(command.name or ""))
            case CommandKind.STOP if command.name is None:
                return "stopping"
            case CommandKind.CHECKPOINT:
                self._request(Request(command.id, CheckpointKind.CHECKPOINT))
                return None
            case CommandKind.CANCEL:
                self._cancel(command)
                return None
            case CommandKind.PAUSE:
                self._pause(command)
                return None
            case CommandKind.RESUME:
                self._resume(command)
                return None
            case CommandKind.RESTART:
                self._can.restart(command.stages[0] if command.stages else StageId(""), command.id)
                return None
            case CommandKind.SKIP_FILE:
                return self._can.skip(command)
            case CommandKind.STOP | CommandKind.SAVEPOINT:
                self._save(command)
                return None
            case _:
                assert_never(command.kind)

    def _save(self, command: Command) -> None:
        exact = command.kind is CommandKind.STOP
        kind = CheckpointKind.SYNC_SAVEPOINT if exact else CheckpointKind.SAVEPOINT
        self._check_name(command.name)
        if command.drain:
            self._can.drain(command.name or "", command.id)
        else:
            self._request(Request(command.id, kind, command.name))

    def _pause(self, command: Command) -> None:
        stages, before = self._can.sources(command.stages), self._control.state.paused
        known = {paused.stage: paused for paused in before}
        each = (f"{s}, which {known[s].by} had paused before" if s in known else s for s in stages)
        said = f"paused: {'; '.join(each)}"
        self._hold_as(command, said, lambda state: ledger.pause(state, stages, command.by, now_ms()))

    def _resume(self, command: Command) -> None:
        stages = ledger.paused_of(self._control.state, command.stages)
        said = f"resumed: {', '.join(stages)}" if stages else "no source was paused"
        self._hold_as(command, said, lambda state: ledger.resume(state, stages))

    def _hold_as(self, command: Command, said: str, change: Change) -> None:
        """Change which sources are paused: first in `control/`, with the answer, then in this run."""

        def current(state: ControlState) -> ControlState:
            ledger.require_current(state, self._ctx.run)
            return change(state)

        self._settle(Answer(command.id, None, True, said), current)
        self._can.hold(frozenset(paused.stage for paused in self._control.state.paused))
