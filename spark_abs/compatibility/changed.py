"""Prepare the stages of a changed job for their next start.

Nothing is changed before the comparison accepts all stages. Then one commit to `control/` decides: without
it, files written before are ignored; after it, the next start continues like that of an unchanged job.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError

from spark_abs.compatibility.adoption import Adoption, adopt
from spark_abs.compatibility.recorded import Declared, Knowledge
from spark_abs.errors import AbsError, Fenced, Refused, TakenOver
from spark_abs.model import Position, StageId, app_id, channel_id, dumps_position
from spark_abs.protocol.attempt import Attempt, Rebuilt
from spark_abs.protocol.attempt_changes import record_change
from spark_abs.protocol.changes import Comparison
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.snapshots.materialise import fresh_query_id
from spark_abs.snapshots.rearrange import finish_batch, rearrange
from spark_abs.stages.complete import complete_batch
from spark_abs.stages.native import NativeLog
from spark_abs.store.control import Control
from spark_abs.store.fence import fence_run
from spark_abs.store.lease import Heartbeat
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def fence_recorded(
    ctx: RunContext, knowledge: Knowledge, declared: Declared, session: Callable[[], SparkSession]
) -> None:
    """Fence older runs on every recorded output of the job, so that they can no longer write.

    Otherwise a frozen driver could commit a batch between the comparison and the changes based on it, or to a
    sink that has left the job. If the table of such a sink cannot be fenced, the start goes on.

    Raises:
        Fenced: a newer run has taken over.
    """
    stays = {(shape.stage, sink, table) for shape in declared.shapes for sink, table in shape.tables.items()}
    for stage, outputs, tables in knowledge.outputs(declared):
        for output in outputs:
            place = ctx.root.place(ctx.root.channel(channel_id(stage, output)))
            with suppress(FileNotFoundError):
                fence_run(Table.open(place), ctx.job, ctx.run, app_id(ctx.job, stage, output, ctx.attempt))
        for sink, table in tables.items():
            open_sink = partial(_sink, ctx, stage, sink, table, session)
            with suppress(FileNotFoundError, TakenOver):  # none of ours gets there any more
                if (stage, sink, table) in stays:
                    open_sink().begin()
                else:
                    _fence_left(open_sink, sink, table)
    ctx.failpoint("change.fence.after")


def _sink(
    ctx: RunContext, stage: StageId, sink: str, table: str, session: Callable[[], SparkSession]
) -> DeltaSink:
    writer, since = ctx.writer(stage, sink), ctx.in_order_since
    return DeltaSink(ctx.root, table, writer=writer, run=ctx.run, session=session, in_order_since=since)


def _fence_left(open_sink: Callable[[], DeltaSink], sink: str, table: str) -> None:
    try:
        open_sink().fence_older()
    except (FileNotFoundError, Fenced):
        raise
    except (AbsError, DeltaError, OSError) as error:
        log.warning(
            "table %s of sink %s, which the job has no more, could not be fenced: a driver of an earlier run "
            "that still lives may write one more batch there: %s",
            *(table, sink, error),
        )


def end_batches(
    ctx: RunContext, control: Control, comparison: Comparison, session: Callable[[], SparkSession]
) -> bool:
    """Write unfinished batches to their missing outputs and finish them; return whether there were any.

    Raises:
        Fenced: a newer run has taken over.
        DamageError: files of a batch are gone.
        Refused: the table of an unfinished batch is gone.
    """
    for change in comparison.stages:
        if change.ends_batch:
            native = ctx.native(change.stage)
            ctx.failpoint(f"change.{change.stage}.finish.before")
            done = complete_batch(ctx, change.stage, control.state.sinks, session)
            if done.torn:
                raise Refused(
                    f"stage {change.stage!r}: batch {done.batch} is incomplete and cannot be written to "
                    f"{', '.join(done.torn)}: start the unchanged job once, then change it"
                )
            finish_batch(native, NativeLog(native).newest_planned())
            ctx.failpoint(f"change.{change.stage}.finish.after")
    return any(change.ends_batch for change in comparison.stages)


def carry_out(
    ctx: RunContext,
    control: Control,
    comparison: Comparison,
    declared: Declared,
    adoptions: Sequence[Adoption] = (),
) -> RunContext:
    """Apply the comparison to the stages and record the declared job; returns the new context.

    1. Write native checkpoints with rearranged sources, and of adopted queries, into new directories.
    2. Record directories, first positions and shapes: one commit.

    Raises:
        Fenced: a newer run has taken over.
        DamageError: a native checkpoint cannot be read.
    """
    heartbeat = partial(Heartbeat(ctx.root, control), ctx.run)
    attempt = control.state.attempt
    moved = [  # 1
        _rearranged(ctx, attempt, change.stage, change.layout.sources, heartbeat)
        for change in comparison.stages
        if change.layout is not None
    ]
    moved += [adopt(ctx, _number(ctx, attempt, a.stage), a, heartbeat) for a in adoptions]
    ctx.failpoint("change.record.before")
    shapes = tuple(replace(s, outputs=dict.fromkeys(s.outputs, "")) for s in declared.shapes)
    state = control.update(lambda state: record_change(state, ctx.run, shapes, moved, comparison))  # 2
    ctx.failpoint("change.record.after")
    return replace(ctx, directories=state.attempt.directories, starts=state.attempt.first_positions)


def _rearranged(
    ctx: RunContext,
    attempt: Attempt,
    stage: StageId,
    sources: Sequence[int | Position | None],
    heartbeat: Callable[[], None],
) -> Rebuilt:
    """Write a stage's native checkpoint into a directory that no start has used, and return its record."""
    native = ctx.native(stage)
    record = Rebuilt(stage, _number(ctx, attempt, stage), fresh_query_id(), None, done=True)
    target = replace(ctx, directories={stage: record.directory}).native(stage)
    given = [json.dumps(dumps_position(s)) if isinstance(s, Position) else s for s in sources]
    ctx.failpoint(f"change.{stage}.write.before")
    rearrange(
        native,
        target,
        batch=NativeLog(native).newest_committed(),
        query_id=record.query,
        sources=given,
        heartbeat=heartbeat,
    )
    ctx.failpoint(f"change.{stage}.write.after")
    return record


def _number(ctx: RunContext, attempt: Attempt, stage: StageId) -> int:
    """Return the number of a directory that no start has used."""
    before = attempt.rebuilt_stage(stage)
    return max(int(ctx.run), 2 if before is None else before.number + 1)
