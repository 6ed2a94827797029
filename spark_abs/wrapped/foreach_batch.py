"""Checkpoints for queries that users start themselves, with a wrapped batch function.

A wrapped query is a stage with native inputs and a function as its only sink. The first batch of the first
query at a root begins a run; the run ends with its last query. The others join with their first batch, or,
if they are part of the newest checkpoint, as soon as they run; until then such a query takes part as
`DormantStage`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakValueDictionary

from spark_abs.catalog.target import TableTarget
from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.checkpointing.commands import Abilities
from spark_abs.checkpointing.coordination import Coordination, Events
from spark_abs.compatibility.inspection import refuse_wrapped
from spark_abs.errors import AbsError, StageStopped, UsageError
from spark_abs.logs import speak
from spark_abs.manifest import StageShape, StageSnapshot
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import MAIN_OUTPUT, NO_BATCH, BatchId, StageId, Version, checked_name
from spark_abs.plan.specs import BatchFunction, JobSpec, Output, SinkSpec, StageSpec
from spark_abs.plan.tables import refuse_around_root
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import WRAPPED_JOB, Command, ControlState, forget, forgotten, remember
from spark_abs.run.lifecycle import Lifecycle, Termination, end_all
from spark_abs.run.registration import begin, end, refuse_second
from spark_abs.settings import session_settings
from spark_abs.settings_keywords import JobSettings
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.table_edges import misaligned
from spark_abs.spark.driver import hush, sleep_until_stopped
from spark_abs.spark.plans import (
    active_query,
    checkpoint_of,
    feeds_read,
    refuse_unsupported_session,
    session_of,
)
from spark_abs.spark.session import check_session
from spark_abs.stages.chain import Chain, Link
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.credit import Credit
from spark_abs.stages.dormant import DormantStage
from spark_abs.stages.native import NativeLog
from spark_abs.stages.outputs import Outputs
from spark_abs.stages.snapshotter import Snapshotter, StageFacts
from spark_abs.stages.stage import StageRunner
from spark_abs.stages.watched import WatchedTables
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage
from spark_abs.wrapped.location import wrapped_settings
from spark_abs.wrapped.tables import (
    Declared,
    Uses,
    attached,
    came,
    declare,
    find,
    find_again,
    read_apart,
    refuse_older,
    refuse_others,
    refuse_together,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_WATCH_S = 0.5
_STOPPING = "the run at this root is stopping its queries; start the query again when it has ended"


def foreach_batch(
    function: BatchFunction,
    *,
    root: str,
    stage: str,
    tables: Sequence[str] = (),
    **settings: Unpack[JobSettings],
) -> BatchFunction:
    """Wrap the function of `foreachBatch`, so that the query takes part in checkpoints.

    Spark calls the function as before; inside, `spark_abs.current()` has the attempt. The function must make
    its writes idempotent as with Spark alone, under `current().app_id`: a batch that is repeated after a
    restore has its old number and a new app id. A constant `txnAppId` will do for tables that can be written
    without Delta's own writer: a restore sets it back with the rows.

    Args:
        function: `fn(batch_frame, batch_id)`.
        root: as for `checkpoint_location`.
        stage: as for `checkpoint_location`.
        tables: Delta tables that the function writes and a restore brings back, each by its path, URI or
            name in a catalog; all must be there after the function's first batch. A restore leaves other
            tables as they are.
        settings: any setting by its short name, for example `interval="10s"`. The settings of the query that
            begins the run hold for the whole run.

    Raises:
        UsageError: `spark-abs check` runs this script.
    """
    refuse_wrapped()
    at = Root(root, Storage.of(wrapped_settings({}, settings)))
    declared = declare(tables, at.storage)
    wrapped = _Wrapped(function, at, StageId(checked_name(stage, "stage")), declared, settings)
    _wrapped[at.uri, wrapped.stage] = wrapped
    return wrapped.run_batch


class _Wrapped:
    """A wrapped query: its batch function, which Spark calls, and its declaration."""

    def __init__(
        self,
        function: BatchFunction,
        root: Root,
        stage: StageId,
        tables: tuple[Declared, ...],
        settings: JobSettings,
    ) -> None:
        self.function, self.root, self.stage, self.tables, self.settings = (
            function,
            root,
            stage,
            tables,
            settings,
        )
        self._joining = threading.Lock()
        self._joined: tuple[_Host, StageRunner] | None = None

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Join the root's run with the first batch, then run the batch as a stage does."""
        with self._joining:
            if not self._takes_part():
                self._joined = self._join(frame.sparkSession, BatchId(batch_id))
            assert self._joined is not None
            host, runner = self._joined
        host.raise_failure()
        runner.run_batch(frame, batch_id)

    def join_idle(self, host: _Host, session: SparkSession, batch: BatchId) -> None:
        """Join a run after the query's last batch, unless its next batch does that; in the host's thread.

        Raises:
            AbsError: as `_Host.join`.
        """
        if not self._joining.acquire(blocking=False):
            return
        try:
            if not self._takes_part() and (runner := host.join(self, session, batch)) is not None:
                self._joined = host, runner
        finally:
            self._joining.release()

    def _takes_part(self) -> bool:
        return self._joined is not None and self._joined[0].has(self._joined[1])

    def _join(self, session: SparkSession, batch: BatchId) -> tuple[_Host, StageRunner]:
        """Join the root's run; wait for the end of a run that no query was left in, and begin the next."""
        while True:
            host = _host_of(self, session)
            try:
                runner = host.join(self, session, batch)
            finally:
                host.watch()
            if runner is not None:
                return host, runner
            host.await_end()


_wrapped: WeakValueDictionary[tuple[str, StageId], _Wrapped] = WeakValueDictionary()
"""The newest query of each root and name, while Spark has its function."""
_hosts: dict[str, _Host] = {}
"""The run of each root in this process."""
_begins: dict[str, threading.Lock] = {}
"""Held while the run of a root begins; one stays for each root."""


def _host_of(wrapped: _Wrapped, spark: SparkSession) -> _Host:
    """Return the run of a root in this process; begin one if there is none."""
    uri = wrapped.root.uri
    with _begins.setdefault(uri, threading.Lock()):
        host = _hosts.get(uri)
        if host is None or not host.alive:
            host = _hosts[uri] = _Host(wrapped.root, spark, wrapped.settings)
        return host


@dataclass(frozen=True, slots=True)
class _Guest:
    """A query that takes part."""

    runner: StageRunner
    query: str
    """Spark's id of it."""
    uses: Uses


class _Host:
    """The run that the wrapped queries of one root share. Batch threads come in; it has two of its own."""

    def __init__(self, root: Root, spark: SparkSession, settings: JobSettings) -> None:
        check_session(spark, "a wrapped query")
        speak(spark)
        hush(spark)
        refuse_unsupported_session(spark)
        resolved = wrapped_settings(session_settings(spark), settings)
        job = JobSpec(
            WRAPPED_JOB,
            root,
            spark=spark,
            settings=resolved,
            failpoint=no_failpoint,
            stages={},
            feedbacks=(),
            sinks=(),
        )
        control = Control.create(root, job.name, now_ms(), resolved.require_root)
        newest = refuse_second(job, control, takeover=False)
        self._job, self._spark = job, spark
        self._ctx = begin(job, control, newest, takeover=False, bounded=False)
        try:
            self._assemble()
        except BaseException as error:
            end(self._ctx, error)
            raise

    def _assemble(self) -> None:
        root, job = self._ctx.root, self._job
        log.info("queries at %s: run %s begins", root.uri, self._ctx.run)
        kept = StateStorage.open(root, job.name, self._ctx.run, Checkpoints.open(root, job.name).load_all())
        self._termination, self._events = Termination(), Events()
        self._guests: dict[StageId, _Guest] = {}
        self._chain = Chain(root.storage)
        self._refused: dict[StageId, _Wrapped] = {}
        """Queries that run, and could not join between two batches."""
        self._dormant = {part.stage: self._sleeper(part) for part in self._recorded()}
        fail = self._termination.fail
        cleaner = CheckpointCleaner(self._ctx, {}, kept)
        self._snapshots = Snapshotter(self._ctx, kept, cleaner, self._events.put, fail)
        self._coordination = Coordination(
            self._ctx,
            self._events,
            stages=self._dormant,
            shapes=self._shapes,
            snapshots=self._snapshots,
            can=Abilities(
                self._termination.request,
                _refuse_drain,
                self._forget,
                sources=_refuse_pause,
                hold=lambda _: None,
                restart=_refuse_restart,
                skip=_refuse_skip,
            ),
            on_failure=fail,
            misfit=lambda manifest: misaligned(manifest.stages, root.storage),
        )
        self._lifecycle = Lifecycle(
            self._ctx,
            f"queries at {root.uri}",
            self._termination,
            self._coordination,
            self._snapshots,
            watch=self._watch,
            stop_queries=self._stop_queries,
            on_end=self._drop,
        )
        self._lock = threading.Lock()
        self._watched = False
        self._left = False
        """No query is left: the run ends by itself."""
        self._stopping = False
        """The run ends, and stops its queries."""
        self._coordination.start()

    @property
    def alive(self) -> bool:
        return not self._termination.over.is_set()

    def _drop(self) -> None:
        """Let the process forget the run, before `alive` is false: until then none takes its place."""
        _hosts.pop(self._ctx.root.uri, None)

    def await_end(self) -> None:
        self._termination.over.wait()

    def join(self, wrapped: _Wrapped, session: SparkSession, batch: BatchId) -> StageRunner | None:
        """Add a query, in place of its recorded part, with its first batch of this run or between batches.

        Args:
            wrapped: the query.
            session: its session.
            batch: the newest batch that it has planned.

        Returns:
            Its runner; None if the run is ending because no query was left.

        Raises:
            UsageError: the query does not use the checkpoint location of the current attempt, or a text names
                no table.
            Refused: the name of a table leads to another table than before, or a table is older than its
                newest checkpoint.
            GraphError: it cannot share the root with another query: see `refuse_together`.
            StageStopped: the run is stopping its queries.
        """
        ctx, stage, storage = self._ctx, wrapped.stage, self._ctx.root.storage
        native = NativeLog(ctx.native(stage))
        if native.newest_planned() != batch:
            raise UsageError(
                f"query {stage!r} does not run on spark_abs.checkpoint_location(root, {stage!r}) of attempt "
                f"{ctx.attempt}: call that function at every start of the query"
            )
        tables, control = find(session, storage, wrapped.tables), Control.open(ctx.root)
        refuse_around_root((table.uri for table in tables), ctx.root)
        state = control.state
        newest = Checkpoints.open(ctx.root, ctx.job).newest_on(state.attempt)
        refuse_others(stage, tables, state, newest, storage)
        refuse_older(newest, stage, state, storage)
        uses = Uses(stage, native.tables_read(batch), tuple(table.uri for table in tables))
        guest = _Guest(self._runner(wrapped, session, tables), native.query_id(), uses)
        guest.runner.find_query = partial(active_query, self._spark, guest.query)
        query = guest.runner.find_query()
        feeds = feeds_read(query) if query is not None else ()
        guest.runner.batch_lock.is_stopped = partial(_is_stopped, guest)
        with self._lock:
            if self._left:
                return None
            if self._stopping:
                raise StageStopped(_STOPPING)
            parts = (Uses.of_part(d.part) for d in self._dormant.values())
            refuse_together(uses, [*(g.uses for g in self._guests.values()), *parts], storage)
            found = attached(stage, tables, control.state, storage)
            control.update(lambda state: remember(ledger.attach(state, found), stage))
            self._guests[stage] = guest
            self._dormant.pop(stage, None)
            runs = partial(self._is_active, guest)
            self._chain.put(Link(stage, uses.reads, uses.tables, feeds, runs=runs))
            self._warn_of_others(uses)  # after it was added: of two that come at once one sees the other
            facts = StageFacts({}, lambda: 0, feeds=feeds)
            self._snapshots.register(stage, facts, guest.runner.batch_lock.wake)
            welcomed = self._coordination.join(guest.runner)
        if not self._coordination.await_done(welcomed):
            self.raise_failure()
            raise StageStopped(_STOPPING)
        return guest.runner

    def _warn_of_others(self, uses: Uses) -> None:
        """Log which queries of other roots in this process read a table of a query, or write one it reads."""
        root = self._ctx.root
        for host in [h for h in list(_hosts.values()) if h is not self and h.alive]:
            for other in [guest.uses for guest in list(host._guests.values())]:
                with suppress(AbsError, OSError):  # a store that does not answer holds up no query
                    for said in (*read_apart(uses, other, host._ctx.root), *read_apart(other, uses, root)):
                        log.warning(said)

    def watch(self) -> None:
        """Begin to watch for the end of the last query; called after every join, refused ones included."""
        with self._lock:
            if not self._watched:
                self._watched = True
                self._lifecycle.start()

    def has(self, runner: StageRunner) -> bool:
        """Say whether a runner takes part in this run."""
        guest = self._guests.get(runner.name)
        return self.alive and guest is not None and guest.runner is runner

    def _recorded(self) -> tuple[StageSnapshot, ...]:
        state = Control.open(self._ctx.root).state
        ledger.require_current(state, self._ctx.run)
        return recorded_parts(Checkpoints.open(self._ctx.root, self._ctx.job), state)

    def _sleeper(self, part: StageSnapshot) -> DormantStage:
        said = "query %s does not run: new checkpoints contain its part of checkpoint %s until it starts"
        log.info(said, part.stage, part.carried)
        uses = Uses.of_part(part)
        self._chain.put(Link(part.stage, uses.reads, uses.tables, part=part))
        return DormantStage(part, self._events.put)

    def raise_failure(self) -> None:
        """Raise the error that ended the run, in the thread of the next batch."""
        self._termination.raise_failure()

    def _runner(self, wrapped: _Wrapped, session: SparkSession, tables: Sequence[TableTarget]) -> StageRunner:
        source, storage = Output(self._job, wrapped.stage, MAIN_OUTPUT), self._ctx.root.storage
        sink = SinkSpec(wrapped.stage, source, None, wrapped.function)
        spec = StageSpec(
            wrapped.stage,
            (),
            function=lambda only: only,
            outputs={},
            output_mode="append",
            trigger=None,
            shuffle_partitions=None,
            state_provider=None,
        )
        again, made = partial(find_again, session, storage), partial(self._made, wrapped.stage)
        watched = WatchedTables(wrapped.stage, tables, storage, again, made)
        outputs = Outputs(self._ctx, spec, channels=(), tables={}, sinks=[sink], watched=watched)
        credit = Credit(self._ctx, (), Consumers(self._ctx, {}), Version(0), 0)
        runner = StageRunner(
            self._ctx,
            wrapped.stage,
            outputs=outputs,
            start=(),
            snapshots=self._snapshots,
            credit=credit,
            chain=self._chain,
        )
        runner.batch_lock.await_stop = partial(sleep_until_stopped, self._spark)
        return runner

    def _made(self, stage: StageId, target: TableTarget) -> None:
        """Record a table that a function has made, in its batch thread."""
        found = came(stage, target, self._ctx.attempt, self._ctx.root.storage)
        Control.open(self._ctx.root).update(lambda state: ledger.attach(state, [found]))

    def _shapes(self) -> tuple[StageShape, ...]:
        with self._lock:
            names = sorted(self._guests.keys() | self._dormant.keys())
        return tuple(StageShape(s, (), {}, {}, {s: MAIN_OUTPUT}) for s in names)

    def _forget(self, stage: StageId) -> str:
        """Leave a query that does not run out of checkpoints; called in the coordination's thread.

        Raises:
            UsageError: it runs.
        """
        with self._lock:
            guest = self._guests.get(stage)
            if guest is not None and self._is_active(guest):
                raise UsageError(f"query {stage!r} runs: stop it first, and do not start it again")

            def change(state: ledger.ControlState) -> ledger.ControlState:
                ledger.require_current(state, self._ctx.run)
                return forget(state, stage, now_ms())

            Control.open(self._ctx.root).update(change)
            self._guests.pop(stage, None)
            self._dormant.pop(stage, None)
            self._chain.leave(stage)
            self._coordination.leave(stage)
        return f"query {stage!r} is forgotten"

    def _goes_on(self) -> bool:
        """Say whether a query is left; if not, none will join any more."""
        with self._lock:
            self._left = not any(self._is_active(guest) for guest in self._guests.values())
            return not self._left

    def _is_active(self, guest: _Guest) -> bool:
        return active_query(self._spark, guest.query) is not None

    def _put_to_sleep(self) -> None:
        """Replace queries that ended within a batch, and so cannot make a cut, by their recorded parts."""
        with self._lock:
            for stage, guest in list(self._guests.items()):
                if self._is_active(guest) or guest.runner.native.idle_at() is not None:
                    continue
                del self._guests[stage]
                part = next((part for part in self._recorded() if part.stage == stage), None)
                if part is None:
                    self._chain.leave(stage)
                    self._coordination.leave(stage)
                else:
                    self._dormant[stage] = self._sleeper(part)
                    self._coordination.join(self._dormant[stage])

    def _wake(self) -> None:
        """Let queries join that have been started and wait for rows: their first batch may be far off."""
        with self._lock:
            asleep = list(self._dormant)
        for stage in asleep:
            wrapped = _wrapped.get((self._ctx.root.uri, stage))
            if wrapped is None or wrapped is self._refused.get(stage):
                continue
            with suppress(AbsError, OSError):  # it is looked at again
                self._wake_one(wrapped)

    def _wake_one(self, wrapped: _Wrapped) -> None:
        native = NativeLog(self._ctx.native(wrapped.stage))
        query = active_query(self._spark, native.query_id())
        batch = native.idle_at() if query is not None and self._runs_on(query, native) else None
        if batch is None or batch == NO_BATCH:
            return
        try:
            wrapped.join_idle(self, session_of(self._spark, query), batch)
        except AbsError as error:
            if native.idle_at() == batch:  # it joins with its next batch, which fails for the same reason
                self._refused[wrapped.stage] = wrapped
                log.warning("query %s cannot take part in checkpoints: %s", wrapped.stage, error)

    def _runs_on(self, query: Any, native: NativeLog) -> bool:
        """Say whether a query runs on the native checkpoint of this attempt; False until it is known."""
        location = checkpoint_of(query)
        return bool(location) and self._ctx.root.storage.place(location).uri == native.place.uri

    def _watch(self) -> str:
        """Wait until no query is left or a stop is requested."""
        while self._goes_on() and not self._termination.await_request(_WATCH_S):
            self._put_to_sleep()
            self._wake()
        return "stopped"

    def _stop_queries(self) -> None:
        with self._lock:
            if self._left:
                return  # a query that has started since waits for the end of this run
            self._stopping = True
        end_all(partial(self._stop_query, guest) for guest in list(self._guests.values()))

    def _stop_query(self, guest: _Guest) -> None:
        guest.runner.batch_lock.stop()
        query = active_query(self._spark, guest.query)
        if query is not None:
            query.stop()


def _is_stopped(guest: _Guest) -> bool:
    """Say whether the owner of a query has stopped it; it may still be in a batch."""
    query = guest.runner.find_query()
    return query is None or not query.isActive()


def _refuse_drain(_savepoint: str, _request: str) -> None:
    raise UsageError("wrapped queries are started and stopped by their owner: stop without a drain")


def _refuse_pause(_stages: Sequence[StageId]) -> tuple[StageId, ...]:
    raise UsageError("wrapped queries are started and stopped by their owner: stop the query instead")


def _refuse_restart(_stage: StageId, _request: str) -> None:
    raise UsageError("wrapped queries are started and stopped by their owner: restart the query instead")


def _refuse_skip(_command: Command) -> str | None:
    raise UsageError(
        "the frame of a wrapped query is its owner's: filter the file out there, or move it away"
    )


def recorded_parts(checkpoints: Checkpoints, state: ControlState) -> tuple[StageSnapshot, ...]:
    """Return the part of each query in the newest checkpoint of the path, with `carried` set.

    Queries that were forgotten are left out.
    """
    manifest, gone = checkpoints.newest_on(state.attempt), forgotten(state)
    if manifest is None:
        return ()
    parts = (part for part in manifest.stages if part.stage not in gone)
    return tuple(replace(part, carried=part.carried or manifest.id) for part in parts)
