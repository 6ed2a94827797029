"""Start a stage with lookups: a query of its stream, and its function for each batch."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from spark_abs.catalog.names import quoted
from spark_abs.errors import DamageError
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import LookupVersion, StageId
from spark_abs.plan.columns import narrowed, widened
from spark_abs.plan.frames import Frames
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.plan.specs import JobSpec
from spark_abs.run_context import RunContext
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.lookups import StageLookups

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def open_lookups(
    job: JobSpec, ctx: RunContext, graph: JobGraph, drafts: Frames, stage: StageDecl
) -> StageLookups | None:
    """Open the lookups of a stage, None if it has none."""
    spec = job.stages[stage.name]
    if not spec.lookups:
        return None
    calls = any(s.source.stage == stage.name and s.function is not None for s in job.sinks)
    first = calls and not graph.consumed(stage.name)  # its functions see a batch that no commit may name
    return StageLookups(
        ctx,
        spec,
        opened=drafts.lookups,
        spark=job.spark,
        stream=partial(_whole, drafts, stage),
        written_down=first,
        checkpointed=_checkpointed(ctx, stage.name),
    )


def _checkpointed(ctx: RunContext, stage: StageId) -> tuple[LookupVersion, ...]:
    """Return the lookups' versions at the attempt's newest checkpoint.

    After a restore all are chosen anew.
    """
    checkpoints = Checkpoints.open(ctx.root, ctx.job)
    mine = [summary.id for summary in checkpoints.summaries() if summary.attempt == ctx.attempt]
    with suppress(DamageError):  # it stands in nobody's way: a newer version is chosen
        snapshot = checkpoints.load(max(mine)).stage(stage) if mine else None
        return snapshot.lookups if snapshot is not None else ()
    return ()


def _whole(drafts: Frames, stage: StageDecl, batch: DataFrame) -> DataFrame:
    """Return a batch of a stage's stream with all columns of the channel."""
    return widened(batch, stage.inputs[0], drafts.schemas[stage.inputs[0]]) if stage.inputs else batch


def query_frame(frames: Frames, plan: PlanFacts, stage: StageDecl) -> DataFrame:
    """Return the frame that Spark runs for a stage.

    With lookups this is its stream, with the used columns.
    """
    stream = frames.streams.get(stage.name)
    if stream is None:
        return frames.stages[stage.name]
    if not stage.inputs or plan.columns is None:
        return stream
    channel = stage.inputs[0]
    used = narrowed(frames.schemas[channel], plan.columns.get(channel, frozenset()))
    return stream.select(*map(quoted, used.names))
