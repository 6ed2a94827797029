"""The loops of a running job: which stages have to stand still before one of them may end (P10, P17)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from spark_abs.alignment.loops import Loop, Member, has_ended
from spark_abs.channels.follow import follow
from spark_abs.model import Position, StageId
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.run.running_stage import RunningStage
from spark_abs.run_context import RunContext
from spark_abs.stages.stage import StageRunner
from spark_abs.store.control import Control


class Loops:
    """Asked by the thread that ends stages, about those whose other inputs have ended; reads logs."""

    def __init__(
        self, ctx: RunContext, found: Sequence[Loop], stages: Mapping[StageId, RunningStage]
    ) -> None:
        self._ctx = ctx
        self._found = found
        self._stages = stages

    def around(self, stage: StageRunner) -> tuple[StageRunner, ...]:
        """Return the stages that must not work while `stage` ends: itself, of a head the whole loop."""
        loop = self._loop(stage)
        if loop is None:
            return (stage,)
        return tuple(one.runner for name, one in self._stages.items() if name in loop.stages)

    def has_ended(self, stage: StageRunner, is_idle: Callable[[StageRunner], bool]) -> bool:
        """Say whether nothing comes to an idle stage any more whose other inputs have ended.

        Certain only while no stage of `around` begins a batch.
        """
        loop = self._loop(stage)
        if loop is None:
            return True
        state = Control.open(self._ctx.root).state
        members = [self._member(runner, state, is_idle(runner)) for runner in self.around(stage)]
        return has_ended(loop, members, self._ctx.run)

    def _loop(self, stage: StageRunner) -> Loop | None:
        if not stage.heads_loop:
            return None
        return next(loop for loop in self._found if stage.name in loop.stages)

    def _member(self, stage: StageRunner, state: ControlState, idle: bool) -> Member:
        positions = stage.consumed()
        return Member(idle, positions, frozenset(p.channel for p in positions if self._holds_rows(p, state)))

    def _holds_rows(self, position: Position, state: ControlState) -> bool:
        follower = follow(self._ctx.root, position.channel, channel_path(state, position.channel))
        return any(entry.files for entry in follower.after(position.version))
