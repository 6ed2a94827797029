"""A job that is running: its handle, and the thread that watches it."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.checkpointing.sending import Senders
from spark_abs.errors import AbsError, CheckpointPending, Refused, SinkUnreachable, UsageError
from spark_abs.model import AttemptId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.protocol.loops import Loop
from spark_abs.protocol.messages import (
    Answer,
    StatusChanged,
)
from spark_abs.protocol.trigger import JobStatus, Request
from spark_abs.run.drain import Drain
from spark_abs.run.end_of_input import EndOfInput, halt
from spark_abs.run.loops import Loops
from spark_abs.run.process_end import Guest, attend
from spark_abs.run.recovery import Recovery, StageEnd
from spark_abs.run.registration import end
from spark_abs.run.signals import SignalledStop
from spark_abs.settings import LiveSettings
from spark_abs.stages.causes import one_line
from spark_abs.stages.context import RunContext
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.stages.stage import StageRunner
from spark_abs.store.clock import now_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_WATCH_S = 0.1


class Run:
    """A running job. Safe to use from any thread."""

    def __init__(
        self,
        ctx: RunContext,
        stages: Mapping[StageId, StageRunner],
        loops: Sequence[Loop],
        snapshots: Snapshotter,
        recovery: Recovery,
        drain: Drain,
        senders: Senders,
        on_end: Callable[[], None],
    ) -> None:
        self._ctx = ctx
        self._stages = stages
        self._recovery = recovery
        self._drain = drain
        self._senders = senders
        self._drain_asked: tuple[str, str | None] | None = None
        """The savepoint that a drain ends with, and the id of the request for it."""
        self._last_savepoint: CheckpointId | None = None
        self._asking = threading.Lock()
        self._end = EndOfInput(ctx, stages, Loops(ctx, loops, stages))
        self._snapshots = snapshots
        self._on_end = on_end
        self._queries: dict[StageId, StreamingQuery] = {}
        self._stop = threading.Event()
        self._done = threading.Event()
        self._failure: Exception | None = None
        self._said = ""
        """What the coordinator was last told of stages that fail."""
        self._coordination: Coordination | None = None
        self._signals = SignalledStop(ctx.job, ctx.settings.stop_timeout_ms, self._stop_for_signal)
        self._watcher = threading.Thread(target=self._watch, name=f"spark-abs-watch-{ctx.job}", daemon=True)

    def __repr__(self) -> str:
        how = "active" if self.is_active else "ended" if self._failure is None else "failed"
        return f"Run({self.id} of job {self._ctx.job!r}, attempt {self.attempt}, {how})"

    @property
    def id(self) -> RunId:
        """The number of this run."""
        return self._ctx.run

    @property
    def attempt(self) -> AttemptId:
        """The attempt that it runs."""
        return self._ctx.attempt

    @property
    def is_active(self) -> bool:
        """Whether the job still runs."""
        return not self._done.is_set()

    def query(self, stage: str) -> StreamingQuery:
        """Return the native streaming query of a stage; another one once the stage was started again.

        Raises:
            UsageError: the job has no such stage.
        """
        try:
            return self._queries[StageId(stage)]
        except KeyError:
            raise UsageError(f"no stage {stage!r}: the job has {', '.join(self._queries)}") from None

    def savepoint(self, name: str, timeout: float | None = None) -> CheckpointId:
        """Take a savepoint and return its id.

        Raises:
            UsageError: the name is no name, or taken.
            Refused: it was aborted, with the reason.
            CheckpointPending: `timeout` seconds went by; it may still complete.
        """
        return self._request(CheckpointKind.SAVEPOINT, name, timeout)

    def checkpoint(self, timeout: float | None = None) -> CheckpointId:
        """Take a checkpoint now and return its id; errors as `savepoint`."""
        return self._request(CheckpointKind.CHECKPOINT, None, timeout)

    def set(self, **settings: Unpack[LiveSettings]) -> str:
        """Change settings of the running job, e.g. `run.set(interval="30s")`; returns what was changed.

        They hold from the next decision on until the run ends: the next start reads the job's own.

        Raises:
            ConfigError: one cannot be set while a job runs, or not to this; nothing was changed.
            Refused: the job is not running.
        """
        return self._answer(self._running().change(settings), None).message

    def stop(self, savepoint: str | None = None, drain: bool = False) -> CheckpointId | None:
        """Stop in order: every stage ends its batch. With a name, take an exact savepoint first.

        After an exact savepoint nothing behind its barrier has been processed. If it is aborted, the job
        goes on and the reason is raised.

        With `drain`, sources read no more and event time is brought to its end before the savepoint: every
        window is let out. Rows that come to a drained job later are late, so its savepoint is not for going
        on with the same event time. What has begun to be drained goes on with that when it is started again,
        whatever happens to this run; a restore to an earlier checkpoint undoes it.

        Raises:
            UsageError: the job cannot be drained, or no savepoint was named.
        """
        if drain:
            return self._stop_drained(savepoint)
        taken = (
            self._request(CheckpointKind.SYNC_SAVEPOINT, savepoint, None) if savepoint is not None else None
        )
        self._stop.set()
        self._done.wait()
        self._raise_failure()
        return taken

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the job ends, at most `timeout` seconds; say whether it has.

        In the main thread of a script, SIGTERM and Ctrl-C stop the job in order meanwhile, unless the script
        has a handler of its own. A second one, or `spark.abs.run.stopTimeout`, ends the process at once, with
        128 and the signal's number as exit code. With `spark.abs.run.stopSavepoint` a savepoint is taken
        first, if that takes no more than six tenths of the time: its name is that and the run's number.

        Raises:
            StageFailed: a stage failed; names the stage, the batch and the cause.
            Fenced: the run was replaced.
        """
        ended = self._signals.wait(self._done, timeout)
        if ended:
            self._raise_failure()
        return ended

    def begin(self, queries: dict[StageId, StreamingQuery], coordination: Coordination) -> None:
        """Start watching; called once by whoever started the queries, who replaces those started again."""
        self._queries = queries
        self._coordination = coordination
        self._senders.start(self.fail)
        coordination.start()
        self._watcher.start()
        settings = self._ctx.settings
        attend(Guest(self._ctx.job, self.request_stop, self._done, settings.stop_timeout_ms / 1000))

    def fail(self, error: Exception) -> None:
        """Stop because of an error; the first one is kept."""
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def request_drain(self, name: str, request: str | None) -> None:
        """Drain the job, take the savepoint `name` for a request, and stop; without waiting.

        Raises:
            UsageError: the job cannot be drained, or is, with another savepoint.
        """
        self._drain.check()
        with self._asking:
            asked = self._drain_asked
            if asked is not None and asked[0] != name:
                raise UsageError(f"the job is being drained already, with savepoint {asked[0]!r}")
            if asked is None or asked[1] is None:
                self._drain_asked = (name, request)

    def request_stop(self) -> None:
        """Stop in order, without waiting."""
        self._stop.set()

    def _stop_for_signal(self) -> None:
        settings = self._ctx.settings
        if settings.stop_savepoint:
            name, patience_s = f"{settings.stop_savepoint}-{self.id}", settings.stop_timeout_ms / 1000 * 0.6
            try:
                self._request(CheckpointKind.SYNC_SAVEPOINT, name, patience_s)
            except AbsError as error:
                log.warning("job %s stops without savepoint %r: %s", self._ctx.job, name, error)
        self._stop.set()

    def _request(self, kind: CheckpointKind, name: str | None, timeout: float | None) -> CheckpointId:
        coordination = self._running()
        if kind is not CheckpointKind.CHECKPOINT:
            coordination.check_name(name)
        answer = self._answer(coordination.request(Request(uuid.uuid4().hex, kind, name)), timeout)
        if not answer.ok or answer.id is None:
            raise Refused(f"{kind.value} {name or ''} was not taken: {answer.message}")
        return answer.id

    def _running(self) -> Coordination:
        if self._coordination is None or self._done.is_set():
            raise Refused("the job is not running")
        return self._coordination

    def _answer(self, answers: queue.SimpleQueue[Answer], timeout: float | None) -> Answer:
        until = None if timeout is None else time.monotonic() + timeout
        while until is None or time.monotonic() < until:
            try:
                return answers.get(timeout=_WATCH_S)
            except queue.Empty:
                if self._done.is_set():
                    self._raise_failure()
                    raise Refused("the job ended first") from None
        raise CheckpointPending(
            f"no answer within {timeout} s: the checkpoint may still complete, see `spark-abs list`"
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        how = "stopped"
        try:
            while not self._stop.wait(_WATCH_S):
                self._look()
                if self._drain_asked is not None:
                    how = self._run_drain(self._drain_asked[0])
                    break
                if self._ctx.bounded and self._end.finish_stages(self._queries):
                    self._last_checkpoint()
                    how = "finished"
                    break
            else:
                self._look_for_failures()  # of the last moment: a stop does not hide them
                if self._recovery.failing:
                    how = f"stopped, while {self._recovery.failing}"
        except Exception as error:  # noqa: BLE001 - the thread's edge: whoever waits for the run gets it
            self.fail(error)
        try:
            self._shut_down(how)
        except Exception as error:  # noqa: BLE001 - the same
            self.fail(error)
        finally:
            self._done.set()

    def _stop_drained(self, savepoint: str | None) -> CheckpointId | None:
        if savepoint is None:
            raise UsageError("a drain ends with a savepoint: give it a name")
        self._running().check_name(savepoint)
        self.request_drain(savepoint, uuid.uuid4().hex)
        self._done.wait()
        self._raise_failure()
        return self._last_savepoint

    def _run_drain(self, name: str) -> str:
        """Drain all stages and take the savepoint; no other checkpoint is taken meanwhile."""
        assert self._coordination is not None
        self._coordination.put(StatusChanged(now_ms(), JobStatus.STOPPING))
        self._drain.run(name, self._look_while_draining)
        with self._asking:
            request = (self._drain_asked or (name, None))[1] or uuid.uuid4().hex
        answers = self._coordination.request(Request(request, CheckpointKind.SYNC_SAVEPOINT, name))
        while True:
            try:
                answer = answers.get(timeout=_WATCH_S)
                break
            except queue.Empty:
                self._raise_failure()
                self._look()
        if not answer.ok:
            raise Refused(
                f"savepoint {name!r} of the drained job was not taken: {answer.message}; start the job "
                "again, it goes on with it"
            )
        self._last_savepoint = answer.id
        return f"drained, with savepoint {name!r}"

    def _look_while_draining(self) -> None:
        self._raise_failure()
        if self._stop.is_set():
            raise Refused("stopped while it was being drained: the next start goes on with the drain")
        self._look()

    def _look(self) -> None:
        """Look for stages that have failed, and start those again whose time has come."""
        self._look_for_failures()
        if self._recovery.failing != self._said:
            self._say_failing()
        self._recovery.start_due()

    def _say_failing(self) -> None:
        """Let whoever asks something of the job hear what fails."""
        assert self._coordination is not None
        self._said = self._recovery.failing
        status = JobStatus.RUNNING if self._drain_asked is None else JobStatus.STOPPING
        self._coordination.put(StatusChanged(now_ms(), status, self._said))

    def _look_for_failures(self) -> None:
        passed_over = self._end.ended | self._drain.halted
        for name, query in self._queries.items():
            if name in passed_over or query.isActive or self._recovery.waits(name):
                continue
            error = query.exception()
            failure = self._stages[name].failure
            if failure is not None:
                self._recovery.take(StageEnd(name, failure.batch, failure.error))
            elif error is not None:
                self._recovery.take(StageEnd(name, self._stages[name].native.newest_planned(), error))

    def _last_checkpoint(self) -> None:
        assert self._coordination is not None
        answers = self._coordination.request(Request("end-of-input", CheckpointKind.CHECKPOINT))
        while not self._stop.is_set():
            try:
                answer = answers.get(timeout=_WATCH_S)
            except queue.Empty:
                continue
            if not answer.ok:
                log.warning("no checkpoint at the end of input: %s", answer.message)
            return

    def _shut_down(self, how: str) -> None:
        assert self._coordination is not None
        status = JobStatus.STOPPING if self._failure is None else JobStatus.FAILED
        why = self._said if self._failure is None else one_line(str(self._failure))
        self._coordination.put(StatusChanged(now_ms(), status, why))
        for runner in self._stages.values():
            runner.batch_lock.refuse()
        log.info("job %s is stopping%s", self._ctx.job, self._under_way())
        for name, query in self._queries.items():
            halt(self._ctx, self._stages[name], query)
        self._coordination.close()
        self._snapshots.close()
        self._end_sending()
        end(self._ctx, how if self._failure is None else self._failure)
        ended = how if self._failure is None else f"failed: {why}"
        log.info("job %s: run %s has ended: %s", self._ctx.job, self.id, ended)
        self._on_end()

    def _end_sending(self) -> None:
        """Send what checkpoints are behind; what cannot be sent now goes out with the next start."""
        patience_s = self._ctx.settings.stop_timeout_ms / 1000 if self._failure is None else 1.0
        left = "; ".join(self._senders.close(patience_s))
        if left and self._failure is None:
            log.warning(
                "job %s ends before all was sent: %s; the next start goes on with it", self._ctx.job, left
            )
            if self._ctx.bounded:
                self.fail(SinkUnreachable(f"not all was sent: {left}; start the job again, it goes on"))

    def _under_way(self) -> str:
        """Say which batches a stop waits for."""
        logs = {name: self._stages[name].native for name, query in self._queries.items() if query.isActive}
        busy = [f"{name} (batch {n.newest_planned()})" for name, n in logs.items() if n.idle_at() is None]
        return f": it waits for {', '.join(busy)}" if busy else ""
