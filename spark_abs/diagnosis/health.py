"""Whether a job is healthy, for probes and for cron."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.errors import UsageError
from spark_abs.model import NO_BATCH
from spark_abs.observe.headline import paused_said, run_said, without_progress
from spark_abs.observe.status import JobStatus, StageStatus, job_status, lease_timeout_ms
from spark_abs.observe.tally import Tally
from spark_abs.protocol.control import WATCHED_JOB
from spark_abs.quantities import duration_said as length
from spark_abs.store.root import Root

MOST_ABORTED = 3
"""So many checkpoints aborted one after another are not healthy."""


@dataclass(frozen=True, slots=True)
class Health:
    """A job that is healthy has no problems."""

    healthy: bool
    problems: tuple[str, ...]
    checkpoint: int | None
    """The newest completed checkpoint."""
    age_ms: int | None
    """Since the job was as in it: it was completed, or a checkpoint that would have equalled it was skipped.
    None without one."""
    lag_ms: int | None
    """The age of the oldest row that a stage has not read of its channels; None if no run tells it."""
    stage: str | None
    """The stage with that row."""

    @property
    def line(self) -> str:
        """All of it in one line."""
        if not self.healthy:
            return f"unhealthy: {'; '.join(self.problems)}"
        age = "no checkpoint yet" if self.age_ms is None else f"checkpoint {self.checkpoint}, "
        age += "" if self.age_ms is None else f"{length(self.age_ms)} old"
        return f"healthy: {age}, lag {'-' if self.lag_ms is None else length(self.lag_ms)}"


def read_health(
    root: Root, now_ms: int, max_age_ms: int | None, max_lag_ms: int | None, tally: Tally | None = None
) -> Health:
    """Judge the job at a root as `health` does; without Spark. With a tally as `job_status`.

    Raises:
        RootNotFound: there is no job at this root.
        DamageError: a log cannot be read.
    """
    return health(job_status(root, now_ms, lease_timeout_ms(), tally), now_ms, max_age_ms, max_lag_ms)


def health(status: JobStatus, now_ms: int, max_age_ms: int | None, max_lag_ms: int | None) -> Health:
    """Judge a job, or watched queries as `_watched`.

    A job is healthy if a run is alive that makes progress, or if its last run was bounded and finished. A job
    with a paused source is not, nor are wrapped queries of which one does not run.

    Args:
        status: the status of the job.
        now_ms: the time.
        max_age_ms: how old the newest completed checkpoint may be, and a run that has none; None: any age. A
            checkpoint that is skipped makes it young again: it would have equalled it.
        max_lag_ms: how old the oldest row may be that a stage has not read of its channels; None: any age.
    """
    if status.job == WATCHED_JOB:
        return _watched(status, now_ms, max_age_ms, max_lag_ms)
    problems = []
    if not status.ready:
        problems.append("a restore is not finished")
    elif status.alive is None and not status.finished:
        problems.append("no run is alive" + (": it was killed" if status.killed else ""))
    if status.paused:
        problems.append(paused_said(status.paused, now_ms))
    problems += [without_progress(stage) for stage in status.stages if stage.failing is not None]
    problems += _damaged(status)
    problems += [f"query {stage.stage} does not run" for stage in status.stages if stage.is_dormant]
    if status.alive is not None and status.aborted is not None and status.aborted.number >= MOST_ABORTED:
        why = status.aborted.detail or status.aborted.reason
        problems.append(f"the last {status.aborted.number} checkpoints were aborted: {why}")
    age = status.age_ms
    if max_age_ms is not None:
        began = None if status.run is None else now_ms - status.run.started_ms
        counts = began if age is None else age
        if counts is None or counts > max_age_ms:
            said = (
                "no checkpoint was ever completed"
                if age is None
                else (f"the last completed checkpoint is {length(age)} old")
            )
            problems.append(f"{said}, more than {length(max_age_ms)} are too many")
    lags = {s.stage: s.activity.lag_ms(now_ms) for s in status.stages if s.activity is not None}
    stage = max(lags, key=lambda name: lags[name], default=None)
    lag = None if stage is None else lags[stage]
    if max_lag_ms is not None and lag is not None and lag > max_lag_ms:
        problems.append(f"stage {stage} is {length(lag)} behind, more than {length(max_lag_ms)} are too many")
    if max_lag_ms is not None and status.alive is not None and lag is None:
        problems.append("the run has not told its lag")
    checkpoint = None if status.last is None else status.last.id
    return Health(not problems, tuple(problems), checkpoint, age_ms=age, lag_ms=lag, stage=stage)


def _watched(status: JobStatus, now_ms: int, max_age_ms: int | None, max_lag_ms: int | None) -> Health:
    """Judge a watched root: by its newest cut, and by how the last watcher has ended.

    A watcher need not be at work: cron may start one for each look. Only the age tells whether it still does.
    It is 0 if the queries have done nothing since the newest cut.

    Raises:
        UsageError: there is a limit for the lag.
    """
    if max_lag_ms is not None:
        raise UsageError(f"{status.root} is the root of a watcher, which knows no lag: leave --max-lag out")
    problems, run = [], status.run
    if status.broke and run is not None:
        problems.append(f"no watcher is at work: {run_said(run, killed=status.killed)}")
    age = None if status.moment_ms is None else max(0, now_ms - status.moment_ms)
    if age is not None and all(map(_is_still, status.stages)):
        age = 0
    if status.damaged:
        problems += _damaged(status)
    elif status.last is None:
        problems.append("no cut is kept")
    elif age is None:
        problems.append(f"the newest cut, {status.last.id}, cannot be read")
    if max_age_ms is not None and age is not None and age > max_age_ms:
        problems.append(f"the newest cut is {length(age)} old, more than {length(max_age_ms)} are too many")
    kept = None if status.last is None else status.last.id
    return Health(not problems, tuple(problems), kept, age_ms=age, lag_ms=None, stage=None)


def _is_still(query: StageStatus) -> bool:
    """Say whether a watched query has done nothing since the newest cut; a new one if it has not begun."""
    cut = NO_BATCH if query.cut is None else query.cut
    return query.finished == query.planned == cut


def _damaged(status: JobStatus) -> list[str]:
    if not status.damaged:
        return []
    more = f", and {len(status.damaged) - 1} more" if len(status.damaged) > 1 else ""
    return [f"a checkpoint cannot be read: {status.damaged[0]}{more}; see `spark-abs verify {status.root}`"]
