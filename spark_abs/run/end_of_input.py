"""The end of a bounded run: each stage ends after its inputs have ended (P10)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from spark_abs.alignment.loops import Loop, Member, has_ended
from spark_abs.channels.follow import follow
from spark_abs.model import BatchId, CheckpointId, Position, StageId
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.run.running_stage import RunningStage
from spark_abs.run_context import RunContext
from spark_abs.stages.stage import StageRunner
from spark_abs.store.control import Control

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_ENDING = CheckpointId(-1)
"""The reason for holding the stages of a loop while its end is checked."""


class EndOfInput:
    """Ends the stages that have read all their input. For one thread."""

    def __init__(self, ctx: RunContext, stages: Mapping[StageId, RunningStage], loops: Loops) -> None:
        self._ctx, self._stages, self._loops = ctx, stages, loops
        self._before: dict[StageId, BatchId] = {}
        """The newest planned batch of each stage at the first check."""
        self._processed: dict[StageId, dict[StageId, threading.Thread]] = {}
        """For each stage that may have ended: the pending questions to the stages of its loop, by stage."""
        self.loop_waits = False
        """Whether only batches with barriers kept a loop from ending at the last check."""

    def finish_stages(self) -> bool:
        """End stages whose input has ended, producers first; return whether all stages have ended."""
        self.loop_waits = False
        for name, stage in self._stages.items():
            runner, query = stage.runner, stage.query
            if stage.halted or query is None:
                continue
            self._before.setdefault(name, runner.native.newest_planned())
            if query.isActive:
                if not (self._drained(runner) if runner.reads_channels else self._rests(runner)):
                    continue
                error = stage.halt()
            else:
                error = query.exception()
            if runner.failure is None and (error is None or runner.batch_lock.refused):
                self._ctx.failpoint(f"end.{name}.before")
                runner.end()
                self._ctx.failpoint(f"end.{name}.after")
                stage.halted = True
        ended = all(stage.halted for stage in self._stages.values())
        self.loop_waits &= not ended
        return ended

    def _drained(self, runner: StageRunner) -> bool:
        """Say whether a stage has read its channels to the end, and its native sources up to their end then.

        For the head of a loop this is the end of the loop; no stage of the loop works during the check.
        """
        around, nothing_left = self._loops.around(runner), self._has_nothing_left(runner)
        self.loop_waits |= nothing_left and runner.heads_loop
        if not nothing_left or any(self._done(other) is None for other in around):
            self._processed.pop(runner.name, None)
            return False
        asked = self._processed.setdefault(runner.name, {})
        still = [self._has_processed_all(other, asked) for other in around]
        if not all(still):
            return False
        del self._processed[runner.name]
        return not runner.heads_loop or self._still_ended(runner)

    def _has_nothing_left(self, runner: StageRunner) -> bool:
        """Say whether a stage, or the loop of a head, has read all input; batches may still be running."""
        return runner.inputs_closed(runner.native.newest_committed()) and self._loops.has_ended(
            runner, lambda _: True
        )

    def _still_ended(self, head: StageRunner) -> bool:
        """Check a loop again while no stage of it can begin a batch; if it has ended, its head stays held."""
        around = self._loops.around(head)
        for runner in around:
            runner.batch_lock.block(_ENDING)
        ended = self._loops.has_ended(head, lambda other: self._done(other) is not None)
        for runner in around:
            if runner is not head or not ended:
                runner.batch_lock.unblock(_ENDING)
        return ended

    def _has_processed_all(self, runner: StageRunner, asked: dict[StageId, threading.Thread]) -> bool:
        """Ask Spark whether a query has nothing to do, in a thread, since a batch may wait for credit."""
        processing = asked.get(runner.name)
        if processing is None:
            query = self._stages[runner.name].query
            processing = threading.Thread(target=_process_all, args=(query,), daemon=True)
            asked[runner.name] = processing
            processing.start()
        return not processing.is_alive() or self._rests(runner)

    def _done(self, runner: StageRunner) -> BatchId | None:
        """Return the last batch if no batch is running, except one for timers alone."""
        idle = runner.native.idle_at()
        if idle is None and self._rests(runner):
            return runner.native.newest_committed()
        return idle

    def _rests(self, runner: StageRunner) -> bool:
        """Say whether the last batch of this run read nothing and did not advance event time.

        A query with timers of processing time has batches without end: Spark never says that it has nothing
        to do, and does not end it with `availableNow` either (`IncrementalExecution.shouldRunAnotherBatch`).
        """
        batch = runner.native.newest_committed()
        return batch > self._before.get(runner.name, batch) and runner.native.repeats(batch)


def _process_all(query: StreamingQuery | None) -> None:
    """Return when a query has nothing more to do; the next check for failures reports a failure."""
    with suppress(StreamingQueryException):
        if query is not None:
            query.processAllAvailable()


class Loops:
    """Reads logs to find the end of stages whose other inputs have ended. For the thread that ends stages."""

    def __init__(
        self, ctx: RunContext, found: Sequence[Loop], stages: Mapping[StageId, RunningStage]
    ) -> None:
        self._ctx = ctx
        self._found = found
        self._stages = stages

    def around(self, stage: StageRunner) -> tuple[StageRunner, ...]:
        """Return the stages that must be idle while `stage` ends: the stage, or the whole loop of a head."""
        loop = self._loop(stage)
        if loop is None:
            return (stage,)
        return tuple(one.runner for name, one in self._stages.items() if name in loop.stages)

    def has_ended(self, stage: StageRunner, is_idle: Callable[[StageRunner], bool]) -> bool:
        """Say whether an idle stage, whose other inputs have ended, will get no more rows.

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
