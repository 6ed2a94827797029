"""Carry out the plan of a restore (P18).

Every step may be repeated: after a kill, the same restore begins again with the first step, under a new run
and the same attempt. No job starts from an unfinished restore: a run begins only on an attempt that is ready.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError

from spark_abs.errors import AbsError
from spark_abs.markup import paragraph
from spark_abs.model import RunId
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.protocol import control as ledger
from spark_abs.restore.outside import ReturnOutside
from spark_abs.restore.prepare import Prepared
from spark_abs.restore.refusals import Force
from spark_abs.restore.restoring import RestorePlan, Restoring
from spark_abs.restore.steps import BeginAttempt, RestoreSink
from spark_abs.store.clock import now_ms
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.lease import own_lease, renew
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of a restore, or of a dry run, which has no `run`."""

    plan: RestorePlan
    run: RunId | None
    """The run number that the restore took; the job's next start takes the number after it."""

    def _repr_html_(self) -> str:
        said = "Done: start the job" if self.run is not None else "A plan: nothing is changed"
        return paragraph(said) + self.plan._repr_html_()

    def __str__(self) -> str:
        """Return it for a person: where the job is, which tables went back, and the notes of the plan."""
        plan = self.plan
        name = f" {plan.name!r}" if plan.name else ""
        back = f"job {plan.job!r} {{}} checkpoint {plan.checkpoint}{name} as attempt {plan.attempt}"
        if self.run is None:
            head = back.format("would go back to")
        else:
            head = back.format("is back at") + f", restored by run {self.run}: start the job"
        tables = [step.sentence() for step in plan.steps if isinstance(step, (RestoreSink, ReturnOutside))]
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
        Refused: the job was started or restored after the plan was made.
        SparkNotStarted: the plan needs Spark, and there is no Java; nothing was changed.
        CheckpointNotFound: a run has retired the checkpoint after the plan was made.
    """
    plan = prepared.plan
    try:
        restoring = Restoring(
            root,
            plan,
            prepared.manifest,
            undo_others=Force.ROWS in prepared.force,
            prestaged=prepared.prestaged,
            own_sinks=prepared.sinks,
            spark=spark,
        )
        if plan.needs_spark:
            if spark is not None:
                from spark_abs.spark.session import check_session, connectors, require_packages

                check_session(spark, f"nothing was changed: this restore of {plan.job}")
                require_packages(spark, connectors((root.uri, *plan.spark_tables)))
            restoring.session()
        try:
            _carry_out(restoring, failpoint, progress)
        except BaseException as error:
            _record_failure(restoring, error)
            raise
        finally:
            if restoring.run:
                now = now_ms()
                renew(root, own_lease(restoring.run, now), now, ended=True)
    finally:
        if prepared.prestaged is not None:
            prepared.prestaged.discard()
    log.info("job %s is restored to checkpoint %s, as attempt %s", plan.job, plan.checkpoint, plan.attempt)
    return RestoreResult(plan, restoring.run)


def _carry_out(restoring: Restoring, failpoint: Failpoint, progress: Progress) -> None:
    steps = restoring.plan.steps
    for number, step in enumerate(steps, 1):
        name = f"restore.{number}.{type(step).__name__}"
        failpoint(f"{name}.before")
        said = f"{number}/{len(steps)} {step.sentence()}"
        with progress.count(said, step.bytes_to_write()) as restoring.counted:
            if not isinstance(step, BeginAttempt):
                ledger.require_current(restoring.control.state, restoring.run)
            step.act(restoring)
        failpoint(f"{name}.after")


def _record_failure(restoring: Restoring, error: BaseException) -> None:
    """Record that the run has ended, and how; the attempt stays unfinished, for the next restore."""
    said, run = str(error).strip().partition("\n")[0] or type(error).__name__, restoring.run
    try:
        if run:
            restoring.control.update(lambda state: ledger.end_run(state, run, f"failed: {said}"))
    except (AbsError, DeltaError, OSError) as unrecorded:
        log.warning("the end of run %s could not be recorded: %s", run, unrecorded)
