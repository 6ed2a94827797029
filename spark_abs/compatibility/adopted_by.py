"""Which stage of a job adopts which of some plain queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from spark_abs.compatibility.adoption import is_open
from spark_abs.compatibility.restored import past_of
from spark_abs.errors import UsageError
from spark_abs.manifests.find import list_manifests
from spark_abs.model import CheckpointId, StageId
from spark_abs.plan.specs import JobSpec, StageSpec
from spark_abs.stages.native import NativeLog
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table


def with_adoptions(job: JobSpec, checkpoints: Sequence[Place]) -> JobSpec:
    """Return a job whose stages adopt the queries that have written the tables of their sinks.

    Raises:
        UsageError: no stage, or several, can adopt a query; or several queries have written one table.
        DamageError: a checkpoint or a log cannot be read.
    """
    writes = [
        (sink.source.stage, table)
        for sink in job.sinks
        if sink.table is not None and (table := Table.find(job.root.storage.place(sink.table))) is not None
    ]
    stages: dict[StageId, StageSpec] = dict(job.stages)
    given: dict[StageId, Place] = {}
    for place in checkpoints:
        query = NativeLog(place).query_id()
        found = sorted({stage for stage, table in writes if table.transaction(query) is not None})
        if len(found) != 1:
            said = f"stages {' and '.join(found)} write" if found else "no stage of the job writes"
            raise UsageError(
                f"{said} the tables of query {query} at {place}: declare one stage whose sinks are the Delta "
                "tables of this query, or leave its checkpoint out"
            )
        if found[0] in given:
            raise UsageError(
                f"stage {found[0]!r} cannot adopt two queries: those at {given[found[0]]} and {place} have "
                "written tables of its sinks"
            )
        given[found[0]] = place
        stages[found[0]] = replace(stages[found[0]], adopt=place.uri)
    return replace(job, stages=MappingProxyType(stages))


def waits_for_query(job: JobSpec) -> StageId | None:
    """Return a stage that has still to adopt its query; None if none has."""
    past = past_of(job.root, Control.open(job.root).state) if job.root.place(CONTROL).exists() else None
    return next((stage for stage in job.stages if is_open(job, job.root, past, stage)), None)


def savepoint_of(root: Root, name: str) -> CheckpointId | None:
    """Return the newest savepoint of a name; None if there is none."""
    if not root.place(CONTROL).exists():
        return None
    completed = list_manifests(root, Control.open(root).state.job).completed
    return max((s.id for s in completed if s.name == name), default=None)
