"""Fences: they stop a replaced run or attempt from committing to a table.

A fence is an application id at a version that no writer may pass. It is in the table's own log, so that a
writer that reads, decides and commits at the next version cannot miss it. RESTORE does not undo it.
"""

from __future__ import annotations

from spark_abs.errors import Fenced, TakenOver
from spark_abs.model import FENCED, AttemptId, RunId, StageId, app_id, barrier_app_id, run_app_id
from spark_abs.store.table import Commit, Table


def end_app_id(job: str, stage: StageId, output: str, attempt: AttemptId) -> str:
    """Name the application id of end markers; their version is the run that ended."""
    return app_id(job, stage, output, attempt) + "/end"


def require_current(table: Table, job: str, run: RunId, app: str) -> None:
    """Check, as of the loaded version, that neither this run nor this attempt was replaced.

    Raises:
        Fenced: one was.
        TakenOver: another root has taken the table over.
    """
    table.require_unfenced(app)
    newest = table.transaction(run_app_id(job))
    if newest == FENCED:
        raise TakenOver(
            f"another root took over {table.uri}: {job} can no longer write to it; give the sink another "
            "table, or declare the job without that sink"
        )
    if newest is not None and newest > run:
        raise Fenced(
            f"run {run} of {job} was replaced by run {newest}: it can no longer write to {table.uri}"
        )


def require_newest(table: Table, job: str, run: RunId) -> None:
    """Check, as of the loaded version of a table of the root, that no newer run has fenced this run.

    Raises:
        Fenced: one has.
    """
    newest = table.transaction(run_app_id(job)) or 0
    if newest > run:
        raise Fenced(f"run {run} of job {job!r} was replaced by run {newest}")


def run_fence(table: Table, job: str, run: RunId) -> Commit | None:
    """Return the commit that fences older runs in a table of the root, None if it was made already.

    Raises:
        Fenced: a newer run has fenced this one.
    """
    require_newest(table, job, run)
    app = run_app_id(job)
    return None if table.transaction(app) == run else Commit(transactions={app: run})


def is_fenced_for(table: Table, app: str, run: RunId, in_order_since: RunId | None) -> bool:
    """Say whether no older run can commit to a table, as of the loaded version.

    Args:
        table: the table.
        app: the application id of the fence.
        run: the run.
        in_order_since: the result of `protocol.control.in_order_since`; None if unknown. If the newest fence
            is of that run or a later one, all runs that it does not fence have ended.
    """
    newest = table.transaction(app)
    return newest is not None and newest >= min(run, run if in_order_since is None else in_order_since)


def fence_run(table: Table, job: str, run: RunId, app: str) -> None:
    """Commit the fence of a run on one table, unless it was made already.

    Raises:
        Fenced: a newer run or attempt is there.
    """

    def decide(table: Table) -> Commit | None:
        require_current(table, job, run, app)
        return run_fence(table, job, run)

    table.commit(decide)


def fence_attempt(table: Table, job: str, stage: StageId, output: str, attempt: AttemptId) -> None:
    """Make an attempt's ids for one output unusable, so that it cannot commit any more. Repeatable."""
    app = app_id(job, stage, output, attempt)
    burnt = {
        app: FENCED,
        barrier_app_id(job, stage, output, attempt): FENCED,
        end_app_id(job, stage, output, attempt): FENCED,
    }
    table.commit(lambda table: None if table.transaction(app) == FENCED else Commit(transactions=burnt))
