"""Requests to a running job through `control/`, as from `spark-abs`: carried out once, and answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

from spark_abs.errors import UsageError
from spark_abs.model import CheckpointKind, StageId
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.protocol.messages import Answer
from spark_abs.protocol.trigger import Request
from spark_abs.run_context import RunContext
from spark_abs.store.control import Control


@dataclass(frozen=True, slots=True)
class Abilities:
    """The commands that a job and wrapped queries carry out differently; `UsageError` refuses one."""

    stop: Callable[[], None]
    """Begins an orderly stop."""
    drain: Callable[[str, str], None]
    """Drains for a savepoint and the id of a command; `Commands.answer` hears of it."""
    forget: Callable[[StageId], str]
    """Does without a query; returns what was done."""


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
    ) -> None:
        """Take the run, and what its commands do.

        Args:
            ctx: the run.
            control: its handle on `control/`.
            can: carries out the commands that differ between runs.
            change: changes settings; returns what has changed.
            check_name: refuses a savepoint name that is invalid or taken.
            request: asks for a checkpoint; `answer` hears of it.
        """
        self._ctx = ctx
        self._control = control
        self._can = can
        self._change, self._check_name, self._request = change, check_name, request
        self._seen: set[str] = set()

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

    def answer(self, answer: Answer) -> None:
        """Record an answer if it is one to a command; a stop that has its savepoint begins."""
        if answer.request_id not in self._seen:
            return
        self._control.update(
            lambda state: ledger.answer(state, answer.request_id, answer.ok, answer.id, answer.message)
        )
        command = next((c for c in self._control.state.commands if c.id == answer.request_id), None)
        if command and command.kind is CommandKind.STOP and answer.ok and not command.drain:
            self._can.stop()  # a drain ends by itself, when sinks outside have all rows

    def _begin(self, command: Command) -> None:
        try:
            done = self._carry_out(command)
        except UsageError as error:
            self.answer(Answer(command.id, None, False, str(error)))
        else:
            if done is not None:
                self.answer(Answer(command.id, None, True, done))

    def _carry_out(self, command: Command) -> str | None:
        """Return what was done, None if the answer comes later."""
        match command.kind:
            case CommandKind.SET:
                return self._change(command.settings)
            case CommandKind.FORGET:
                return self._can.forget(StageId(command.name or ""))
            case CommandKind.STOP if command.name is None:
                return "stopping"
            case CommandKind.STOP | CommandKind.SAVEPOINT:
                exact = command.kind is CommandKind.STOP
                kind = CheckpointKind.SYNC_SAVEPOINT if exact else CheckpointKind.SAVEPOINT
                self._check_name(command.name)
                if command.drain:
                    self._can.drain(command.name or "", command.id)
                else:
                    self._request(Request(command.id, kind, command.name))
                return None
            case _:
                assert_never(command.kind)
