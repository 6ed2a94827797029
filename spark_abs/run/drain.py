"""Draining: event time advances to its end before the last savepoint, so that no window stays open (P21).

Sources stop reading first; then each stage follows, producers first. A stage that has read all its input gets
a batch without rows, planned with a watermark at the end of event time, and emits all rows of its state; the
stages after it read these rows. The drain is recorded in `control/` before the first of these batches, so the
next start after a kill resumes it: event time does not go back.

Processing time has no end, so a drain does not fire timers of processing time: they stay in the savepoint, as
in Flink. Rows from timers that become due during the drain are late for a stage whose event time has ended.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_abs.channels.follow import follow
from spark_abs.errors import StageFailed, UsageError
from spark_abs.model import NO_BATCH, BatchId, ChannelId, StageId, Version
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.protocol import control as ledger
from spark_abs.protocol.path import channel_path
from spark_abs.run.running_stage import RunningStage
from spark_abs.run_context import RunContext
from spark_abs.snapshots.layout import END_OF_TIME_MS, at_end_of_time, parse_offsets
from spark_abs.spark.causes import cause_of
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import plan_batch
from spark_abs.stages.stage import StageRunner
from spark_abs.store.control import Control

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A request to drain."""

    savepoint: str
    """The name of the savepoint that ends the drain."""
    request: str | None
    """The id of the request that the savepoint answers; None if the start of the run resumed the drain."""


@dataclass(slots=True)
class Drain:
    """Drains the stages of one run. `run` is for the watching thread, the rest for any."""

    ctx: RunContext
    control: Control
    graph: JobGraph
    plans: Mapping[StageId, PlanFacts]
    stages: Mapping[StageId, RunningStage]
    _asked: DrainRequest | None = None
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _pause: threading.Event = field(default_factory=threading.Event)

    @property
    def asked(self) -> DrainRequest | None:
        """The request to drain the run, None if there is none."""
        with self._asking:
            return self._asked

    def ask(self, savepoint: str, request: str | None) -> None:
        """Request a drain that ends with a savepoint; does not wait.

        Raises:
            UsageError: the job cannot be drained, or a drain was requested already.
        """
        self.check()
        with self._asking:
            asked = self._asked
            if asked is not None and (asked.savepoint != savepoint or asked.request is not None):
                raise UsageError(
                    f"the job is being drained already, with savepoint {asked.savepoint!r}; `spark-abs "
                    "status` shows when the drain has ended"
                )
            self._asked = DrainRequest(savepoint, request)

    def request(self) -> str:
        """Return the id of the request that the savepoint answers; later requests are refused.

        To be called only while a drain is requested.
        """
        with self._asking:
            assert self._asked is not None
            request = self._asked.request or uuid.uuid4().hex
            self._asked = DrainRequest(self._asked.savepoint, request)
            return request

    def check(self) -> None:
        """Refuse a job that cannot be drained.

        Raises:
            UsageError: a stage cannot be drained, or the run ends by itself; the message says which.
        """
        if self.ctx.bounded:
            raise UsageError(
                "a bounded run ends by itself and cannot be drained: start the job without available_now"
            )
        for stage in self.graph.stages:
            if stage.feedback:
                raise UsageError(
                    f"stage {stage.name!r} is the head of a loop: a drain cannot tell when the last row has "
                    "passed the loop; stop without a drain, the savepoint includes the rows in the loop"
                )
            if stage.inputs and self.plans[stage.name].sources:
                raise UsageError(
                    f"stage {stage.name!r} reads a native source beside its channels, and a drain "
                    "cannot tell when that source ends; read it in a separate stage, or stop without a drain"
                )

    def run(self, name: str, look: Callable[[], None]) -> None:
        """Record the drain, then advance event time to its end in every stage.

        Args:
            name: the savepoint that will end the run.
            look: called repeatedly; raises the error that ends the run.

        Raises:
            StageFailed: a stage failed meanwhile; the next start resumes the drain.
        """
        self.control.update(lambda state: ledger.begin_drain(state, self.ctx.run, name))
        self.ctx.failpoint("drain.record.after")
        for stage in self.graph.order():
            log.info("draining stage %s", stage.name)
            if stage.inputs:
                self._drain_behind(stage, look)
            else:
                self._drain_source(stage, look)
            self.ctx.failpoint(f"drain.{stage.name}.after")

    def _drain_source(self, stage: StageDecl, look: Callable[[], None]) -> None:
        """Let a source finish its planned batch and stop reading, then flush its state."""
        running = self.stages[stage.name]
        runner = running.runner
        self._halt(running, look)
        if self._needs_flush(stage, runner):
            self._plan_flush(stage, runner)
            running.run_only(runner.native.newest_planned(), look)

    def _drain_behind(self, stage: StageDecl, look: Callable[[], None]) -> None:
        """Wait until a stage has read all rows of the stages before it, flush it, and restart it."""
        self._read_all(stage, look)
        running = self.stages[stage.name]
        runner = running.runner  # as it is now: it may have been started again
        if not self._needs_flush(stage, runner):
            return
        self._halt(running, look)
        self._plan_flush(stage, runner)
        running.read_on()
        self._read_all(stage, look)

    def _read_all(self, stage: StageDecl, look: Callable[[], None]) -> None:
        """Wait until a stage has read all rows written by now and has finished its batch.

        The stages before have already emitted the rows of their event time. The wait ends at the present end
        of the channels, since new rows may never stop: a stage with timers of processing time has batches
        without end (`IncrementalExecution.shouldRunAnotherBatch`), and so has the stage after it if the
        timers emit rows.
        """
        running, newest = self.stages[stage.name], self._newest(stage)

        def has_read() -> bool:
            return all(p.version >= newest[p.channel] for p in running.runner.consumed())

        self._await(has_read, look)
        planned = running.runner.native.newest_planned()

        def has_ended() -> bool:
            assert running.query is not None, "stages after channels are started with the run"
            return running.query.isActive and running.runner.native.newest_committed() >= planned

        self._await(has_ended, look)

    def _newest(self, stage: StageDecl) -> Mapping[ChannelId, Version]:
        """Return the last entry with rows in each channel that a stage reads, where it stands if it has none.

        The stage may stay before barriers that it has taken without a batch.
        """
        state, ends = self.control.state, dict[ChannelId, Version]()
        for position in self.stages[stage.name].runner.consumed():
            follower = follow(self.ctx.root, position.channel, channel_path(state, position.channel))
            unread = (entry.version for entry in follower.after(position.version) if entry.files)
            last = max(unread, default=position.version)
            ends[position.channel] = max(last, ends.get(position.channel, last))
        return ends

    def _await(self, done: Callable[[], bool], look: Callable[[], None]) -> None:
        look()
        while not done():
            self._pause.wait(_POLL_S)
            look()

    def _halt(self, stage: RunningStage, look: Callable[[], None]) -> None:
        """End the query of a stage after its current batch; finish a batch that is planned.

        The outputs may hold the planned batch already, from a killed run or a failed query.
        """
        stage.read_no_more()
        if stage.query is not None:  # else a source, of a run that begins with the drain
            self._end_query(stage, stage.query, look)
        planned = stage.runner.native.newest_planned()
        if planned != stage.runner.native.newest_committed():
            stage.run_only(planned, look)

    def _end_query(self, stage: RunningStage, query: StreamingQuery, look: Callable[[], None]) -> None:
        runner = stage.runner
        runner.batch_lock.await_quiet()
        error: BaseException | None = stage.end_query(query, look)
        batch, fixed = runner.native.newest_planned(), ""
        if runner.failure is not None:
            batch, error, fixed = runner.failure.batch, runner.failure.error, runner.failure.fixed
        if error is not None:
            raise StageFailed(
                f"stage {stage.name!r} failed in batch {batch} during its drain: {cause_of(error)}{fixed}; "
                "start the job again: the start resumes the drain"
            ) from error

    def _needs_flush(self, stage: StageDecl, runner: StageRunner) -> bool:
        """Say whether a stage has event time that is not yet at its end."""
        batch = runner.native.newest_planned()
        if batch == NO_BATCH or not self.plans[stage.name].watermarks:
            return False
        return runner.native.offsets(batch).watermark_ms < END_OF_TIME_MS

    def _plan_flush(self, stage: StageDecl, runner: StageRunner) -> None:
        last = runner.native.newest_committed()
        text = at_end_of_time(runner.native.offsets_text(last))
        assert parse_offsets(text).watermark_ms == END_OF_TIME_MS
        self.ctx.failpoint(f"drain.{stage.name}.plan.before")
        plan_batch(runner.native.place, BatchId(last + 1), text)
        self.ctx.failpoint(f"drain.{stage.name}.plan.after")
