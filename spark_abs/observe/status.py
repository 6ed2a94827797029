"""The status of a job: its run, its checkpoints, and the stages that make no progress."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_abs.model import AttemptId, CheckpointId, RunId, RunKind
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows
from spark_abs.observe.live_run import LiveRun, live_run
from spark_abs.observe.stuck import StuckStage, stuck_stages
from spark_abs.protocol.control import Aborted, Command, Run
from spark_abs.store.control import Control
from spark_abs.store.root import Root


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
