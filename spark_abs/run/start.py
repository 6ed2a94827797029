"""The start of a run: check, take a run number, fence the run before, and close its open checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import get_args

from spark_abs.compatibility.adoption import refuse_progress
from spark_abs.compatibility.changed import carry_out, end_batches, fence_recorded
from spark_abs.compatibility.inspection import Drafted, draft, inspect, inspect_new, require_ok
from spark_abs.compatibility.restored import Past, check_functions, past_of
from spark_abs.compatibility.schema_logs import tracks_schemas
from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.logs import speak
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_BATCH, LookupVersion, StageId
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.specs import JobSpec, Restart
from spark_abs.protocol.attempt_changes import pin_lookups, start_functions
from spark_abs.protocol.control import ControlState, place_natives
from spark_abs.protocol.restarts import policy_of
from spark_abs.run.launch import Laps, Launch
from spark_abs.run.paused_sources import refuse_paused
from spark_abs.run.rebuild import Rebuild, Rebuilder
from spark_abs.run.registration import await_replaced, begin, end, refuse_namesake, refuse_second
from spark_abs.run.run import Run
from spark_abs.run.shared_disk import require_shared
from spark_abs.run_context import RunContext
from spark_abs.spark.driver import hush
from spark_abs.spark.session import check_session
from spark_abs.stages.native import check_native
from spark_abs.stages.outputs import newest_output
from spark_abs.store.clock import now_ms
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.control import Control
from spark_abs.store.lease import holding_lease
from spark_abs.store.storage import location_of

log = logging.getLogger(__name__)


def start_job(
    job: JobSpec, *, available_now: bool, takeover: bool, restart: Restart, allow_non_restored_state: bool
) -> Run:
    """Start a job; see `Job.start`.

    1. Check graph, plans and settings, on a new root also tables; nothing exists yet.  2. Claim the root;
    refuse a second run and functions that cannot continue with their state.  3. Take a run number and fence
    earlier runs.  4. Abort their open checkpoints.  5. Check the native checkpoints, and the functions again.
    6. Prepare channels and sinks.  7. Start queries and coordinator. Single stages that have lost their
    native checkpoint are rebuilt from their outputs, in 5 and at the beginning of 7. After a kill at any
    point, the next start does everything again with a newer run number.
    """
    check_session(job.spark)
    speak(job.spark)
    hush(job.spark)
    if restart not in get_args(Restart):
        raise UsageError(f"restart={restart!r} is neither 'native' nor 'checkpoint'")
    settings = job.settings
    policy = policy_of(settings)
    laps = Laps()
    drafted = draft(job)  # 1
    laps.over("plans")
    stages = [stage.name for stage in drafted.graph.stages]
    refuse_namesake(job, stages)
    new = not settings.require_root and not job.root.place(CONTROL).exists()
    looked = inspect_new(job, drafted) if new else ()  # what is refused leaves no root
    if settings.native_root:
        require_shared(job.spark, job.root.anywhere(location_of(settings.native_root)))
    control = Control.create(job.root, job.name, now_ms(), settings.require_root)  # 2
    newest = refuse_second(job, control, takeover)
    if available_now:
        refuse_paused(control.state, job.root.uri)
    natives = control.natives_at(settings.native_root)
    if restart == "checkpoint" and _back_to_checkpoint(job, drafted, takeover, allow_non_restored_state):
        newest = control.state.newest_run
        if tracks_schemas(job):  # its sources may have other columns there
            drafted = draft(job)
    elif not new and control.state.attempt.ready:
        looked = inspect(job, drafted, past_of(job.root, control.state), allow_non_restored_state).adoptions
    control.update(lambda state: place_natives(state, natives))
    drain = _unfinished_drain(job, control, available_now)
    ctx = begin(job, control, newest, takeover=takeover, bounded=available_now)  # 3, 4
    try:
        origin = _origin(control.state, ctx)
        log.info("job %s starts run %s at %s: %s", job.name, ctx.run, ctx.root.uri, origin)
        _say_pinned(job)
        with ExitStack() as starting:
            starting.enter_context(holding_lease(ctx.root, ctx.run))
            if takeover:
                await_replaced(job, stages)
            past = past_of(job.root, control.state)  # 5
            inspection = inspect(job, drafted, past, allow_non_restored_state)
            refuse_progress(looked, inspection.adoptions)
            comparison = inspection.comparison
            if comparison.rests_on_outputs:
                fence_recorded(ctx, inspection.knowledge, inspection.job, lambda: job.spark)
                comparison = require_ok(
                    inspection.knowledge.compare(inspection.job, allow_non_restored_state)
                )
            if end_batches(ctx, control, comparison, lambda: job.spark):  # its rows are in channels now
                comparison = require_ok(
                    inspection.knowledge.compare(inspection.job, allow_non_restored_state)
                )
            ctx = carry_out(ctx, control, comparison, inspection.job, inspection.adoptions)
            lost = _lost_natives(ctx, drafted.graph, past.manifest)
            started = check_functions(past, drafted.frames, drafted.plans, lost)
            control.update(lambda state: start_functions(state, ctx.run, started))
            lookups = drafted.frames.lookups
            control.update(lambda state: pin_lookups(state, ctx.run, _pinned(drafted), lookups))
            ctx, rebuilds = _rebuild(ctx, drafted, control, lost)
            job.failpoint("start.natives.after")
            laps.over("root")
            return Launch(  # 6, 7
                job,
                ctx,
                drafted,
                shapes=inspection.job.shapes,
                control=control,
                policy=policy,
                started=starting.close,
                laps=laps,
                rebuilds=rebuilds,
                drain=drain,
            ).start()
    except BaseException as error:  # of an interrupt, too: whoever caught it can start again
        end(ctx, error)
        raise


def _origin(state: ControlState, ctx: RunContext) -> str:
    """Describe from where a run resumes, for users."""
    attempt = state.attempt
    if any(run.id != ctx.run and run.attempt == attempt.id for run in state.runs):
        return f"it resumes attempt {attempt.id}"
    if attempt.checkpoint is not None:
        return f"attempt {attempt.id}, restored from checkpoint {attempt.checkpoint}"
    return "a new root"


def _say_pinned(job: JobSpec) -> None:
    """Log the tables that a run reads at a fixed version."""
    tables = (table for stage in job.stages.values() for table in stage.pinned)
    for table in dict.fromkeys(tables):
        log.info(
            "table %s is read at version %s for the whole run: use job.lookup(...) to follow it",
            table.path,
            table.version,
        )


def _pinned(drafted: Drafted) -> tuple[LookupVersion, ...]:
    """Return the lookups that are never refreshed, each at its fixed version."""
    opened = drafted.frames.lookups.values()
    return tuple(one.at for one in opened if one.lookup.max_age_ms is None)


def _unfinished_drain(job: JobSpec, control: Control, available_now: bool) -> str | None:
    """Return the savepoint of an unfinished drain; None without one.

    Raises:
        Refused: a drain is unfinished, and the run is bounded.
    """
    attempt = control.state.attempt
    name = attempt.drain
    if name is None:
        return None
    done = Checkpoints.open(job.root, job.name).summaries()
    if any(s.attempt == attempt.id and s.name == name for s in done):
        log.warning(
            "job %s was drained before savepoint %r: its event time has ended, so stages with a watermark "
            "drop all rows as late; restore an earlier checkpoint to continue event time",
            job.name,
            name,
        )
        return None
    if available_now:
        raise Refused(
            f"the job has an unfinished drain, with savepoint {name!r}: start the job without "
            "available_now, the run then finishes the drain, takes the savepoint and ends; or restore an "
            "earlier checkpoint"
        )
    log.warning("job %s resumes the drain that ends with savepoint %r", job.name, name)
    return name


def _back_to_checkpoint(job: JobSpec, drafted: Drafted, takeover: bool, leave: bool) -> bool:
    """Restore the newest intact checkpoint.

    Return False, with nothing checked, if no checkpoint was completed.
    """
    from spark_abs.restore.apply import apply
    from spark_abs.restore.prepare import prepare
    from spark_abs.restore.refusals import Force

    if not Checkpoints.open(job.root, job.name).summaries():
        log.warning(
            "job %s: restart='checkpoint' found no checkpoint at %s: the stages resume after their last "
            "batches",
            job.name,
            job.root.uri,
        )
        return False
    prepared = prepare(
        job.root,
        "latest",
        force=[Force.RUN] if takeover else [],
        fallback=True,
        native_root=job.settings.native_root,
        sinks={s.name: s.outside for s in job.sinks if s.outside is not None},
        writing=True,
        ask_kafka=False,
    )
    try:
        past = Past(job.root, Control.open(job.root).state, prepared.manifest)
        inspect(job, drafted, past, leave, at_checkpoint=True)
    except Exception:
        if prepared.prestaged is not None:
            prepared.prestaged.discard()
        raise
    apply(job.root, prepared)
    return True


def _lost_natives(ctx: RunContext, graph: JobGraph, manifest: Manifest | None) -> dict[StageId, str]:
    """Return the stages that have run but lack an intact native checkpoint, with the problem of each."""
    lost = {}
    for stage in graph.stages:
        snapshot = manifest.stage(stage.name) if manifest is not None else None
        least = max(snapshot.cut_batch if snapshot else NO_BATCH, newest_output(ctx, graph, stage.name))
        finding = check_native(ctx.native(stage.name), least)
        if finding is not None:
            lost[stage.name] = finding
    return lost


def _rebuild(
    ctx: RunContext,
    drafted: Drafted,
    control: Control,
    lost: Mapping[StageId, str],
) -> tuple[RunContext, tuple[Rebuild, ...]]:
    """Prepare the rebuild of single stages; no stage starts over silently.

    Raises:
        DamageError: a stage cannot be rebuilt, or all native checkpoints are lost, for example with a missing
            disk; the message names the stages and what to do. Nothing was changed.
    """
    graph = drafted.graph
    declared = {stage.name for stage in graph.stages}
    begun = [r.stage for r in control.state.attempt.rebuilt if not r.done and r.stage in declared]
    wanted = {**dict.fromkeys(begun, "a start was killed during its rebuild"), **lost}
    if not wanted:
        return ctx, ()
    rebuilder = Rebuilder(ctx, graph, drafted.plans, control)
    findings, rebuilds = [], []
    for stage, finding in wanted.items():
        said = f"stage {stage!r}: {finding}"
        if len(lost) < len(graph.stages):
            try:
                rebuilds.append(rebuilder.plan(stage))
            except Refused as error:
                said += f"; it cannot be rebuilt alone: {error}"
        findings.append(said)
    if len(rebuilds) == len(wanted):
        return rebuilder.prepare(rebuilds), tuple(rebuilds)
    way = (
        "start with restart='checkpoint' to restore the newest intact checkpoint, sinks included"
        if Checkpoints.open(ctx.root, ctx.job).summaries()
        else "no checkpoint was completed that could be restored: start over on a new root"
    )
    raise DamageError("native checkpoints are missing or damaged:\n" + "\n".join([*findings, way]))
