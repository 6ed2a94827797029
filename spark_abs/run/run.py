"""A running job: its handle, and the thread that watches it."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Unpack

from spark_abs.alignment.loops import Loop
from spark_abs.checkpointing.coordination import Coordination
from spark_abs.errors import (
    AbsError,
    CheckpointPending,
    CheckpointsFailed,
    ConfigError,
    Refused,
    SinkUnreachable,
    StageFailed,
    UsageError,
)
from spark_abs.manifest import StageShape
from spark_abs.markup import paragraph
from spark_abs.model import AttemptId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.observe.client import new_command
from spark_abs.observe.tally import Tally
from spark_abs.protocol.control import CommandKind
from spark_abs.protocol.messages import Answer
from spark_abs.protocol.trigger import Request, RunStatus
from spark_abs.report.face import root_face
from spark_abs.report.following import Face, follow
from spark_abs.run.asked_restarts import AskedRestarts
from spark_abs.run.drain import Drain
from spark_abs.run.end_of_input import EndOfInput, Loops
from spark_abs.run.lifecycle import Lifecycle, Termination, end_all
from spark_abs.run.nothing_new import nothing_since
from spark_abs.run.process_end import Guest, attend
from spark_abs.run.recovery import Recovery, StageEnd
from spark_abs.run.running_stage import RunningStage
from spark_abs.run.signals import SignalledStop
from spark_abs.run_context import RunContext
from spark_abs.settings_keywords import LiveSettings
from spark_abs.sinks.sending.senders import Senders
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.store.clock import now_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_WATCH_S = 0.1
_ASKED = {
    CheckpointKind.CHECKPOINT: CommandKind.CHECKPOINT,
    CheckpointKind.SAVEPOINT: CommandKind.SAVEPOINT,
}
"""The commands that ask for a checkpoint of these kinds, and for nothing else."""


class Run:
    """A running job. Safe to use from any thread."""

    def __init__(
        self,
        ctx: RunContext,
        termination: Termination,
        *,
        stages: Mapping[StageId, RunningStage],
        loops: Sequence[Loop],
        coordination: Coordination,
        snapshots: Snapshotter,
        recovery: Recovery,
        drain: Drain,
        restarts: AskedRestarts,
        senders: Senders,
        shapes: tuple[StageShape, ...],
        on_end: Callable[[], None],
    ) -> None:
        self._ctx = ctx
        self._termination = termination
        self._stages = stages
        self._coordination, self._snapshots = coordination, snapshots
        self._shapes = shapes
        self._recovery = recovery
        self._drain, self._restarts = drain, restarts
        self._senders = senders
        self._last_savepoint: CheckpointId | None = None
        self._end = EndOfInput(ctx, stages, Loops(ctx, loops, stages))
        self._signals = SignalledStop(ctx.job, ctx.settings.stop_timeout_ms, self._stop_for_signal)
        self._lifecycle = Lifecycle(
            ctx,
            f"job {ctx.job}",
            termination,
            coordination,
            snapshots,
            watch=self._watch,
            stop_queries=self._stop_queries,
            finish=self._end_sending,
            on_end=on_end,
        )

    def __repr__(self) -> str:
        failed = self._termination.failure is not None
        how = "active" if self.is_active else "failed" if failed else "ended"
        return f"Run({self.id} of job {self._ctx.job!r}, attempt {self.attempt}, {how})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + root_face(self._ctx.root, now_ms())

    def follow(self) -> None:
        """Show the run in a notebook, below the cell that runs now, as it is from then on until its end.

        Nothing is shown outside a notebook, nor in one that cannot change what it has shown. The run does
        not wait for it.
        """
        root, tally = self._ctx.root, Tally(self._ctx.root)

        def face() -> Face:
            return Face(repr(self), paragraph(repr(self)) + root_face(root, now_ms(), tally))

        follow(face, self._termination.over)

    @property
    def id(self) -> RunId:
        """The number of this run."""
        return self._ctx.run

    @property
    def attempt(self) -> AttemptId:
        """The attempt of the run."""
        return self._ctx.attempt

    @property
    def is_active(self) -> bool:
        """Whether the job still runs."""
        return not self._termination.over.is_set()

    def query(self, stage: str) -> StreamingQuery:
        """Return the native streaming query of a stage. A restart of the stage replaces it.

        Raises:
            UsageError: the job has no such stage.
        """
        queries = self._queries()
        try:
            return queries[StageId(stage)]
        except KeyError:
            raise UsageError(f"no stage {stage!r}: the job has {', '.join(queries)}") from None

    def savepoint(self, name: str, timeout: float | None = None) -> CheckpointId:
        """Take a savepoint and return its id.

        Raises:
            UsageError: the name is not valid or is in use.
            Refused: the savepoint was aborted; the message has the reason.
            CheckpointPending: no answer within `timeout` seconds; the savepoint may still complete.
        """
        return self._request(CheckpointKind.SAVEPOINT, name, timeout)

    def checkpoint(self, timeout: float | None = None) -> CheckpointId:
        """Take a checkpoint now and return its id; errors as `savepoint`."""
        return self._request(CheckpointKind.CHECKPOINT, None, timeout)

    def cancel(self, checkpoint: str | int) -> str:
        """Abort an open checkpoint, given by its id or the name of a savepoint; return what happened.

        Raises:
            Refused: it is not open, was completed first, or the job is not running.
        """
        return self._ask(CommandKind.CANCEL, str(checkpoint))

    def pause(self, *stages: str) -> str:
        """Let sources begin no further batch, all sources if none is named; return what happened.

        A batch under way ends. Checkpoints go on. The pause holds until `resume`, over restarts, too.

        Raises:
            Refused: a name is that of no source, a source cannot be paused, or the job is not running.
        """
        return self._ask(CommandKind.PAUSE, stages=stages)

    def resume(self, *stages: str) -> str:
        """Let paused sources read again, all of them if none is named; return what happened.

        Raises:
            Refused: a source is not paused, or the job is not running.
        """
        return self._ask(CommandKind.RESUME, stages=stages)

    def restart(self, stage: str) -> str:
        """Start a stage again when its batch has ended, while the others run on; return what happened.

        A stage that has failed and waits for its restart is started at once.

        Raises:
            Refused: the job has no such stage or is not running, or the stage could not be started.
        """
        return self._ask(CommandKind.RESTART, stages=[stage])

    def skip_file(self, stage: str, *files: str) -> str:
        """Let a stage go past input files that fail its batch, by starting it again without them.

        The files stay skipped, over restarts and restores. Returns what happened.

        Raises:
            Refused: the job has no such stage or is not running, a file is none of the stage's unfinished
                batch, an output already has rows of the batch, or the stage could not be started.
        """
        return self._ask(CommandKind.SKIP_FILE, stages=[stage], files=files)

    def set(self, **settings: Unpack[LiveSettings]) -> str:
        """Change settings of the running job, e.g. `run.set(interval="30s")`, and return the changes.

        They hold from the next decision until the run ends: the next start uses the declared settings.

        Raises:
            ConfigError: a setting cannot be changed while a job runs, or the value is not valid; nothing was
                changed.
            Refused: the job is not running.
        """
        answer = self._answer(self._running().change(settings), None)
        if not answer.ok:
            raise ConfigError(answer.message)
        return answer.message

    def stop(self, savepoint: str | None = None, drain: bool = False) -> CheckpointId | None:
        """Stop gracefully: each stage ends its batch. With a name, take an exact savepoint first.

        When an exact savepoint is complete, nothing after its barrier has been processed. If it is aborted,
        the job continues and the reason is raised.

        With `drain`, sources stop reading and event time is brought to its end before the savepoint, so that
        every window is emitted. Later rows of a drained job are late, so do not resume from its savepoint
        with the same event time. The next start resumes an unfinished drain; a restore to an earlier
        checkpoint undoes it.

        Raises:
            UsageError: the job cannot be drained, or no savepoint was named.
        """
        if drain:
            return self._stop_drained(savepoint)
        taken = (
            self._request(CheckpointKind.SYNC_SAVEPOINT, savepoint, None) if savepoint is not None else None
        )
        self._termination.request()
        self._termination.over.wait()
        self._termination.raise_failure()
        return taken

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the job ends, at most `timeout` seconds; return whether it has ended.

        In the main thread of a script, SIGTERM and Ctrl-C stop the job gracefully meanwhile, unless the
        script has a handler of its own. A second one, or `spark.abs.run.stopTimeout`, ends the process at
        once, with 128 and the signal's number as exit code. With `spark.abs.run.stopSavepoint` a savepoint is
        taken first, if that takes no more than six tenths of the time. Its name is the setting, a hyphen and
        the run's number.

        Raises:
            StageFailed: a stage failed; the message names the stage, the batch and the cause.
            Fenced: the run was replaced.
        """
        ended = self._signals.wait(self._termination.over, timeout)
        if ended:
            self._termination.raise_failure()
        return ended

    def begin(self) -> None:
        """Start watching; called once, after the queries have been started."""
        termination, patience_s = self._termination, self._ctx.settings.stop_timeout_ms / 1000
        self._senders.start(termination.fail)
        self._coordination.start()
        self._lifecycle.start()
        attend(Guest(self._ctx.job, self.request_stop, termination.over, patience_s))

    def request_stop(self) -> None:
        """Stop gracefully, without waiting."""
        self._termination.request()

    def _queries(self) -> dict[StageId, StreamingQuery]:
        """Return the present queries of the stages that were started."""
        return {name: stage.query for name, stage in self._stages.items() if stage.query is not None}

    def _stop_for_signal(self) -> None:
        settings = self._ctx.settings
        if settings.stop_savepoint:
            name, patience_s = f"{settings.stop_savepoint}-{self.id}", settings.stop_timeout_ms / 1000 * 0.6
            try:
                self._request(CheckpointKind.SYNC_SAVEPOINT, name, patience_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, the stop that was asked for goes on
                log.warning("job %s stops without savepoint %r: %s", self._ctx.job, name, error)
        self._termination.request()

    def _request(self, kind: CheckpointKind, name: str | None, timeout: float | None) -> CheckpointId:
        coordination = self._running()
        if kind is not CheckpointKind.CHECKPOINT:
            coordination.check_name(name)
        command = _ASKED.get(kind)
        if command is None:
            answers = coordination.request(Request(uuid.uuid4().hex, kind, name))
        else:
            answers = coordination.ask(new_command(command, now_ms(), name))
        answer = self._answer(answers, timeout)
        if not answer.ok or answer.id is None:
            raise Refused(f"{kind.value} {name or ''} was not taken: {answer.message}")
        return answer.id

    def _ask(
        self,
        kind: CommandKind,
        name: str | None = None,
        *,
        stages: Sequence[str] = (),
        files: Sequence[str] = (),
    ) -> str:
        command = new_command(kind, now_ms(), name, stages=stages, files=files)
        answer = self._answer(self._running().ask(command), None)
        if not answer.ok:
            raise Refused(answer.message)
        return answer.message

    def _running(self) -> Coordination:
        if not self.is_active:
            raise Refused("the job is not running")
        return self._coordination

    def _answer(self, answers: queue.SimpleQueue[Answer], timeout: float | None) -> Answer:
        until = None if timeout is None else time.monotonic() + timeout
        while until is None or time.monotonic() < until:
            try:
                return answers.get(timeout=_WATCH_S)
            except queue.Empty:
                if not self.is_active:
                    self._termination.raise_failure()
                    raise Refused("the job ended before it answered the request") from None
        raise CheckpointPending(
            f"no answer within {timeout} s: the checkpoint may still complete, see `spark-abs list`"
        )

    def _watch(self) -> str:
        """Wait until the run must end; return the kind of end."""
        while not self._termination.await_request(_WATCH_S):
            self._look()
            drain = self._drain.asked
            if drain is not None and not self._restarts.pending:
                return self._run_drain(drain.savepoint)
            if self._ctx.bounded and self._end.finish_stages():
                self._report()
                self._last_checkpoint()
                self._await_sent()
                return "finished"
        self._look_for_failures()  # of the last moment: a stop does not hide them
        failing = self._recovery.failing
        return f"stopped, while {failing}" if failing else "stopped"

    def _stop_drained(self, savepoint: str | None) -> CheckpointId | None:
        if savepoint is None:
            raise UsageError("a drain ends with a savepoint: give it a name")
        self._running().check_name(savepoint)
        self._drain.ask(savepoint, uuid.uuid4().hex)
        self._termination.over.wait()
        self._termination.raise_failure()
        return self._last_savepoint

    def _run_drain(self, name: str) -> str:
        """Drain all stages and take the savepoint; no other checkpoint is taken meanwhile."""
        self._report()
        self._drain.run(name, self._look_while_draining)
        request = Request(self._drain.request(), CheckpointKind.SYNC_SAVEPOINT, name)
        answers = self._coordination.request(request)
        while True:
            try:
                answer = answers.get(timeout=_WATCH_S)
                break
            except queue.Empty:
                self._termination.raise_failure()
                self._look()
        if not answer.ok:
            raise Refused(
                f"savepoint {name!r} of the drained job was not taken: {answer.message}; start the job "
                "again: the start resumes the drain"
            )
        self._last_savepoint = answer.id
        self._await_sent()
        return f"drained, with savepoint {name!r}"

    def _look_while_draining(self) -> None:
        self._termination.raise_failure()
        if self._termination.requested:
            raise Refused("stopped during the drain: the next start resumes the drain")
        self._look()

    def _look(self) -> None:
        """Find failed stages, and restart those whose delay is over."""
        self._look_for_failures()
        self._report()
        self._recovery.start_due()
        self._restarts.look(self._recovery, self._coordination)

    def _report(self) -> None:
        status = RunStatus.ENDING if self._end.loop_waits else RunStatus.RUNNING
        if self._drain.asked is not None:
            status = RunStatus.STOPPING
        self._lifecycle.report(status, self._recovery.failing)

    def _look_for_failures(self) -> None:
        for name, query in self._queries().items():
            stage = self._stages[name]
            if stage.halted or query.isActive or self._recovery.waits(name):
                continue
            error = query.exception()
            failure = stage.runner.failure
            if failure is not None:
                self._recovery.take(StageEnd(name, failure.batch, failure.error, failure.fixed))
            elif error is not None:
                self._recovery.take(StageEnd(name, stage.runner.native.newest_planned(), error))
            elif stage.runner.reads_channels or not self._ctx.bounded:  # no source that has come to its end
                raise StageFailed(
                    f"the query of stage {name!r} was stopped from outside the job; no data is lost. Start "
                    "the job again, and end jobs with stop() or `spark-abs stop ROOT`"
                )

    def _last_checkpoint(self) -> None:
        known = nothing_since(self._ctx, self._shapes, self._stages)
        if known is not None:
            log.info("job %s: no new data since checkpoint %s", self._ctx.job, known)
            self._snapshots.tidy()
            return
        answers = self._coordination.request(Request("end-of-input", CheckpointKind.CHECKPOINT))
        while not self._termination.requested:
            try:
                answer = answers.get(timeout=_WATCH_S)
            except queue.Empty:
                continue
            if not answer.ok:
                log.warning("no checkpoint at the end of input: %s", answer.message)
                if self._senders.need_checkpoints and not self._termination.requested:
                    raise CheckpointsFailed(
                        f"no checkpoint at the end of input: {answer.message}; sinks outside lack the rows "
                        "after the newest checkpoint: start the job again, the new run sends them"
                    )
            return

    def _await_sent(self) -> None:
        """Wait until all reachable sinks outside have all rows, or until a stop.

        Meanwhile the coordinator takes no checkpoint and renews the lease. The sinks are first told of the
        newest checkpoint: its manifest may become readable before the coordinator has told them.
        """
        self._lifecycle.report(RunStatus.STOPPING, "")
        told = self._coordination.handled()
        while not told.wait(_WATCH_S) and not self._termination.requested:
            pass
        patience_s = self._ctx.settings.stop_timeout_ms / 1000
        while self._senders.sending(patience_s) and not self._termination.await_request(_WATCH_S):
            pass

    def _stop_queries(self) -> None:
        for stage in self._stages.values():
            stage.runner.batch_lock.refuse()
        with suppress(AbsError, OSError):  # a log that cannot be read is no reason to leave a query running
            log.info("job %s is stopping%s", self._ctx.job, self._under_way())
        end_all(stage.halt for stage in self._stages.values())

    def _end_sending(self) -> None:
        """Send the rows of completed checkpoints. The next start sends the remaining ones."""
        in_order, stopped = self._termination.failure is None, self._termination.requested
        # A run that has ended by itself has waited already.
        patience_s = self._ctx.settings.stop_timeout_ms / 1000 if in_order and stopped else 1.0
        left = "; ".join(self._senders.close(patience_s))
        if left and in_order:
            log.warning("job %s ends with unsent rows: %s; the next start sends them", self._ctx.job, left)
            if self._ctx.bounded:
                said = f"rows were not sent: {left}; start the job again, the new run sends them"
                self._termination.fail(SinkUnreachable(said))

    def _under_way(self) -> str:
        """Return the batches for which a stop waits, as text."""
        logs = {n: self._stages[n].runner.native for n, query in self._queries().items() if query.isActive}
        busy = [f"{name} (batch {n.newest_planned()})" for name, n in logs.items() if n.idle_at() is None]
        return f": it waits for {', '.join(busy)}" if busy else ""
