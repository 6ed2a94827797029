"""Whether a declared job can continue with the data of its root, for a start and for `check`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial

from spark_abs.channels.schema import delta_schema
from spark_abs.channels.writer import check_channel
from spark_abs.compatibility.adoption import Adoption, goes_on, is_open, plan_adoption, why_too_late
from spark_abs.compatibility.existing import refuse_rows_of_others
from spark_abs.compatibility.kafka import require_records
from spark_abs.compatibility.recorded import Declared, Knowledge, declare
from spark_abs.compatibility.restored import Past, check_functions, check_restored, past_of
from spark_abs.compatibility.same_tables import refuse_moved_sink, require_same_table
from spark_abs.compatibility.schema_logs import copied_logs
from spark_abs.errors import AbsError, DamageError, GraphError, Refused, UsageError
from spark_abs.manifests.find import check_savepoint_name, resolve
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import LookupVersion, StageId, channel_id
from spark_abs.plan.frames import Frames, build_frames, check_frames, draft_gate
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.lookups import open_lookups
from spark_abs.plan.specs import JobSpec
from spark_abs.plan.tables import refuse_around_root, refuse_own_reads, refuse_shared_sinks
from spark_abs.protocol.changes import Comparison, Recorded, Verdict
from spark_abs.protocol.compare import compare
from spark_abs.protocol.restarts import policy_of
from spark_abs.settings import WatermarkCheck
from spark_abs.sinks.delta.create import check_sink
from spark_abs.sinks.registry import require_supported
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.spark.plans import refuse_unsupported_session
from spark_abs.spark.session import (
    apply_storage_conf,
    check_session,
    connectors,
    refuse_connect,
    require_packages,
)
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.control import Control
from spark_abs.store.root import Root

log = logging.getLogger(__name__)


class Checked(BaseException):
    """Ends a script after the check of its job; a script's `except Exception` does not catch it."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__("checked")
        self.comparison = comparison


Check = Callable[[JobSpec, bool], Comparison]
"""Checks a job; the second argument is its `allow_non_restored_state`."""

instead_of_start: ContextVar[Check] = ContextVar("spark_abs.instead_of_start")
"""Called in place of the start of a job while `spark-abs check` runs the job's script."""


def refuse_wrapped() -> None:
    """Refuse calls of wrapped queries while `spark-abs check` runs the script, and under Spark Connect.

    Raises:
        UsageError: `check` runs the script, or the environment asks for Spark Connect.
    """
    refuse_connect("a wrapped query")
    if instead_of_start.get(None) is not None:
        raise UsageError(
            "`check` cannot check a wrapped query: the script starts such a query itself, and nothing was "
            "started. Check scripts that declare a job"
        )


@dataclass(frozen=True, slots=True)
class Drafted:
    """A checked declaration of a job; nothing of the job exists yet."""

    graph: JobGraph
    frames: Frames
    plans: Mapping[StageId, PlanFacts]


def draft(job: JobSpec) -> Drafted:
    """Check the session, the settings, the graph of a job and the plans of its stages; nothing exists yet.

    A start, `check` and `explain` begin with this. Afterwards the session has the settings of the job's
    stores.

    Raises:
        GraphError: the graph cannot run.
        UsageError: a job cannot run on this session.
        ConfigError: settings conflict.
    """
    graph = job.graph()
    check_session(job.spark)
    require_packages(job.spark, connectors(job.locations))
    refuse_unsupported_session(job.spark)
    if job.settings.stop_savepoint:
        check_savepoint_name(f"{job.settings.stop_savepoint}-1")
    policy_of(job.settings)
    if kept := apply_storage_conf(job.spark, job.root.storage, job.locations):
        log.info("the session keeps the settings of the job's stores until it ends: %s", kept)
    refuse_around_root((sink.written for sink in graph.sinks if sink.written is not None), job.root)
    refuse_shared_sinks(graph.sinks, job.root.storage)
    lookups = open_lookups(job, _pinned(job))
    with copied_logs(job) as tracking:
        frames = build_frames(
            job,
            graph,
            open_gate=lambda _, *given: draft_gate(job.spark, *given),
            lookups=lookups,
            tracking=tracking,
        )
    plans, doubts = check_frames(graph, frames)
    refuse_own_reads(graph, plans, job.root.storage)
    check = job.settings.watermark_check
    if doubts and check is WatermarkCheck.ERROR:
        raise GraphError("\n".join(doubts))
    for doubt in doubts if check is WatermarkCheck.WARN else ():
        log.warning("%s", doubt)
    return Drafted(graph, frames, plans)


def _pinned(job: JobSpec) -> tuple[LookupVersion, ...]:
    """Return the recorded versions of lookups that are never refreshed."""
    never = any(lookup.max_age_ms is None for spec in job.stages.values() for lookup in spec.lookups)
    if not never or not job.root.place(CONTROL).exists():
        return ()
    try:
        return Control.open(job.root).state.attempt.lookups
    except DamageError:  # it was never recorded
        return ()


def check_job(
    job: JobSpec, leave: bool, *, root: Root | None = None, to: str | int | None = None
) -> Comparison:
    """Return the effect of a start on each stage; starts and writes nothing.

    Args:
        job: the declarations.
        leave: as `allow_non_restored_state` of the start.
        root: the root to compare with, if not the job's own.
        to: compare as if the job had been restored to this checkpoint: an id, the name of a savepoint, or
            `latest`.

    Raises:
        GraphError: the job cannot run at all.
        CheckpointNotFound: there is no such checkpoint.
        DamageError: the records of the root cannot be read.
    """
    return check_drafted(job, draft(job), leave, root=root, to=to)


def check_drafted(
    job: JobSpec, drafted: Drafted, leave: bool, *, root: Root | None = None, to: str | int | None = None
) -> Comparison:
    """Return the result of `check_job` for a job that `draft` has checked."""
    at = root or job.root
    if not at.place(CONTROL).exists():
        declared = declare(job, drafted.graph, drafted.frames, drafted.plans)
        first = compare(Recorded("a new root"), declared.shapes, begin=declared.begin)
        adoptions, reasons = adopted(job, at, None, drafted)
        obstacles = [*_obstacles(_tables(job, drafted, at, None)), *reasons]
        return replace(noted(first, adoptions), obstacles=tuple(obstacles))
    state = Control.open(at).state
    past = past_of(at, state)
    if to is not None:
        checkpoints = Checkpoints.open(at, state.job)
        past = replace(past, manifest=checkpoints.load(resolve(to, checkpoints.summaries(), state).id))
    inspection = inspect(job, drafted, past, leave, at_checkpoint=to is not None, refuse=False)
    obstacles = list(inspection.comparison.obstacles)
    if not state.attempt.ready and to is None:
        obstacles.append(f"a restore is not finished: run `{state.attempt.command}` again")
    if state.job != job.name:
        obstacles.append(f"{at.uri} belongs to job {state.job!r}, not to {job.name!r}")
    return replace(inspection.comparison, obstacles=tuple(obstacles))


@dataclass(frozen=True, slots=True)
class Inspected:
    """A declared job, and its comparison with the records of its root."""

    job: Declared
    knowledge: Knowledge
    comparison: Comparison
    adoptions: tuple[Adoption, ...] = ()


def inspect(
    job: JobSpec,
    drafted: Drafted,
    past: Past,
    leave: bool,
    *,
    at_checkpoint: bool = False,
    refuse: bool = True,
) -> Inspected:
    """Compare a job with the records of its root; writes nothing.

    Args:
        job: the declarations.
        drafted: the result of `draft` for them.
        past: the records of the root.
        leave: whether state, positions and unread rows may be left behind.
        at_checkpoint: whether the job continues from the checkpoint of `past` instead of its last batches.
        refuse: whether obstacles are raised or returned.

    Raises:
        Refused: the job cannot continue as declared; the message says which stages and what to do.
        UsageError: the schema of a table differs from the schema of the sink's rows.
        DamageError: the records of the root cannot be read.
    """
    checks = _checks(job, drafted, past, at_checkpoint)
    obstacles = [] if refuse else list(_obstacles(checks))
    for check in checks if refuse else ():
        check()
    declared = declare(
        job, drafted.graph, drafted.frames, drafted.plans
    )  # after the checks: functions then say their past
    knowledge = Knowledge(past.root, past.control, past.manifest, at_checkpoint=at_checkpoint)
    adoptions, reasons = adopted(job, past.root, past, drafted, at_checkpoint=at_checkpoint)
    if refuse and reasons:
        raise Refused("\n".join(reasons))
    comparison = noted(knowledge.compare(declared, leave), adoptions)
    comparison = replace(comparison, obstacles=(*obstacles, *reasons))
    if refuse:
        require_ok(comparison)
    return Inspected(declared, knowledge, comparison, adoptions)


def inspect_new(job: JobSpec, drafted: Drafted) -> tuple[Adoption, ...]:
    """Check the first start on a root that does not exist yet; writes nothing.

    Returns the queries that stages adopt.

    Raises:
        Refused: a table has rows of other writers, or a query cannot be adopted.
        UsageError: the schema of a table does not fit the rows.
    """
    for check in _tables(job, drafted, job.root, None):
        check()
    adoptions, reasons = adopted(job, job.root, None, drafted)
    if reasons:
        raise Refused("\n".join(reasons))
    return adoptions


def adopted(
    job: JobSpec, root: Root, past: Past | None, drafted: Drafted, at_checkpoint: bool = False
) -> tuple[tuple[Adoption, ...], tuple[str, ...]]:
    """Return the queries that stages adopt, and the reasons why queries cannot be adopted."""
    found, reasons = [], []
    state = None if past is None else past.control
    for stage in () if at_checkpoint else drafted.plans:
        if is_open(job, root, past, stage):
            try:
                found.append(plan_adoption(job, root, state, stage, drafted.plans[stage]))
            except (AbsError, OSError) as error:
                reasons.append(str(error))
        elif job.stages[stage].adopt is not None:
            if late := why_too_late(job, root, stage):
                reasons.append(late)
            elif state is not None and (said := goes_on(job, root, state, stage)):
                log.warning("%s", said)
    return tuple(found), tuple(reasons)


def noted(comparison: Comparison, adoptions: Sequence[Adoption]) -> Comparison:
    """Note in a comparison which stages adopt queries; their sources continue at the queries' positions."""
    said = {adoption.stage: str(adoption) for adoption in adoptions}
    stages = []
    for s in comparison.stages:
        if s.stage in said:
            s = replace(s, notes=(said[s.stage], *(() if s.verdict is Verdict.NEW else s.notes)))
        stages.append(s)
    return replace(comparison, stages=tuple(stages))


def require_ok(comparison: Comparison) -> Comparison:
    """Return the comparison if it lets the job start.

    Raises:
        Refused: the comparison does not let the job start; the message says why.
    """
    if comparison.refused:
        raise Refused(comparison.reasons())
    return comparison


def _checks(
    job: JobSpec, drafted: Drafted, past: Past, at_checkpoint: bool
) -> Iterator[Callable[[], object]]:
    graph, drafts, root = drafted.graph, drafted.frames, past.root
    for record in past.control.outside:
        yield partial(require_supported, record.kind, record.settings)
    if at_checkpoint:
        yield partial(check_restored, past, drafts, drafted.plans)
    else:
        yield partial(check_functions, past, drafts, drafted.plans)
    for stage in graph.stages:
        for output in graph.consumed(stage.name):
            channel = channel_id(stage.name, output)
            yield partial(check_channel, root, channel, drafts.schemas[channel])
    for stage in graph.stages:
        if kafka := drafted.plans[stage.name].kafka:
            yield partial(require_records, job.spark, stage.name, kafka, past, at_checkpoint)
    for sink in job.sinks:
        yield partial(refuse_moved_sink, sink, past.control, root.storage)
        if not at_checkpoint:
            yield partial(require_same_table, sink, past)
    yield from _tables(job, drafted, root, past)


def _tables(job: JobSpec, drafted: Drafted, root: Root, past: Past | None) -> Iterator[Callable[[], object]]:
    """Yield one check for each table of a sink; the tables may be older than the root."""
    state = None if past is None else past.control
    for spec in job.sinks:
        table = spec.table or spec.epoch_table
        if table is not None and spec.delta is not None:
            schema, place = drafted.frames.schemas[spec.source.channel], root.storage.place(table)
            yield partial(check_sink, place, schema, spec.delta, job.spark)
        if spec.outside is not None:
            yield partial(spec.outside.check, delta_schema(drafted.frames.schemas[spec.source.channel]))
        if not is_open(job, root, past, spec.source.stage):
            yield partial(refuse_rows_of_others, job, spec, root, state)


def _obstacles(checks: Iterator[Callable[[], object]]) -> Iterator[str]:
    for check in checks:
        try:
            check()
        except (AbsError, OSError) as error:
            yield str(error)
