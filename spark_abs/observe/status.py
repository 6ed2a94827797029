"""The status of a job: its run, its checkpoints, and the stages that make no progress."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from spark_abs.model import NO_BATCH, AttemptId, BatchId, CheckpointId, RunId, RunKind, StageId
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows
from spark_abs.protocol.control import Aborted, Command, ControlState, Run
from spark_abs.settings import Settings
from spark_abs.store.control import Control
from spark_abs.store.history import PATH, History
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that is at work."""

    run: RunId
    host: str
    pid: int
    heard_ms: int
    """Since it last renewed its lease."""


def lease_timeout_ms() -> int:
    """Return the silence after which a run on another host counts as dead, where no job says it itself.

    Raises:
        ConfigError: a variable of the environment is no setting or cannot be read.
    """
    return Settings.resolve(None, os.environ, {}, {}).lease_timeout_ms


def live_run(root: Root, now_ms: int, timeout_ms: int) -> LiveRun | None:
    """Return the run whose lease holds, None if there is none.

    Args:
        root: the root of the job.
        now_ms: the wall clock.
        timeout_ms: silence after which a run on another host counts as dead (`spark.abs.run.leaseTimeout`).
    """
    lease = read_lease(root)
    if lease is None or not lease.alive(now_ms, timeout_ms):
        return None
    return LiveRun(lease.run, lease.host, lease.pid, max(0, now_ms - lease.beat_ms))


@dataclass(frozen=True, slots=True)
class StuckStage:
    """A stage without progress."""

    stage: StageId
    batch: BatchId
    restarts: int
    """In a row, at this batch."""
    cause: str
    """Of its last failure that was followed by a restart."""


def stuck_stages(root: Root, state: ControlState, run: RunId) -> tuple[StuckStage, ...]:
    """Return the stages of a run that have not finished the batch at which they failed last."""
    if not root.place(PATH).exists():
        return ()
    found: dict[StageId, StuckStage] = {}
    for stage, batch, cause in History(root).restarts(run):
        before = found.get(stage)
        in_row = before.restarts + 1 if before is not None and before.batch == batch else 1
        found[stage] = StuckStage(stage, batch, in_row, cause)
    return tuple(each for each in found.values() if not _finished(root, state, each))


def _finished(root: Root, state: ControlState, stuck: StuckStage) -> bool:
    attempt = state.attempt
    place = root.native(attempt.natives, attempt.id, attempt.directory(stuck.stage))
    batch = 0 if stuck.batch == NO_BATCH else int(stuck.batch)
    return place.read(f"commits/{batch}") is not None


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An id that was claimed and has no outcome."""

    id: CheckpointId
    kind: str
    name: str | None
    run: RunId
    age_ms: int
    """Since its trigger."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job: its run, its checkpoints, and the stages that make no progress."""

    root: str
    job: str
    attempt: AttemptId
    parent: AttemptId | None
    """The attempt that this one was restored from."""
    restored_from: CheckpointId | None
    ready: bool
    """False while a restore is unfinished."""
    run: Run | None
    """The newest run, also if it has ended; `kind` tells a restore and an edit from the job itself."""
    killed: bool
    """The newest run is not alive and has recorded no end."""
    alive: LiveRun | None
    open: tuple[OpenCheckpoint, ...]
    """Of a run that is dead too, until the next one aborts them."""
    last: CheckpointRow | None
    """The newest completed checkpoint of the current path."""
    last_aborted: Aborted | None
    pending: tuple[Command, ...]
    """Commands without an answer."""
    stuck: tuple[StuckStage, ...] = ()
    """Stages of the live run that were started again and have not finished their batch."""


def job_status(root: Root, now_ms: int, lease_timeout_ms: int) -> JobStatus:
    """Read how a job stands.

    Raises:
        UsageError: there is no job at this root.
        DamageError: a log cannot be read.
    """
    state, alive = Control.open(root).state, live_run(root, now_ms, lease_timeout_ms)
    run = state.run
    if run is not None and run.ended == "restored":  # by a version that did not record the kind
        run = replace(run, kind=RunKind.RESTORE)
    current = [row for row in checkpoint_rows(root, now_ms) if not row.abandoned and row.damage is None]
    return JobStatus(
        root=root.uri,
        job=state.job,
        attempt=state.attempt.id,
        parent=state.attempt.parent,
        restored_from=state.attempt.checkpoint,
        ready=state.attempt.ready,
        run=run,
        killed=run is not None and run.ended is None and (alive is None or alive.run != run.id),
        alive=alive,
        open=tuple(
            OpenCheckpoint(b.id, b.kind.value, b.name, c.run, now_ms - b.timestamp_ms)
            for c in state.claims
            for b in (c.barrier,)
        ),
        last=current[-1] if current else None,
        last_aborted=state.aborted[-1] if state.aborted else None,
        pending=tuple(c for c in state.commands if not c.answered),
        stuck=() if alive is None else stuck_stages(root, state, alive.run),
    )
