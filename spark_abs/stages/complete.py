"""Commit a batch that some outputs of a stage hold to the others, without running its query.

A start that changes the inputs of a stage needs it: first all outputs get the stage's newest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyarrow import fs

from spark_abs.channels.entries import EntryMetadata
from spark_abs.channels.staged import Files, find_staged
from spark_abs.channels.writer import ChannelWriter
from spark_abs.errors import TakenOver
from spark_abs.model import NO_BATCH, BatchId, StageId
from spark_abs.observe.held import held
from spark_abs.protocol.control import AttachedSink
from spark_abs.protocol.evaluation import Consumer, missing
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.commit_metadata import SinkMetadata
from spark_abs.sinks.delta.sink import DeltaSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Completion:
    """The result for the newest batch of a stage."""

    batch: BatchId
    """The newest one that an output holds, `NO_BATCH` if none holds any."""
    completed: tuple[str, ...] = ()
    """Tables that lacked it and got it; channels relative to the root, sinks by their location."""
    torn: tuple[str, ...] = ()
    """Tables that lack it and cannot get it: an earlier version made its first commit and named no files, or
    the table is gone. Without names the outputs of the batch are not known: a table that lacks it may have
    had no rows in it, or may have left the job before. Start the stage as it was: then all outputs get the
    batch.
    """


def complete_batch(
    ctx: RunContext,
    stage: StageId,
    attached: Iterable[AttachedSink],
    session: Callable[[], SparkSession],
) -> Completion:
    """Commit the newest batch of a stage to all outputs that took part in it. Repeatable.

    Call it when the run has begun and no query of the stage runs; older runs are fenced on all its tables.
    The batch's own first commit says which outputs it had, not the present declaration of the job. Sink
    functions are not called; a table that another root has taken over is left out.

    Args:
        ctx: the run.
        stage: the stage.
        attached: the Delta sinks that `control/` knows of.
        session: called only for a table that Delta's own writer has to write.

    Raises:
        Fenced: a newer run or attempt has taken over.
        DamageError: named files are gone; the message says what to do.
    """
    channels = {ctx.root.channel(w.channel): w for w in _channels(ctx, stage)}
    sinks = _sinks(ctx, stage, attached, session)
    takers: dict[str, ChannelWriter | DeltaSink] = {**channels, **sinks}
    taken_over = set()
    for table, taker in takers.items():
        try:
            taker.begin()
        except TakenOver:
            taken_over.add(table)
        taker.refresh()
    found = held({table: taker.log for table, taker in takers.items()})
    batch, first = found.batch, found.named
    if batch == NO_BATCH:
        return Completion(NO_BATCH)
    if first is None:
        lack = (table for table in takers if table not in taken_over and found.lacks(table))
        return Completion(batch, torn=tuple(lack))
    lacking = [
        Consumer(staged.output, staged.table, plain=staged.table not in sinks or sinks[staged.table].plain)
        for staged in first.evaluated
        if staged.table not in ("", *taken_over) and found.lacks(staged.table)
    ]
    how = missing([consumer for consumer in lacking if consumer.table in takers], first.evaluated)
    gone = tuple(consumer.table for consumer in lacking if consumer.table not in takers)
    completed = []
    for table, staged in {**how.own, **how.lent}.items():
        files = find_staged(ctx.root, staged, ctx.attempt, batch)
        taker = takers[table]
        if table in how.lent and (isinstance(taker, ChannelWriter) or taker.plain):
            files = taker.copy_files(files, batch)
        if _commit(taker, files, batch, first):
            completed.append(table)
    return Completion(batch, tuple(completed), gone)


def _commit(
    taker: ChannelWriter | DeltaSink, files: Files, batch: BatchId, first: EntryMetadata | SinkMetadata
) -> bool:
    """Commit the files that the first commit names to one table; False if it has none."""
    if isinstance(taker, DeltaSink):
        plans = first.plans if isinstance(first, SinkMetadata) else ()
        return taker.commit_batch(files, batch, plans) is not None
    marks = first if isinstance(first, EntryMetadata) else None
    taker.commit_batch(
        files.written,
        batch,
        barrier=first.barrier,
        cancel=first.cancel,
        watermark_ms=marks.watermark if marks is not None else None,
        offsets=marks.offsets if marks is not None else None,
    )
    return True


def _channels(ctx: RunContext, stage: StageId) -> Sequence[ChannelWriter]:
    """Open every channel that the stage has ever had, also channels that are no longer declared."""
    selector = fs.FileSelector(ctx.root.path("channels"), allow_not_found=True)
    names = sorted(info.base_name for info in ctx.root.fs.get_file_info(selector))
    found = []
    for name in names:
        of, _, output = name.partition(".")
        if of == stage:
            with suppress(FileNotFoundError):
                found.append(
                    ChannelWriter(
                        ctx.root, ctx.job, stage=stage, output=output, attempt=ctx.attempt, run=ctx.run
                    )
                )
    return found


def _sinks(
    ctx: RunContext, stage: StageId, attached: Iterable[AttachedSink], session: Callable[[], SparkSession]
) -> Mapping[str, DeltaSink]:
    found = {}
    for sink in attached:
        if sink.stage == stage and sink.version is None:
            with suppress(FileNotFoundError):
                writer = ctx.writer(stage, sink.sink)
                table = DeltaSink(
                    ctx.root,
                    sink.table,
                    writer=writer,
                    run=ctx.run,
                    session=session,
                    key=sink.key,
                    overwrites=sink.overwrites,
                    changes=sink.changes,
                )
                found[table.uri] = table
    return found
