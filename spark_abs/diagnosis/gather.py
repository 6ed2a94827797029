"""Gather the facts of a job from its root. Reading only, without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from pyarrow import fs

from spark_abs.diagnosis.facts import Facts, Orphan, Partitions, StateSize
from spark_abs.errors import CheckpointNotFound, DamageError
from spark_abs.keep import Keep, keep_words
from spark_abs.manifest import StageSnapshot
from spark_abs.manifests.find import list_manifests, open_existing
from spark_abs.model import CheckpointId, RunId, StageId
from spark_abs.observe.headline import run_said
from spark_abs.observe.inspect import partition_sizes
from spark_abs.observe.status import JobStatus, status_and_activity
from spark_abs.packages import installed
from spark_abs.protocol.control import ControlState
from spark_abs.snapshots.packs import PATH as STATE
from spark_abs.snapshots.packs import pack_name
from spark_abs.snapshots.state_storage import active_packs
from spark_abs.store.activity import RunActivity
from spark_abs.store.clock import steady_ms
from spark_abs.store.control import Control
from spark_abs.store.history import PATH as HISTORY
from spark_abs.store.history import History
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root
from spark_abs.store.table import Table

CHECKPOINTS = 200
"""Of so many of the newest checkpoints of a run the sizes are looked at."""


def gather(root: Root, now_ms: int, lease_timeout_ms: int) -> Facts:
    """Return what is known of a job now.

    Raises:
        RootNotFound: there is no job at this root.
        DamageError: a log cannot be read.
    """
    began_ms = steady_ms()
    status, activity = status_and_activity(root, now_ms, lease_timeout_ms)
    run = None if status.run is None else status.run.id
    history = History(root) if root.place(HISTORY).exists() else None
    state = Control.open(root).state
    snapshots, made_ms, retained = _checkpoints(root, state)
    lease = read_lease(root)
    read_ms = now_ms + steady_ms() - began_ms  # reading the rest may have taken long
    told = activity or RunActivity(RunId(0), 0)
    return Facts(
        root.uri,
        now_ms,
        alive=status.alive is not None,
        job=status.job,
        stages=status.stages,
        ended=_ended(status),
        unfinished_restore="" if state.attempt.ready else state.attempt.command,
        damaged=status.damaged,
        aborted=status.aborted,
        paused=status.paused,
        last_completed_ms=None if status.last is None else status.last.completed_ms,
        settings=told.settings,
        keep=_keep(told.settings),
        earlier=told.earlier,
        disks=told.disks,
        usual_write_ms=told.usual_write_ms,
        ahead_of_store_ms=told.ahead_of_store_ms,
        heard_ahead_ms=0 if lease is None else max(0, lease.beat_ms - read_ms),
        versions=told.versions,
        own_versions=installed(told.versions),
        sizes={} if history is None or run is None else _sizes(history, run),
        partitions=tuple(found for snapshot in snapshots for found in partitions_of(snapshot)),
        orphans=_orphans(root),
        restore_ms=None if history is None else history.last_restore_ms(),
        retained_ms=max(made_ms) - min(made_ms) if made_ms else None,
        retained=retained,
    )


def _keep(settings: Mapping[str, str]) -> Keep | None:
    """Return how long a run keeps checkpoints, None if it is not known or in words of a later version."""
    try:
        return keep_words(settings["keep"])
    except (KeyError, ValueError):
        return None


def _checkpoints(root: Root, state: ControlState) -> tuple[tuple[StageSnapshot, ...], list[int], int]:
    """Return the stages of the newest checkpoint, and when each was made that can be restored.

    The last is how many of these are no savepoints.
    """
    checkpoints = open_existing(root, state.job)
    if checkpoints is None:
        return (), [], 0
    completed = list_manifests(root, state.job).completed
    path = [one for one in completed if state.on_path(one.attempt, one.id)]
    periodic = sum(not one.kind.owned_by_user for one in path)
    stages: tuple[StageSnapshot, ...] = ()
    with suppress(DamageError, CheckpointNotFound):
        stages = checkpoints.load(path[-1].id).stages if path else ()
    return stages, [one.completed_ms for one in path], periodic


def _ended(status: JobStatus) -> str:
    """Say how the newest run has ended, if it is not alive and did not end in order."""
    return run_said(status.run, killed=status.killed) if status.broke and status.run is not None else ""


def _orphans(root: Root) -> tuple[Orphan, ...]:
    """Return the files in `state/` without a commit, of those that were there before its log was read."""
    state = root.place(STATE)
    if not state.exists():
        return ()
    files = [one for one in root.fs.get_file_info(fs.FileSelector(state.path)) if pack_name(one.base_name)]
    named = active_packs(Table.open(state))
    return tuple(
        Orphan(one.size, int(one.mtime_ns) // 1_000_000)
        for one in files
        if one.base_name not in named and one.mtime_ns is not None
    )


def partitions_of(snapshot: StageSnapshot) -> tuple[Partitions, ...]:
    """Return the bytes of each state partition of each operator of a stage, by its number."""
    return tuple(
        Partitions(snapshot.stage, operator, tuple(of.get(n, 0) for n in range(max(of) + 1)))
        for operator, of in partition_sizes(snapshot).items()
    )


def _sizes(history: History, run: RunId) -> Mapping[StageId, tuple[StateSize, ...]]:
    found: dict[StageId, list[StateSize]] = {}
    for row in history.stage_sizes(run):
        size = StateSize(CheckpointId(row["checkpoint"]), row["at_ms"], row["size_full"] or 0)
        found.setdefault(StageId(row["stage"]), []).append(size)
    return {stage: tuple(sizes[-CHECKPOINTS:]) for stage, sizes in found.items()}
