"""The status of a job: its run, its checkpoints, and its stages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from pyarrow import fs

from spark_abs.errors import AbsError, CheckpointNotFound, DamageError
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.find import open_existing
from spark_abs.model import AttemptId, BatchId, CheckpointId, RunId, RunKind, StageId, is_name
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows
from spark_abs.observe.stored_batches import StoredBatches, stored_batches
from spark_abs.observe.tally import Tally
from spark_abs.protocol.attempt import Attempt
from spark_abs.protocol.control import (
    WATCHED_JOB,
    WRAPPED_JOB,
    Aborted,
    Command,
    ControlState,
    Paused,
    Run,
    SkippedFile,
    forgotten,
)
from spark_abs.protocol.watch import Watch
from spark_abs.settings import Settings
from spark_abs.snapshots.identity import identity, of_text
from spark_abs.snapshots.materialise import METADATA
from spark_abs.store.activity import DORMANT, RunActivity, Skips, StageActivity, read_activity
from spark_abs.store.control import Control
from spark_abs.store.history import PATH, History, RunEvents
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root
from spark_abs.store.storage import names_of


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that is at work."""

    run: RunId
    host: str
    pid: int
    heard_ms: int
    """Since it last renewed its lease."""


def lease_timeout_ms() -> int:
    """Return the silence after which a run on another host counts as dead, from the environment.

    Raises:
        ConfigError: a variable of the environment names no setting, or its value is not valid.
    """
    return Settings.resolve(None, os.environ, {}, {}).lease_timeout_ms


def live_run(root: Root, now_ms: int, timeout_ms: int) -> LiveRun | None:
    """Return the run whose lease holds, None if there is none.

    Args:
        root: the root of the job.
        now_ms: the wall clock.
        timeout_ms: the silence after which a run on another host is dead (`spark.abs.run.leaseTimeout`).
    """
    lease = read_lease(root)
    if lease is None or not lease.alive(now_ms, timeout_ms):
        return None
    return LiveRun(lease.run, lease.host, lease.pid, max(0, now_ms - lease.beat_ms))


@dataclass(frozen=True, slots=True)
class FailingBatch:
    """A batch that a stage has not finished although it was restarted for it."""

    batch: BatchId
    """`NO_BATCH` if the stage failed before its first."""
    restarts: int
    """In a row, at this batch."""
    cause: str
    """Of the last failure that was followed by a restart."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage, as its root records it; the run is not asked."""

    stage: StageId
    finished: BatchId | None
    """The newest finished batch, `NO_BATCH` before the first. None if the native checkpoint does not exist
    yet, or cannot be seen from this machine. That of a watched query is where the watcher found it."""
    planned: BatchId | None
    """The newest planned batch. If it is after `finished`, it is under way, or the next start repeats it."""
    checkpoint: CheckpointId | None = None
    """The checkpoint that has made its newest completed snapshot; None if there is no snapshot of it."""
    cut: BatchId | None = None
    """The last batch in that snapshot, `NO_BATCH` if it had run none."""
    restarts: int = 0
    """Of the live run."""
    failing: FailingBatch | None = None
    """In the live run."""
    finished_ms: int | None = None
    """When the end of `finished` was recorded, by the clock of the store."""
    planned_ms: int | None = None
    """When `planned` was planned."""
    watermark_ms: int | None = None
    """Of `planned`; None without a watermark, or if it is not known from here."""
    waiting: str = ""
    """Why an open checkpoint waits for it: now, or, if the run tells nothing, when it became unaligned."""
    first: bool = False
    """Whether it holds the open checkpoint up by itself, and not because a stage before it does."""
    activity: StageActivity | None = None
    """What it does now, as the live run tells; None if there is none."""

    @property
    def is_dormant(self) -> bool:
        """Whether it is a wrapped query that does not run, beside others that do."""
        return self.activity is not None and self.activity.what == DORMANT


@dataclass(frozen=True, slots=True)
class AbortedInRow:
    """Checkpoints of the newest run that failed one after another; none has been completed since."""

    number: int
    first_ms: int
    """When the first of them was aborted."""
    checkpoint: CheckpointId
    """The last of them."""
    reason: str
    detail: str


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
    """The status of a job: its run, its checkpoints, and its stages."""

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
    """Also of a dead run, until the next run aborts them."""
    last: CheckpointRow | None
    """The newest completed checkpoint of the current path."""
    last_aborted: Aborted | None
    pending: tuple[Command, ...]
    """Commands without an answer."""
    stages: tuple[StageStatus, ...] = ()
    """Failing stages first, then those that hold an open checkpoint up, those that wait behind them, and the
    others as declared."""
    aborted: AbortedInRow | None = None
    """None if the newest run has completed a checkpoint since its last failed one."""
    told_ms: int | None = None
    """The age of what the live run tells of its stages; None if it tells nothing."""
    kept: int = 0
    """Completed checkpoints and savepoints that are kept, those that a restore abandoned included."""
    oldest_age_ms: int | None = None
    """The age of the oldest of them: channels keep their logs since then. None if there is none."""
    paused: tuple[Paused, ...] = ()
    """Sources that begin no batch until they are resumed, of this run and of the next."""
    skipped_files: tuple[SkippedFile, ...] = ()
    """Input files that stages go past, in this run and in the next; the newest last."""
    skipped: int = 0
    """Periodic checkpoints that the live run has skipped since `last`, since they would have equalled it."""
    moment_ms: int | None = None
    """Of watched queries: when the last batch in `last` had ended. None without one, and if it is damaged."""
    unchanged_ms: int | None = None
    """Since the last of them was due: until then `last` was all that the job had done. None without one."""

    settings: str = ""
    """Those of the newest run that differ from their defaults, as it started; empty if none are recorded."""
    watch: Watch | None = None
    """Of watched queries: what the newest watcher was given. None if an earlier version watched."""
    damaged: tuple[str, ...] = ()
    """Why checkpoints that were completed cannot be read."""
    next_cut: tuple[str, ...] = ()
    """Of watched queries: what the next kept cut waits for. Empty if it was not looked for."""

    @property
    def age_ms(self) -> int | None:
        """How long ago the job was as in the newest completed checkpoint; None without one."""
        if self.last is None or self.last.age_ms is None or self.unchanged_ms is None:
            return None if self.last is None else self.last.age_ms
        return min(self.last.age_ms, self.unchanged_ms)

    @property
    def broke(self) -> bool:
        """Whether no run is alive, and the newest was killed or has failed."""
        failed = self.run is not None and (self.run.ended or "").startswith("failed")
        return self.alive is None and (self.killed or failed)

    @property
    def finished(self) -> bool:
        """Whether the newest run was bounded and has read all of its input."""
        return self.run is not None and (self.run.ended or "").startswith("finished")


def job_status(root: Root, now_ms: int, lease_timeout_ms: int, tally: Tally | None = None) -> JobStatus:
    """Read the status of a job: from `control/`, the last manifest, `history/` and native checkpoints.

    Arguments are those of `status_and_activity`.

    Raises:
        UsageError: there is no job at this root.
        DamageError: a log cannot be read.
    """
    return status_and_activity(root, now_ms, lease_timeout_ms, tally)[0]


def status_and_activity(
    root: Root, now_ms: int, lease_timeout_ms: int, tally: Tally | None = None
) -> tuple[JobStatus, RunActivity | None]:
    """Read the status of a job, and what its live run tells of itself; None if it tells nothing.

    Args:
        root: the root of the job.
        now_ms: the wall clock.
        lease_timeout_ms: as for `live_run`.
        tally: what follows `history/`, for who looks again and again; without it, all of the newest run is
            read.

    Raises:
        UsageError, DamageError: as `job_status`.
    """
    state, alive = Control.open(root).state, live_run(root, now_ms, lease_timeout_ms)
    run = state.run
    if run is not None and run.ended == "restored":  # by a version that did not record the kind
        run = replace(run, kind=RunKind.RESTORE)
    last: CheckpointRow | None = None
    rows = checkpoint_rows(root, now_ms)
    for row in rows:
        if row.id is not None and row.attempt is not None and state.on_path(row.attempt, row.id):
            last = row
    manifest, damage = _manifest(root, state.job, last)
    activity = None if alive is None else _live_activity(root, alive.run)
    skips = Skips() if activity is None else activity.skips
    events = RunEvents()
    if run is not None and tally is not None:
        events = tally.of_run(run.id)
    elif run is not None and root.place(PATH).exists():
        events = History(root).of_run(run.id)
    live = alive is not None and run is not None and alive.run == run.id
    told = () if activity is None else (one.stage for one in activity.stages)
    stages = _stages(root, state, manifest, events if live else RunEvents(), told)
    found = JobStatus(
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
        last=last if last is None or damage is None else replace(last, damage=damage),
        last_aborted=state.aborted[-1] if state.aborted else None,
        pending=tuple(c for c in state.commands if not c.answered),
        stages=_with_activity(stages, activity),
        aborted=_aborted(events),
        settings=events.settings[-1] if events.settings else "",
        told_ms=None if activity is None else max(0, now_ms - activity.at_ms),
        kept=len(rows),
        oldest_age_ms=max((row.age_ms for row in rows if row.age_ms is not None), default=None),
        paused=state.paused,
        skipped_files=state.skipped,
        skipped=skips.number,
        moment_ms=manifest.acked_ms if manifest is not None and state.job == WATCHED_JOB else None,
        unchanged_ms=None if skips.at_ms is None else max(0, now_ms - skips.at_ms),
        watch=state.watch,
        damaged=tuple(why for why in (*(row.damage for row in rows), damage) if why is not None),
    )
    return found, activity


def _live_activity(root: Root, run: RunId) -> RunActivity | None:
    """Return what a live run tells of itself, None if it has told nothing yet."""
    found = read_activity(root)
    return found if found is not None and found.run == run else None


def _with_activity(stages: Sequence[StageStatus], activity: RunActivity | None) -> tuple[StageStatus, ...]:
    """Add what the live run tells, and order the stages."""
    if activity is not None:
        doing = {one.stage: one for one in activity.stages}
        late = {one.stage: one for one in reversed(activity.late)}
        stages = [
            replace(
                stage,
                activity=doing.get(stage.stage),
                waiting=late[stage.stage].why if stage.stage in late else "",
                first=stage.stage in late and late[stage.stage].first,
            )
            for stage in stages
        ]
    return tuple(
        sorted(stages, key=lambda stage: (stage.failing is None, not stage.first, not stage.waiting))
    )


def _aborted(events: RunEvents) -> AbortedInRow | None:
    if not events.failed:
        return None
    first, last = events.failed[0], events.failed[-1]
    return AbortedInRow(
        len(events.failed),
        first["at_ms"],
        CheckpointId(last["checkpoint"]),
        last["reason"] or "",
        last["detail"] or "",
    )


def _manifest(root: Root, job: str, last: CheckpointRow | None) -> tuple[Manifest | None, str | None]:
    """Return the manifest of the last checkpoint, or its damage; neither if it was retired meanwhile."""
    checkpoints = None if last is None else open_existing(root, job)
    if last is None or last.id is None or checkpoints is None:
        return None, None
    try:
        return checkpoints.load(last.id), None
    except DamageError as error:
        return None, str(error)
    except CheckpointNotFound:
        return None, None


def _stages(
    root: Root,
    state: ControlState,
    manifest: Manifest | None,
    events: RunEvents,
    told: Iterable[StageId],
) -> list[StageStatus]:
    """Return the stages of the newest attempt; `events` and `told` stages are those of the live run."""
    unsettled = {claim.barrier.id for claim in state.claims}
    waiting = {stage: why for checkpoint, stage, why in events.late if checkpoint in unsettled}
    if state.job == WATCHED_JOB and state.watch is not None:
        return list(_watched_stages(root, state, state.watch, manifest))
    found = []
    for name in _names(root, state, manifest, (*told, *(stage for stage, _, _ in events.restarts))):
        stage = _stage(root, state, name, manifest)
        mine = [(batch, cause) for failed, batch, cause in events.restarts if failed == name]
        failing = _failing(mine, stage.finished)
        found.append(replace(stage, restarts=len(mine), failing=failing, waiting=waiting.get(name, "")))
    return found


def _watched_stages(
    root: Root, state: ControlState, watch: Watch, manifest: Manifest | None
) -> Iterator[StageStatus]:
    """Iterate the queries that the newest watcher was given, also those that no cut has yet."""
    known = {} if manifest is None else {part.directory: part.stage for part in manifest.stages}
    for directory, name in zip(watch.checkpoints, names_of(watch.checkpoints), strict=True):
        if directory in known:
            yield _stage(root, state, known[directory], manifest)
        else:
            new = directory if name in known.values() else name
            yield _at(StageId(new), _of_directory(root, directory))


def _names(
    root: Root, state: ControlState, manifest: Manifest | None, live: Iterable[StageId]
) -> tuple[StageId, ...]:
    """Return the stages that the newest run has declared; if none is recorded, those of the last checkpoint.

    None is recorded after a restore until the next start, by earlier versions, and of wrapped queries. Those
    that no checkpoint has yet are known from their native checkpoints, or from a live run.
    """
    gone = forgotten(state)
    names = [shape.stage for shape in state.attempt.shapes]
    if not names and manifest is not None:
        names = [each.stage for each in manifest.stages if each.stage not in gone]
    if state.job == WRAPPED_JOB:
        names += [name for name in _begun(root, state.attempt) if name not in gone]
    return tuple(dict.fromkeys((*names, *live)))


def _begun(root: Root, attempt: Attempt) -> list[StageId]:
    """Return the wrapped queries that have a native checkpoint in an attempt."""
    top = root.anywhere(f"{attempt.natives}/{int(attempt.id)}")
    found = top.fs.get_file_info(fs.FileSelector(top.path, allow_not_found=True))
    directories = sorted(info.base_name for info in found if info.type is fs.FileType.Directory)
    return [StageId(name) for name in directories if is_name(name)]


def _stage(root: Root, state: ControlState, stage: StageId, manifest: Manifest | None) -> StageStatus:
    snapshot = None if manifest is None else manifest.stage(stage)
    if state.job == WATCHED_JOB:
        batches = StoredBatches() if snapshot is None else _of_watched(root, snapshot)
    else:
        attempt = state.attempt
        batches = stored_batches(root.native(attempt.natives, attempt.id, attempt.directory(stage)))
    found = _at(stage, batches)
    if manifest is None or snapshot is None:
        return found
    return replace(found, checkpoint=snapshot.carried or manifest.id, cut=snapshot.cut_batch)


def _at(stage: StageId, batches: StoredBatches) -> StageStatus:
    return StageStatus(
        stage,
        finished=batches.finished,
        planned=batches.planned,
        finished_ms=batches.finished_ms,
        planned_ms=batches.planned_ms,
        watermark_ms=batches.watermark_ms,
    )


def _of_directory(root: Root, directory: str) -> StoredBatches:
    """Return how far a query is, if its directory can be seen from here."""
    try:
        return stored_batches(root.storage.place(directory))
    except (AbsError, OSError):
        return StoredBatches()


def _of_watched(root: Root, kept: StageSnapshot) -> StoredBatches:
    """Return how far a watched query is, if its directory can be seen from here and is still that query's."""
    if not kept.directory:  # of an earlier version
        return StoredBatches()
    try:
        place = root.storage.place(kept.directory)
        metadata = place.read_text(METADATA)
        same = metadata is not None and of_text(metadata) == identity(kept)
        return stored_batches(place) if same else StoredBatches()
    except (AbsError, OSError):
        return StoredBatches()


def _failing(restarts: Sequence[tuple[BatchId, str]], finished: BatchId | None) -> FailingBatch | None:
    """Return the batch at which a stage failed last, None if it has finished it since."""
    if not restarts:
        return None
    batch, cause = restarts[-1]
    if finished is not None and finished >= max(batch, 0):
        return None
    in_row = sum(1 for _ in takewhile(lambda restart: restart[0] == batch, reversed(restarts)))
    return FailingBatch(batch, in_row, cause)
