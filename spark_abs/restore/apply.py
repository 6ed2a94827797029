"""Carry out the plan of a restore (P18).

Every step may be done again: killed anywhere, the same restore goes on from the first step, under a new
run and the same attempt. Nothing starts from half of it: a run begins only on an attempt that is ready.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from deltalake import CommitProperties, PostCommitHookProperties
from deltalake.exceptions import DeltaError
from pyarrow.fs import FileType

from spark_abs.errors import AbsError, CheckpointNotFound, DamageError, Refused
from spark_abs.manifests.checkpoints import Checkpoints, abort_open
from spark_abs.model import BatchId, RunId, StageId, app_id, checked_relative, run_app_id
from spark_abs.observe.checkpoint_check import damaged_rows
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.protocol import attempt_changes
from spark_abs.protocol import control as ledger
from spark_abs.restore.outside import carry_out_outside
from spark_abs.restore.plan import RestorePlan, plan_json
from spark_abs.restore.prepare import Prepared
from spark_abs.restore.refusals import Force
from spark_abs.restore.rescale import is_rescaled, rescale
from spark_abs.restore.steps import (
    AbortOpen,
    BeginAttempt,
    FenceChannel,
    FenceOutside,
    FenceRoot,
    FenceSink,
    Finish,
    KeepSink,
    Materialise,
    Rescale,
    RestoreSink,
    ReturnOutside,
    SetAside,
    StartAfresh,
    Step,
    sentence,
)
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.snapshots.materialise import empty, is_whole, materialise
from spark_abs.snapshots.passing import clear_ahead
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.fence import fence_attempt, fence_run
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.lease import Heartbeat, own_lease, renew, write_lease
from spark_abs.store.root import Root
from spark_abs.store.storage import in_object_store
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore did, or with `run` None would do."""

    plan: RestorePlan
    run: RunId | None
    """The run number that the restore took; the job's next start takes the one after it."""

    def __str__(self) -> str:
        """Return it for a person: where the job is, which tables went back, and what else the plan says."""
        plan = self.plan
        name = f" {plan.name!r}" if plan.name else ""
        back = f"job {plan.job!r} {{}} checkpoint {plan.checkpoint}{name} as attempt {plan.attempt}"
        if self.run is None:
            head = back.format("would go back to")
        else:
            head = back.format("is back at") + f", restored by run {self.run}: start the job"
        tables = [sentence(s) for s in plan.steps if isinstance(s, (RestoreSink, ReturnOutside))]
        return "\n  ".join([head, *tables, *(f"Note: {note}" for note in plan.notes)])


def apply(
    root: Root,
    prepared: Prepared,
    *,
    spark: SparkSession | None = None,
    failpoint: Failpoint = no_failpoint,
    progress: Progress = SILENT,
) -> RestoreResult:
    """Carry out a plan, step by step in its order; arguments and errors as for `JobRoot.restore`.

    Raises:
        Refused: the job has moved on since the plan was made.
        SparkNotStarted: the plan needs Spark, and there is no Java; nothing was changed.
        CheckpointNotFound: the run that was alive has retired the checkpoint meanwhile.
    """
    try:
        return _carry_out(root, prepared, spark, failpoint, progress)
    finally:
        if prepared.ahead is not None:
            prepared.ahead.discard()


def _carry_out(
    root: Root, prepared: Prepared, spark: SparkSession | None, failpoint: Failpoint, progress: Progress
) -> RestoreResult:
    restorer = _Restorer(root, prepared, spark)
    if prepared.plan.needs_spark:
        restorer.open_session()
    try:
        for number, step in enumerate(prepared.plan.steps, 1):
            name = f"restore.{number}.{type(step).__name__}"
            failpoint(f"{name}.before")
            with progress.count(
                f"{number}/{len(prepared.plan.steps)} {sentence(step)}", _size(step)
            ) as counted:
                restorer.carry_out(step, counted)
            failpoint(f"{name}.after")
    except BaseException as error:
        restorer.record_failure(error)
        raise
    finally:
        restorer.give_lease_back()
    plan = prepared.plan
    log.info("job %s is restored to checkpoint %s, as attempt %s", plan.job, plan.checkpoint, plan.attempt)
    return RestoreResult(plan, restorer.run)


class _Restorer:
    """Carries out the steps of a restore; its run number is known once the first step is done."""

    def __init__(self, root: Root, prepared: Prepared, spark: SparkSession | None) -> None:
        self.run = RunId(0)
        self._root = root
        self._plan = prepared.plan
        self._manifest = prepared.manifest
        self._undo_others = Force.ROWS in prepared.force
        self._ahead = prepared.ahead
        self._sinks = prepared.sinks
        self._spark = spark
        self._control = Control.open(root)
        self._heartbeat = Heartbeat(root, self._control)
        self._began_ms = now_ms()

    def carry_out(self, step: Step, counted: Callable[[int], None]) -> None:
        """Do one step, telling its bytes. All but the first require that nobody has taken over."""
        if not isinstance(step, BeginAttempt):
            ledger.require_current(self._control.state, self.run)
        job = self._plan.job
        match step:
            case BeginAttempt():
                self._begin()
            case FenceRoot():
                fence_run(Table.open(self._root.place(step.table)), job, self.run, run_app_id(job))
                self._require_retained("the job does not start until you do")
            case SetAside():
                self._set_aside(step.path)
            case FenceChannel():
                stage, _, output = step.channel.partition(".")
                table = Table.open(self._root.place(self._root.channel(step.channel)))
                fence_attempt(table, job, StageId(stage), output, step.attempt)
                fence_run(table, job, self.run, app_id(job, stage, output, self._plan.attempt))
            case FenceSink():
                self._sink(step).fence(step.apps)
            case AbortOpen():
                abort_open(self._control, Checkpoints.open(self._root, job), self.run)
            case Materialise() | Rescale():
                self._native(step, counted)
            case RestoreSink() | FenceOutside() | ReturnOutside():
                self._bring_back(step)
            case StartAfresh() | KeepSink():
                pass
            case Finish():
                self._finish()
            case _:
                assert_never(step)

    def record_failure(self, error: BaseException) -> None:
        """Record that the run has ended, and how; the attempt stays unfinished, for the next restore."""
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        try:
            if self.run:
                self._control.update(lambda s: ledger.end_run(s, self.run, f"failed: {said}"))
        except (AbsError, DeltaError, OSError) as unrecorded:
            log.warning("the end of run %s could not be recorded: %s", self.run, unrecorded)

    def give_lease_back(self) -> None:
        """Give the lease back, however the restore ended."""
        if self.run:
            now = now_ms()
            renew(self._root, own_lease(self.run, now), now, ended=True)

    def _require_retained(self, otherwise: str) -> None:
        """Refuse if the run that was alive has retired the checkpoint; once fenced, it cannot any more."""
        checkpoint = self._plan.checkpoint
        try:
            Checkpoints.open(self._root, self._plan.job).load(checkpoint)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"checkpoint {checkpoint} was retired while the restore was being prepared: choose another "
                f"one, see `spark-abs list`; {otherwise}"
            ) from error

    def _begin(self) -> None:
        self._require_retained("nothing was changed")
        plan, stored = self._plan, plan_json(self._plan)

        def begin(state: ledger.ControlState) -> ledger.ControlState:
            newest = state.newest_run
            if state.attempt.id != plan.newest or newest != plan.replaces:
                raise Refused(
                    f"job {plan.job!r} has moved on since the restore was planned (run {newest}, attempt "
                    f"{state.attempt.id}): plan it again"
                )
            host, pid = socket.gethostname(), os.getpid()
            return attempt_changes.begin_attempt(
                state,
                plan.parent,
                plan.checkpoint,
                stored,
                host,
                pid,
                now_ms(),
                plan.natives,
                plan.partitions,
                plan.base,
            )

        self.run = self._control.update(begin).runs[-1].id
        write_lease(self._root, own_lease(self.run, now_ms()))

    def _set_aside(self, path: str) -> None:
        """Move a damaged file to where tables do not look; the log then forgets what is not there.

        It is read again first: what is moved is lost to every later restore.
        """
        if all(finding.path != path for finding in damaged_rows(self._root)):
            log.warning("%s is not damaged after all: it stays where it is", path)
            return
        folder, _, name = checked_relative(path).rpartition("/")
        source, target = self._root.path(path), self._root.path(f"{folder}/_damaged")
        if self._root.fs.get_file_info(source).type is FileType.File:
            self._root.fs.create_dir(target)
            self._root.fs.move(source, f"{target}/{name}")
        Table.open(self._root.place(folder)).delta.repair(
            commit_properties=CommitProperties(max_commit_retries=0),
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
        )

    def _sink(self, step: FenceSink | RestoreSink) -> DeltaSink:
        state, (first, *_) = self._control.state, step.sinks
        stage, _, sink = first.partition("/")
        writer = state.writer(state.attempt, StageId(stage), sink)
        return DeltaSink(self._root, step.table, writer, self.run, self.open_session)

    def _bring_back(self, step: RestoreSink | FenceOutside | ReturnOutside) -> None:
        if isinstance(step, RestoreSink):
            self._sink(step).restore_to(step.version, self._own(), self._undo_others or step.by_function)
        else:
            carry_out_outside(step, self._root, self._control.state, self.run, self._sinks, self.open_session)

    def _own(self) -> Own:
        state = self._control.state
        return Own(state.job, state.root, state.unnamed)

    def open_session(self) -> SparkSession:
        """Return the session, started if there is none."""
        from spark_abs.spark.session import S3_CONNECTOR, apply_storage_conf, spark_session

        if self._spark is None:
            places = (self._root.uri, *self._plan.spark_tables)
            packages = [S3_CONNECTOR] if any(map(in_object_store, places)) else []
            self._spark = spark_session(f"restore of {self._plan.job}", "local[*]", packages=packages)
        apply_storage_conf(self._spark, self._root.storage)
        return self._spark

    def _native(self, step: Materialise | Rescale, counted: Callable[[int], None]) -> None:
        if isinstance(step, Materialise):
            self._materialise(step, counted)
        else:
            self._rescale(step)

    def _materialise(self, step: Materialise, counted: Callable[[int], None]) -> None:
        snapshot = self._manifest.stage(step.stage)
        if snapshot is None:
            raise DamageError(f"checkpoint {self._manifest.id} has no stage {step.stage!r}")

        def written(size: int) -> None:
            counted(size)
            self._heartbeat(self.run)

        target, query = self._root.anywhere(step.directory), self._plan.queries[step.stage]
        partitions = self._plan.partitions.get(step.stage)
        if partitions is not None and is_whole(target, query):
            if is_rescaled(target, BatchId(step.batch + 1), partitions):
                written(step.size)
                return
            # Spark may have been killed anywhere in it: what it has left is not gone on with.
            empty(target)
        if self._ahead is not None and self._ahead.move(step.stage, target, query):
            written(step.size)
        materialise(self._root, snapshot.files, target, query, written)

    def _rescale(self, step: Rescale) -> None:
        place = self._root.anywhere(step.directory)
        if not is_rescaled(place, step.batch, step.partitions):
            rescale(
                self.open_session(), place, step.batch, step.partitions, lambda: self._heartbeat(self.run)
            )

    def _finish(self) -> None:
        self._record()
        clear_ahead(self._root.anywhere(self._plan.natives), self.run)
        for elsewhere in {a.natives for a in self._control.state.attempts} - {self._plan.natives}:
            with suppress(OSError):  # a disk that was lost
                clear_ahead(self._root.anywhere(elsewhere), self.run)

        def finish(state: ledger.ControlState) -> ledger.ControlState:
            ledger.require_current(state, self.run)
            said = f"the job was restored to checkpoint {self._plan.checkpoint} meanwhile"
            state = ledger.dismiss(state, said)
            return ledger.end_run(
                attempt_changes.finish_attempt(state, self._plan.attempt), self.run, "restored"
            )

        self._control.update(finish)

    def _record(self) -> None:
        """Add the event before the attempt is ready: a restore that is not in `history/` is not finished."""
        history, plan = History(self._root), self._plan
        told = history.read().select(["event", "attempt"]).to_pylist() if plan.continues else []
        if {"event": HistoryEvent.RESTORED.value, "attempt": plan.attempt} in told:
            return
        left = ", ".join(map(str, plan.abandons)) or "nothing"
        history.append(
            [
                HistoryRow(
                    at_ms=now_ms(),
                    event=HistoryEvent.RESTORED,
                    attempt=plan.attempt,
                    run=self.run,
                    checkpoint=plan.checkpoint,
                    kind=self._manifest.kind.value,
                    name=plan.name,
                    detail=f"from attempt {plan.parent}; leaves behind {left}",
                    duration_ms=now_ms() - self._began_ms,
                )
            ]
        )


def _size(step: Step) -> int:
    return step.size if isinstance(step, Materialise) else 0
