"""Whether a job is healthy, for probes and for cron."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.observe.headline import paused_said, without_progress
from spark_abs.observe.status import JobStatus, job_status, lease_timeout_ms
from spark_abs.observe.tally import Tally
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
    """Judge a job.

    A job is healthy if a run is alive that makes progress, or if its last run was bounded and finished. A job
    with a paused source is not.

    Args:
        status: the status of the job.
        now_ms: the time.
        max_age_ms: how old the newest completed checkpoint may be, and a run that has none; None: any age. A
            checkpoint that is skipped makes it young again: it would have equalled it.
        max_lag_ms: how old the oldest row may be that a stage has not read of its channels; None: any age.
    """
    problems = []
    if not status.ready:
        problems.append("a restore is not finished")
    elif status.alive is None and not status.finished:
        problems.append("no run is alive" + (": it was killed" if status.killed else ""))
    if status.paused:
        problems.append(paused_said(status.paused, now_ms))
    problems += [without_progress(stage) for stage in status.stages if stage.failing is not None]
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
