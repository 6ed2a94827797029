"""A job that is running: its handle, and the thread that watches it."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from spark_abs.errors import Fenced, Refused, StageFailed, UsageError
from spark_abs.model import AttemptId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.protocol.messages import (
    Answer,
    StatusChanged,
)
from spark_abs.protocol.trigger import JobStatus, Request
from spark_abs.runtime.context import RunContext
from spark_abs.runtime.coordination import Coordination
from spark_abs.runtime.lifetime import end, first_lines
from spark_abs.runtime.snapshotter import Snapshotter
from spark_abs.runtime.stage import StageRunner
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
        snapshots: Snapshotter,
        on_end: Callable[[], None],
    ) -> None:
        self._ctx = ctx
        self._stages = stages
        self._snapshots = snapshots
        self._on_end = on_end
        self._queries: dict[StageId, StreamingQuery] = {}
        self._ended: set[StageId] = set()
        self._stop = threading.Event()
        self._done = threading.Event()
        self._quiet = threading.Event()
        self._failure: Exception | None = None
        self._coordination: Coordination | None = None
        self._watcher = threading.Thread(target=self._watch, name=f"spark-abs-watch-{ctx.job}", daemon=True)

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
        """Return the native streaming query of a stage.

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
            Refused: it was aborted, with the reason; or `timeout` seconds went by (it may still complete).
        """
        return self._request(CheckpointKind.SAVEPOINT, name, timeout)

    def checkpoint(self, timeout: float | None = None) -> CheckpointId:
        """Take a checkpoint now and return its id; errors as `savepoint`."""
        return self._request(CheckpointKind.CHECKPOINT, None, timeout)

    def set(self, **settings: object) -> str:
        """Change settings of the running job, e.g. `run.set(interval="30s")`; returns what was changed.

        They hold from the next decision on until the run ends: the next start reads the job's own.

        Raises:
            ConfigError: one cannot be set while a job runs, or not to this; nothing was changed.
            Refused: the job is not running.
        """
        return self._answer(self._running().change(settings), None).message

    def stop(self, savepoint: str | None = None) -> CheckpointId | None:
        """Stop in order: every stage ends its batch. With a name, take an exact savepoint first.

        After an exact savepoint nothing behind its barrier has been processed. If it is aborted, the job
        goes on and the reason is raised.
        """
        taken = (
            self._request(CheckpointKind.SYNC_SAVEPOINT, savepoint, None) if savepoint is not None else None
        )
        self._stop.set()
        self._done.wait()
        self._raise_failure()
        return taken

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the job ends, at most `timeout` seconds; say whether it has.

        Raises:
            StageFailed: a stage failed; names the stage, the batch and the cause.
            Fenced: the run was replaced.
        """
        ended = self._done.wait(timeout)
        if ended:
            self._raise_failure()
        return ended

    def begin(self, queries: Mapping[StageId, StreamingQuery], coordination: Coordination) -> None:
        """Start watching; called once by whoever started the queries."""
        self._queries.update(queries)
        self._coordination = coordination
        coordination.start()
        self._watcher.start()

    def fail(self, error: Exception) -> None:
        """Stop because of an error; the first one is kept."""
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def request_stop(self) -> None:
        """Stop in order, without waiting."""
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
        raise Refused(
            f"no answer within {timeout} s; the checkpoint may still complete, see `spark-abs list`"
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        how = "stopped"
        try:
            while not self._stop.wait(_WATCH_S):
                self._look_for_failures()
                if self._ctx.bounded and self._finish_stages():
                    self._last_checkpoint()
                    how = "finished"
                    break
        except Exception as error:  # noqa: BLE001 - the thread's edge: whoever waits for the run gets it
            self.fail(error)
        try:
            self._shut_down(how)
        except Exception as error:  # noqa: BLE001 - the same
            self.fail(error)
        finally:
            self._done.set()

    def _look_for_failures(self) -> None:
        for name, query in self._queries.items():
            if name in self._ended or query.isActive:
                continue
            error = query.exception()
            failure = self._stages[name].failure
            if failure is not None and isinstance(failure.error, Fenced):
                raise failure.error
            if failure is not None:
                cause = f"{type(failure.error).__name__}: {failure.error}"
                raise StageFailed(
                    f"stage {name!r} failed in batch {failure.batch}: {cause}"
                ) from failure.error
            if error is not None:
                batch = self._stages[name].native.newest_planned()
                raise StageFailed(
                    f"stage {name!r} failed in batch {batch}: {first_lines(str(error))}"
                ) from error

    def _finish_stages(self) -> bool:
        """End stages whose input has ended (P10), producers first; say whether all have."""
        for name, query in self._queries.items():
            if name in self._ended:
                continue
            runner = self._stages[name]
            if query.isActive:
                if not (runner.reads_channels and self._drained(runner, query)):
                    continue
                self._halt(runner, query)
            if runner.failure is None and (query.exception() is None or runner.turns.refused):
                self._ctx.probe(f"end.{name}.before")
                runner.end()
                self._ctx.probe(f"end.{name}.after")
                self._ended.add(name)
        return len(self._ended) == len(self._queries)

    def _drained(self, runner: StageRunner, query: StreamingQuery) -> bool:
        """Say whether a stage has read its channels to the end, and what its native sources had by then."""
        batch = runner.native.idle_at()
        if batch is None or not runner.inputs_closed(batch):
            return False
        try:
            query.processAllAvailable()
        except StreamingQueryException:  # the next look for failures says it
            return False
        return True

    def _halt(self, runner: StageRunner, query: StreamingQuery) -> None:
        """Stop a query in order: its batch ends, one that was planned meanwhile is left to the next run."""
        runner.turns.stop()
        self._ctx.probe(f"end.{runner.name}.halt")
        while query.isActive and runner.native.idle_at() is None:
            self._quiet.wait(_WATCH_S)
        query.stop()

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
        failed = self._failure is not None
        self._coordination.put(StatusChanged(now_ms(), JobStatus.FAILED if failed else JobStatus.STOPPING))
        for name, query in self._queries.items():
            self._halt(self._stages[name], query)
        self._coordination.close()
        self._snapshots.close()
        end(self._ctx, f"failed: {self._failure}" if failed else how)
        self._on_end()
