"""Checkpoints for queries that stay the user's own: a wrapped batch function and a checkpoint location.

A wrapped query is a stage with native inputs and a function as its only sink. The first batch of the first
query at a root begins a run; the run ends when no query of it is left.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.config import Settings
from spark_abs.errors import AttemptNotReady, GraphError, UsageError
from spark_abs.manifest import StageShape
from spark_abs.model import MAIN_OUTPUT, BatchId, CheckpointMode, StageId, Version, checked_name
from spark_abs.protocol.messages import (
    StatusChanged,
)
from spark_abs.protocol.trigger import JobStatus
from spark_abs.runtime.consumers import Consumers
from spark_abs.runtime.coordination import Coordination
from spark_abs.runtime.credit import Credit
from spark_abs.runtime.job import BatchFunction, Job, Output, SinkSpec, StageSpec
from spark_abs.runtime.jvm import active_query, refuse_unsupported_session
from spark_abs.runtime.lifetime import begin, end, refuse_second
from spark_abs.runtime.native import NativeLog, clear_unplanned
from spark_abs.runtime.outputs import Outputs
from spark_abs.runtime.snapshotter import Listener, Snapshotter, StageFacts
from spark_abs.runtime.stage import StageRunner
from spark_abs.runtime.tidy import Tidy
from spark_abs.session import check_session
from spark_abs.snapshots.adopt import adopt_native
from spark_abs.snapshots.kept import KeptState
from spark_abs.store.checkpoints import Checkpoints
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage, location_of
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

WRAPPED_JOB = "queries"
"""The job name of a root that wrapped queries share."""
_WATCH_S = 0.5


def checkpoint_location(root: str, stage: str, *, adopt: str | None = None, **settings: object) -> str:
    """Return the checkpoint location for a wrapped query: that of the root's current attempt.

    Ask for it at every start of the query: after a restore it is another directory.

    Args:
        root: where checkpoints are kept; created if there is none.
        stage: the query's uid.
        adopt: a checkpoint location that the query has used so far. It is copied the first time and left
            alone; the query goes on where it was. The query must have stopped.
        settings: of the area `storage`, by their short names.

    Raises:
        AttemptNotReady: a restore was begun and not finished.
        Refused: the root belongs to a job.
        DamageError: what should be adopted is not a checkpoint that a query can start from.
    """
    at, name = Root(root, Storage.given(arguments=settings)), StageId(checked_name(stage, "stage"))
    attempt = Control.create(at, WRAPPED_JOB, now_ms()).state.attempt
    if not attempt.ready:
        raise AttemptNotReady(
            f"a restore to checkpoint {attempt.checkpoint} is not finished: run `{attempt.command}` again"
        )
    native = at.native(attempt.natives, attempt.id, attempt.directory(name))
    if adopt is not None:
        adopt_native(at.storage.place(adopt), native)
    lease = read_lease(at)
    if lease is None or not lease.alive(now_ms(), _silence_ms()):
        clear_unplanned(native)
    return native.uri


def _silence_ms() -> int:
    return _resolved({}, {}).lease_timeout_ms


def _resolved(spark_conf: Mapping[str, str], settings: Mapping[str, object]) -> Settings:
    resolved = Settings.resolve(None, os.environ, spark_conf, settings)
    if resolved.native_root:
        raise UsageError("native_root is for jobs: Spark is given the checkpoint location of a wrapped query")
    if resolved.mode is not CheckpointMode.ALIGNED or resolved.aligned_timeout_ms is not None:
        raise UsageError(
            "mode and aligned_timeout are for jobs: nothing lies between wrapped queries, so that no barrier "
            "waits and no data is in flight; leave them out"
        )
    return resolved


def foreach_batch(
    function: BatchFunction, *, root: str, stage: str, tables: Sequence[str] = (), **settings: object
) -> BatchFunction:
    """Wrap the function of `foreachBatch`, so that the query takes part in checkpoints.

    The function is called as Spark calls it; inside, `spark_abs.current()` knows the attempt. It must make
    its writes idempotent as with Spark alone, under `current().app_id`: a batch that is repeated after a
    roll back has an old number and a new app id.

    Args:
        function: `fn(batch_frame, batch_id)`.
        root: as for `checkpoint_location`.
        stage: as for `checkpoint_location`.
        tables: Delta tables that the function writes and a roll back restores. Others stay as they are.
        settings: any setting by its short name, for example `interval="10s"`; those of a root's first
            query count.
    """
    wrapped = _Wrapped(
        function,
        Root(root, Storage.of(_resolved({}, settings))),
        StageId(checked_name(stage, "stage")),
        tuple(location_of(t) for t in tables),
        settings,
    )
    return wrapped.run_batch


class _Wrapped:
    """The batch function that Spark calls."""

    def __init__(
        self,
        function: BatchFunction,
        root: Root,
        stage: StageId,
        tables: tuple[str, ...],
        settings: dict[str, object],
    ) -> None:
        self.function, self.root, self.stage, self.tables, self.settings = (
            function,
            root,
            stage,
            tables,
            settings,
        )
        self._joined: tuple[_Host, StageRunner] | None = None

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Join the root's run with the first batch, then run the batch as a stage does."""
        if self._joined is None or not self._joined[0].alive:
            host = _host_of(self, frame.sparkSession)
            self._joined = (host, host.join(self, BatchId(batch_id)))
        host, runner = self._joined
        host.raise_failure()
        runner.run_batch(frame, batch_id)


_hosts: dict[str, _Host] = {}
_hosts_lock = threading.Lock()


def _host_of(wrapped: _Wrapped, spark: SparkSession) -> _Host:
    """Return the run of a root in this process, begun if there is none."""
    with _hosts_lock:
        host = _hosts.get(wrapped.root.uri)
        if host is None or not host.alive:
            host = _hosts[wrapped.root.uri] = _Host(wrapped.root, spark, wrapped.settings)
        return host


@dataclass(frozen=True, slots=True)
class _Guest:
    """A query that takes part."""

    runner: StageRunner
    query: str
    """Spark's id of it."""
    reads: frozenset[str]
    """Ids of the Delta tables that it reads."""
    tables: tuple[str, ...]


class _Host:
    """The run that the wrapped queries of one root share. Batch threads come in; it has two of its own."""

    def __init__(self, root: Root, spark: SparkSession, settings: dict[str, object]) -> None:
        check_session(spark)
        refuse_unsupported_session(spark)
        resolved = _resolved(dict(spark.conf.getAll), settings)
        job = Job(WRAPPED_JOB, root=root.uri, spark=spark)
        job.root = root  # knows the storage that the queries gave
        control = Control.create(root, job.name, now_ms())
        refuse_second(job, False, resolved)
        self._job, self._spark = job, spark
        self._ctx = begin(job, control, resolved, takeover=False, bounded=False)
        manifests = Checkpoints.open(root, job.name).load_all()
        kept = KeptState.open(root, job.name, self._ctx.run, manifests)
        self._facts: dict[StageId, StageFacts] = {}
        self._guests: dict[StageId, _Guest] = {}
        self._snapshots = Snapshotter(self._ctx, kept, self._facts, Tidy(self._ctx, {}, kept))
        self._coordination = Coordination(
            self._ctx, {}, self._shapes, self._snapshots, self._ask_to_stop, _refuse_drain, self._fail
        )
        self._snapshots.report_to(Listener(self._coordination.put, self._wake, self._fail))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self.alive = True
        self._coordination.start()

    def join(self, wrapped: _Wrapped, batch: BatchId) -> StageRunner:
        """Add a query with its first batch of this run.

        Raises:
            UsageError: the query does not use the checkpoint location of the current attempt.
            GraphError: it reads a table that another query of the root writes, or the other way round.
        """
        ctx, stage = self._ctx, wrapped.stage
        native = NativeLog(ctx.native(stage))
        if native.newest_planned() != batch:
            raise UsageError(
                f"query {stage!r} does not run on spark_abs.checkpoint_location(root, {stage!r}) of attempt "
                f"{ctx.attempt}: ask for it at every start of the query"
            )
        guest = _Guest(self._runner(wrapped), native.query_id(), native.tables_read(batch), wrapped.tables)
        with self._lock:
            for name, other in self._guests.items():
                if name != stage:
                    _refuse_chain(ctx.root, stage, guest, name, other)
                    _refuse_chain(ctx.root, name, other, stage, guest)
            self._guests[stage] = guest
            self._facts[stage] = StageFacts({}, lambda: 0)
            first = len(self._guests) == 1
        self._coordination.join(guest.runner)
        if first:
            threading.Thread(target=self._watch, name=f"spark-abs-watch-{ctx.root.uri}", daemon=True).start()
        return guest.runner

    def raise_failure(self) -> None:
        """Raise what ended the run, in the batch thread that comes next."""
        if self._failure is not None:
            raise self._failure

    def _runner(self, wrapped: _Wrapped) -> StageRunner:
        source = Output(self._job, wrapped.stage, MAIN_OUTPUT)
        sink = SinkSpec(wrapped.stage, source, None, wrapped.function)
        spec = StageSpec(wrapped.stage, (), lambda only: only, {}, "append", None, None, None)
        outputs = Outputs(self._ctx, spec, (), {}, [sink], wrapped.tables)
        credit = Credit(self._ctx, (), Consumers(self._ctx, {}), Version(0), 0)
        return StageRunner(self._ctx, wrapped.stage, outputs, (), self._snapshots, credit)

    def _shapes(self) -> tuple[StageShape, ...]:
        with self._lock:
            return tuple(StageShape(s, (), {}, {}, {s: MAIN_OUTPUT}) for s in sorted(self._guests))

    def _wake(self, stage: StageId) -> None:
        self._guests[stage].runner.turns.wake()

    def _ask_to_stop(self) -> None:
        self._stop.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _active(self) -> bool:
        return any(active_query(self._spark, g.query) is not None for g in list(self._guests.values()))

    def _watch(self) -> None:
        """Wait until no query is left or somebody asks to stop; then end the run."""
        while self._active() and not self._stop.wait(_WATCH_S):
            pass
        failed = self._failure is not None
        self._coordination.put(StatusChanged(now_ms(), JobStatus.FAILED if failed else JobStatus.STOPPING))
        for guest in list(self._guests.values()):
            guest.runner.turns.stop()
            query = active_query(self._spark, guest.query)
            if query is not None:
                query.stop()
        self.alive = False
        self._coordination.close()
        self._snapshots.close()
        end(self._ctx, f"failed: {self._failure}" if failed else "stopped")


def _refuse_drain(_savepoint: str, _request: str) -> None:
    raise UsageError("wrapped queries are started and stopped by their owner: stop without --drain")


def _refuse_chain(root: Root, reader: StageId, reading: _Guest, writer: StageId, writing: _Guest) -> None:
    for uri in writing.tables:
        try:
            table = Table.open(root.storage.place(uri))
        except FileNotFoundError:
            continue
        if table.id in reading.reads:
            raise GraphError(
                f"query {reader!r} reads {uri}, which query {writer!r} of the same root writes: without "
                "barriers between them no checkpoint of both is consistent; declare both as stages of a Job"
            )
