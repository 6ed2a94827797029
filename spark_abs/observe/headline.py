"""The first line of a status: what is wrong with a job now, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from spark_abs.model import NO_BATCH
from spark_abs.observe.status import JobStatus, StageStatus
from spark_abs.protocol.control import WATCHED_JOB, Paused, Run
from spark_abs.quantities import duration_said

_OLD_MS = 15_000
"""A live run that has told nothing for so long is slow to reach its store, or hangs."""


def headline(found: JobStatus, now_ms: int) -> str:
    """Return the most urgent fact about a job, paused sources first."""
    said = _said(found, now_ms)
    return f"{paused_said(found.paused, now_ms)}; {said}" if found.paused else said


def paused_said(paused: Sequence[Paused], now_ms: int) -> str:
    """Say which sources are paused, by whom and for how long."""
    each = (f"{one.stage} for {duration_said(now_ms - one.at_ms)} by {one.by}" for one in paused)
    return f"PAUSED: {', '.join(each)}"


def _said(found: JobStatus, now_ms: int) -> str:
    if found.job == WATCHED_JOB:
        return _watched(found, now_ms)
    job = f"job {found.job}"
    if not found.ready:
        return f"{job}: a restore is not finished; run the same restore again"
    if found.run is None:
        return f"{job} was never started"
    if found.killed:
        return f"{job} does not run: run {found.run.id} was killed, or its machine was lost; start it again"
    if found.alive is None:
        return f"{job} does not run: run {found.run.id} {_ended(found.run.ended)}"
    failing = next((stage for stage in found.stages if stage.failing is not None), None)
    if failing is not None and failing.failing is not None:
        return f"{job}: {without_progress(failing)}"
    if found.aborted is not None:
        return f"{job}: {_aborted(found, now_ms)}"
    late = next((stage for stage in found.stages if stage.waiting), None)
    if late is not None and found.open:
        return f"{job} runs; checkpoint {found.open[0].id} waits for {late.stage}: {late.waiting}"
    if found.told_ms is not None and found.told_ms > _OLD_MS:
        return f"{job} runs, and has told nothing of its stages for {found.told_ms // 1000} s"
    last = "has completed no checkpoint yet"
    if found.last is not None and found.last.age_ms is not None:
        last = f"completed checkpoint {found.last.id} {duration_said(found.last.age_ms)} ago"
    if found.skipped and found.unchanged_ms is not None:
        last += f"; {duration_said(found.unchanged_ms)} ago nothing had been done since"
    return f"{job} runs and {last}"


def _watched(found: JobStatus, now_ms: int) -> str:
    """Say how old the newest kept cut is, and whether a watcher is at work: queries need none to run."""
    kept = "no kept cut can be read" if found.kept else "no cut is kept yet"
    if found.last is not None and found.moment_ms is not None:
        kept = f"the newest cut is {found.last.id}, {duration_said(now_ms - found.moment_ms)} old"
    elif found.last is not None:
        kept = f"the newest cut, {found.last.id}, cannot be read: {found.last.damage or 'it was removed'}"
    if found.alive is not None:
        return f"{found.job}: a watcher is at work, {kept}"
    if found.run is None:
        return f"{found.job}: no watcher has been at work"
    return f"{found.job}: no watcher is at work, {kept}; {run_said(found.run, killed=found.killed)}"


def run_said(run: Run, *, killed: bool) -> str:
    """Say how a run that is not alive has ended."""
    return f"run {run.id} {'was killed, or its machine was lost' if killed else _ended(run.ended)}"


def without_progress(stage: StageStatus) -> str:
    """Say at which batch a stage fails again and again, with the cause of the last failure."""
    failing = stage.failing
    if failing is None:
        return ""
    times = "once" if failing.restarts == 1 else f"{failing.restarts} times"
    where = "its first batch" if failing.batch == NO_BATCH else f"batch {failing.batch}"
    said = f"stage {stage.stage!r} has been restarted {times} without finishing {where}"
    return f"{said}: {failing.cause.strip().partition(chr(10))[0]}"


def _aborted(found: JobStatus, now_ms: int) -> str:
    aborted = found.aborted
    assert aborted is not None
    which = f"checkpoint {aborted.checkpoint} was"
    if aborted.number > 1:
        which = f"the last {aborted.number} checkpoints, up to {aborted.checkpoint}, were"
    since = "none is complete"
    if found.last is not None and found.last.completed_ms is not None:
        since = (
            f"the last complete one is {found.last.id}, {duration_said(now_ms - found.last.completed_ms)} old"
        )
    late = next((stage for stage in found.stages if stage.first), None)
    why = f"{aborted.reason}, {aborted.detail}" if aborted.detail else aborted.reason
    if late is not None:
        why = f"{aborted.reason}; now {late.stage} is late: {late.waiting}"
    within = f" in {duration_said(now_ms - aborted.first_ms)}" if aborted.number > 1 else ""
    return f"{which} aborted{within}, {since}: {why}"


def _ended(how: str | None) -> str:
    first = (how or "stopped").strip().partition("\n")[0]
    return f"ended: {first}"
