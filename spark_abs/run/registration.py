"""Claim a root for a run, and release it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

from deltalake.exceptions import DeltaError

from spark_abs.errors import AbsError, RunAlive, UsageError
from spark_abs.manifests.manifest_table import Checkpoints, abort_open
from spark_abs.model import RunId, StageId
from spark_abs.plan.specs import JobSpec, query_name
from spark_abs.protocol import control as ledger
from spark_abs.run_context import RunContext
from spark_abs.snapshots.materialise import clear_ahead
from spark_abs.spark.causes import chain_of, one_line
from spark_abs.spark.plans import batches_retained
from spark_abs.store.clock import now_ms, steady_ms
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.lease import own_lease, read_lease, renew

log = logging.getLogger(__name__)

_LEASE_POLL_S = 0.2


def refuse_second(job: JobSpec, control: Control, takeover: bool) -> RunId | None:
    """Refuse to start beside a live run unless `takeover` replaces it; return the newest run.

    Raises:
        RunAlive: the message has host, process and age of the live run.
    """
    newest = control.state.newest_run
    lease, now = read_lease(job.root), now_ms()
    if lease is not None and not takeover and lease.alive(now, job.settings.lease_timeout_ms):
        age_s = (now - lease.beat_ms) / 1000
        raise RunAlive(
            f"job {job.name!r} is already running: run {lease.run}, process {lease.pid} on {lease.host}, "
            f"last heard of {age_s:.0f} s ago; stop it, or start with takeover=True to fence it"
        )
    return newest


def refuse_namesake(job: JobSpec, stages: Sequence[StageId]) -> None:
    """Refuse to start beside a job of the same name in one session: names of queries are unique in Spark.

    Raises:
        UsageError: the message names the running queries.
    """
    lease = read_lease(job.root)
    if lease is not None and not lease.ended and lease.is_ours():
        return  # this very job runs here, and ends its queries as soon as it is replaced
    taken = _active(job, stages)
    if taken:
        raise UsageError(
            f"the session already runs {', '.join(taken)} of another job with the name {job.name!r}: rename "
            "this job, stop the running job, or start this job in a separate session, spark.newSession()"
        )


def await_replaced(job: JobSpec, stages: Sequence[StageId]) -> None:
    """Wait until the queries of a replaced run in the same session have ended.

    Raises:
        RunAlive: queries have not ended within the time of a lease; the message names them.
    """
    until, pause = steady_ms() + job.settings.lease_timeout_ms, threading.Event()
    while left := _active(job, stages):
        if steady_ms() > until:
            raise RunAlive(
                f"the replaced run is still running {', '.join(left)} in this session, until the current "
                "batch ends: start the job again after that"
            )
        pause.wait(_LEASE_POLL_S)


def _active(job: JobSpec, stages: Sequence[StageId]) -> list[str]:
    """Return the names of queries in the session that equal names of a job's stages."""
    names = {query_name(job.name, stage) for stage in stages}
    return sorted(query.name for query in job.spark.streams.active if query.name in names)


def begin(
    job: JobSpec, control: Control, newest: RunId | None, *, takeover: bool, bounded: bool
) -> RunContext:
    """Take a run number, fence the runs before it and abort their open checkpoints.

    With `takeover`, wait until the replaced run has ended or fallen silent.

    Args:
        job: the job.
        control: its control table.
        newest: the newest run when no run was seen alive.
        takeover: whether to replace a live run, also one that began after `newest`.
        bounded: whether the run ends with its input.

    Raises:
        RunAlive: another run has begun meanwhile.
        AttemptNotReady: a restore was begun and not finished.
    """

    def begun(state: ledger.ControlState) -> ledger.ControlState:
        now = state.newest_run
        if now != newest and not takeover:
            raise RunAlive(
                f"run {now} of job {job.name!r} has begun meanwhile: stop it, or start with takeover=True "
                "to fence it"
            )
        refuse_second(job, control, takeover)  # that run was there and has taken the lease since
        return ledger.begin_run(state, socket.gethostname(), os.getpid(), now_ms())

    before = read_lease(job.root)
    job.failpoint("start.run.before")
    state = control.update(begun)
    run = state.runs[-1].id
    checkpoints = Checkpoints.open(job.root, job.name)
    job.failpoint("start.run.after")
    checkpoints.fence(run)
    job.failpoint("start.fence.after")
    if takeover and before is not None:
        # The replaced run sees the fence and ends its queries; two must not run on one native checkpoint.
        pause = threading.Event()
        while (found := read_lease(job.root)) and found.run < run and not found.ended:
            if now_ms() - found.beat_ms >= job.settings.lease_timeout_ms or not found.alive(now_ms(), 2**62):
                break
            pause.wait(_LEASE_POLL_S)
    ctx = RunContext(
        root=job.root,
        job=job.name,
        attempt=state.attempt.id,
        natives=state.attempt.natives,
        directories=state.attempt.directories,
        starts=state.attempt.first_positions,
        in_order_since=ledger.in_order_since(state, run),
        identity=state.attempt.root,
        run=run,
        floor=state.last_claimed,
        control_version=control.version,
        settings=job.settings,
        batches_retained=batches_retained(job.spark),
        bounded=bounded,
        failpoint=job.failpoint,
    )
    renew(job.root, own_lease(run, now_ms()), now_ms())  # not from a newer run: this one may have been frozen
    try:
        clear_ahead(job.root.anywhere(ctx.natives), run)
        job.failpoint("start.abort.before")
        abort_open(control, checkpoints, run)
        job.failpoint("start.abort.after")
        here = f"{socket.gethostname()}:{os.getpid()}"
        given = ctx.settings.given()
        row = HistoryRow(now_ms(), HistoryEvent.RUN_STARTED, ctx.attempt, run, detail=here, settings=given)
        History(job.root).append([row])
        return replace(ctx, control_version=control.version)
    except BaseException as error:
        end(ctx, error)
        raise


def end(ctx: RunContext, how: str | BaseException) -> None:
    """Record how a run ended and release the lease; harmless for a replaced run.

    A second call changes nothing: the first end counts. `history/` gets one row with the full text of the
    error.

    Args:
        ctx: the run.
        how: `stopped` and the like, or the error that ended it.
    """
    now = now_ms()
    said = how if isinstance(how, str) else one_line(f"failed: {how}")
    news: list[bool] = []

    def change(state: ledger.ControlState) -> ledger.ControlState:
        after = ledger.end_run(state, ctx.run, said)
        news[:] = [after != state]
        return after

    try:
        Control.open(ctx.root).update(change)
        if news[0]:
            whole = said if isinstance(how, str) else f"failed: {chain_of(how)}"
            row = HistoryRow(now, HistoryEvent.RUN_ENDED, ctx.attempt, ctx.run, detail=whole)
            History(ctx.root).append([row])
    except (AbsError, DeltaError, OSError) as error:
        log.warning("the end of run %s could not be recorded: %s", ctx.run, error)
    try:
        renew(ctx.root, own_lease(ctx.run, now), now, ended=True)
    except OSError as error:
        log.warning("the lease of run %s could not be released: %s", ctx.run, error)
