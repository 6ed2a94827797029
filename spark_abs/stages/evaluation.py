"""Each output of a batch is evaluated once, for all its consumers, also across a crash.

All files are written before the first commit of the batch, which names them. A repeated batch commits these
files to the outputs that lack them, and runs the frame only to update its state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.channels.files import Written, directory_name, write_parquet
from spark_abs.channels.staged import Files, delete_staged, find_staged, over, staging_of, sweep_staging
from spark_abs.channels.writer import ChannelWriter
from spark_abs.model import MAIN_OUTPUT, NO_BATCH, BatchId, LookupVersion
from spark_abs.plan.specs import SinkSpec, StageSpec
from spark_abs.protocol.evaluation import Consumer, Staged, Write, files_of, missing, writes
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.spark.plans import repeatable
from spark_abs.stages.activity import Activity
from spark_abs.stages.batch import Repeated
from spark_abs.stages.lookups import StageLookups
from spark_abs.store.activity import Phase

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A batch with final rows, before its first commit: files, and frames over them."""

    files: Mapping[str, Files]
    """The files to commit, by `Consumer.table`; tables that hold the batch are left out."""
    named: tuple[Staged, ...]
    """The files that the first commit names; empty if it exists."""
    frames: Mapping[str, DataFrame]
    """The outputs for sink functions; empty where no function is called."""
    lookups: tuple[LookupVersion, ...] = ()
    """The versions of lookups, which the first commit names, too."""

    def written(self, table: str) -> Written:
        """Return the files for a table, none if it holds the batch."""
        found = self.files.get(table)
        return Written() if found is None else found.written


@dataclass(slots=True)
class _Work:
    batch: BatchId
    files: dict[str, Files]
    """By table."""
    outputs: dict[str, Files]
    frames: dict[str, DataFrame]
    """Of outputs that functions take."""


class Evaluator:
    """Evaluates the outputs of one stage; used from its batch thread alone."""

    def __init__(
        self,
        ctx: RunContext,
        spec: StageSpec,
        *,
        channels: Sequence[ChannelWriter],
        tables: Sequence[tuple[SinkSpec, DeltaSink]],
        functions: Sequence[SinkSpec],
        repeatable: bool,
        row_by_row: bool,
        newest: BatchId,
        activity: Activity,
        lookups: StageLookups | None = None,
        last: Repeated | None = None,
    ) -> None:
        """Take the outputs, and delete staged files of older evaluations that nobody needs.

        Args:
            ctx: the run.
            spec: the stage.
            channels: its channels, in the order of their commits.
            tables: its Delta sinks, likewise, after the channels.
            functions: its other sinks.
            repeatable: whether its frame has the same rows however often it is evaluated.
            row_by_row: whether a batch that reads no rows has none in any output.
            newest: the newest batch that an output holds, `NO_BATCH` if none holds any.
            activity: is told which output is evaluated.
            lookups: its lookups; Spark runs its stream alone then, and the frame of a batch is made here.
            last: what outputs hold of the newest batch; needed for lookups only.
        """
        self._ctx, self._spec, self._activity = ctx, spec, activity
        self._channels = {ctx.root.channel(w.channel): w for w in channels}
        self._tables = {table.uri: (sink, table) for sink, table in tables}
        self._called = [sink.source.name for sink in functions]
        self._repeatable = {MAIN_OUTPUT: repeatable}
        self._row_by_row = row_by_row
        left = sweep_staging(ctx.root, spec.name, over(ctx.attempt, ctx.run, newest))
        self._staged = {directory: made_for.batch for directory, made_for in left.items()}
        self._lookups = lookups
        if lookups is not None:
            lookups.begin_after(last.lookups if last is not None else ())

    @contextmanager
    def evaluated(
        self, frame: DataFrame, batch: BatchId, committed: Repeated | None, *, idle: bool = False
    ) -> Iterator[Evaluated]:
        """Write the files of all outputs that lack the batch. The yielded value is valid inside the block.

        `committed` is what outputs hold of the batch.

        An `idle` batch, which reads no rows, skips a table whose rows each batch replaces once the attempt
        has written it: the batch would write the same rows. If the stage works row by row, nothing is
        evaluated, and no function is called; the first commit says that no output has rows.

        A stateful frame must be run even if nobody needs its rows, or Spark refuses the batch.

        Raises:
            DamageError: an output has committed the batch, and files of another output are gone.
        """
        for directory in [d for d, staged in self._staged.items() if staged < batch]:
            delete_staged(self._ctx.root, directory)
            del self._staged[directory]
        if idle and self._row_by_row and committed is None:
            yield Evaluated({}, tuple(Staged(c.output, c.table) for c in self._consumers()), {})
            return
        consumers = [
            consumer
            for consumer in self._consumers()
            if (committed is None or consumer.table not in committed.tables)
            and not (idle and self._is_replaced(consumer.table))
        ]
        with ExitStack() as stack:
            versions: tuple[LookupVersion, ...] = ()
            if self._lookups is not None and (committed is None or self._called or consumers):
                versions = self._lookups.choose(batch, committed.lookups if committed is not None else ())
                stack.enter_context(self._lookups.explaining(versions))
                frame = self._lookups.applied(frame, versions)
            yield self._settle(
                stack, frame, batch=batch, committed=committed, consumers=consumers, lookups=versions
            )

    def _is_replaced(self, table: str) -> bool:
        """Say whether each batch replaces the rows of a table, and a batch of this attempt did."""
        if table not in self._tables:
            return False
        sink = self._tables[table][1]
        return sink.overwrites and sink.log.last_batch() != NO_BATCH

    def _settle(
        self,
        stack: ExitStack,
        frame: DataFrame,
        *,
        batch: BatchId,
        committed: Repeated | None,
        consumers: Sequence[Consumer],
        lookups: tuple[LookupVersion, ...],
    ) -> Evaluated:
        """Use the files that a commit names, and evaluate the rest, if possible from the main output's files.

        A frame is cached only if it is read more than once.
        """
        # Files that a commit names are used, also for tables and functions that lack the rows.
        named = committed.named if committed is not None else ()
        plan, named_files = missing(consumers, named), files_of(named)
        if committed is not None and not named and plan.anew:
            self._warn(batch, plan.anew)
        done = _Work(batch, {table: self._find(one, batch) for table, one in plan.own.items()}, {}, {})
        for table, one in plan.lent.items():
            done.files[table] = self._lend(table, self._find(one, batch), batch)
        for output in dict.fromkeys(o for o in self._called if o in named_files):
            done.outputs[output] = self._find(named_files[output], batch)
            done.frames[output] = _read(self._frame(frame, output), done.outputs[output])
        # The other outputs are evaluated: into files for tables, or directly for functions.
        called = [output for output in self._called if output not in named_files]
        work = writes(plan.anew, called, self._unsure(frame, called)) if plan.anew else ()
        direct = [output for output in called if output not in {write.output for write in work}]
        # They read the main output's files: those that are named, or those that are written first because a
        # second evaluation may give other rows. Otherwise they read the batch's frame.
        over_named = MAIN_OUTPUT in named_files and bool(work or direct)
        over_written = bool(work) and work[0].output == MAIN_OUTPUT and not self._repeatable[MAIN_OUTPUT]
        reads = 0 if over_named else 1 if over_written else len(work) + len(direct)
        # Spark needs a run of the whole frame for its state: where nothing reads it, and in a repeat where
        # only functions do, which may read a part of it.
        for_state = self._lookups is None and (not reads or (committed is not None and not work))
        if reads + for_state > 1:
            _keep(stack, frame)
        if for_state:
            self._activity.enter(Phase.STATE)
            frame.write.format("noop").mode("overwrite").save()
        source = _read(frame, self._find(named_files[MAIN_OUTPUT], batch)) if over_named else frame
        for write in work:
            self._write(write, self._frame(source, write.output), done, plan.anew)
            if over_written and write.output == MAIN_OUTPUT:
                source = _read(frame, done.outputs[MAIN_OUTPUT], as_written=True)
        for output in dict.fromkeys(direct):
            done.frames[output] = self._frame(source, output)
            if output != MAIN_OUTPUT and direct.count(output) > 1:
                _keep(stack, done.frames[output])
        first = committed is None
        return Evaluated(
            done.files,
            self._names(work, consumers, done) if first else (),
            done.frames,
            lookups if first else (),
        )

    def _write(self, write: Write, rows: DataFrame, done: _Work, consumers: Sequence[Consumer]) -> None:
        """Evaluate one output into files, for all its consumers."""
        root, output, batch = self._ctx.root, write.output, done.batch
        self._activity.enter(Phase.WRITING, output)
        if write.to is None:
            name = directory_name(self._ctx.attempt, self._ctx.run, batch)
            place = f"{staging_of(self._spec.name, output)}/{name}"
            files = Files(root.top, write_parquet(rows, root.top, place))
        elif write.to.table in self._channels:
            written = self._channels[write.to.table].write_files(rows, batch)
            files = Files(root.place(write.to.table), written)
        else:
            files = self._tables[write.to.table][1].write_files(rows, batch)
        if files.place == root.top:
            self._staged |= {os.path.dirname(f.path): batch for f in files.written.files[:1]}
        done.outputs[output] = files
        for consumer in consumers:
            if consumer == write.to:
                done.files[consumer.table] = files
            elif consumer.output == output:
                done.files[consumer.table] = self._lend(consumer.table, files, batch)
        if output in self._called:
            done.frames[output] = _read(rows, files, as_written=True)

    def _lend(self, table: str, files: Files, batch: BatchId) -> Files:
        """Prepare existing files for a table: as copies, or as they are for Delta's own writer."""
        if table in self._channels:
            return self._channels[table].copy_files(files, batch)
        taker = self._tables[table][1]
        return taker.copy_files(files, batch) if taker.plain else files

    def _find(self, staged: Staged, batch: BatchId) -> Files:
        return find_staged(self._ctx.root, staged, self._ctx.attempt, batch)

    def _names(self, work: Sequence[Write], consumers: Sequence[Consumer], done: _Work) -> tuple[Staged, ...]:
        """Name all files: what is staged first, then what each table gets."""
        top = self._ctx.root.top
        staged = [
            done.outputs[w.output].name(w.output, "") for w in work if done.outputs[w.output].place == top
        ]
        return (
            *staged,
            *(
                done.files[c.table].name(c.output, c.table)
                if c.plain
                else Staged(c.output, c.table, rows=done.files[c.table].written.rows)
                for c in consumers
            ),
        )

    def _consumers(self) -> list[Consumer]:
        found = [Consumer(writer.output, table) for table, writer in self._channels.items()]
        return found + [Consumer(s.source.name, uri, t.plain) for uri, (s, t) in self._tables.items()]

    def _unsure(self, frame: DataFrame, called: Sequence[str]) -> frozenset[str]:
        """Return the outputs whose rows may differ in a second evaluation; each is analysed once."""
        for output in called:
            if output not in self._repeatable:
                self._repeatable[output] = repeatable(self._frame(frame, output))
        return frozenset(output for output, sure in self._repeatable.items() if not sure)

    def _frame(self, frame: DataFrame, output: str) -> DataFrame:
        return frame if output == MAIN_OUTPUT else self._spec.outputs[output](frame)

    def _warn(self, batch: BatchId, consumers: Sequence[Consumer]) -> None:
        log.warning(
            "batch %s of stage %s was committed to some of its outputs by a version that named no files: it "
            "is evaluated again for %s, whose rows are the same only if nothing in the stage is random",
            batch,
            self._spec.name,
            ", ".join(consumer.table for consumer in consumers),
        )


def _keep(stack: ExitStack, frame: DataFrame) -> None:
    """Cache a frame that is read more than once until the block ends."""
    stack.callback(frame.persist().unpersist)


def _read(like: DataFrame, files: Files, *, as_written: bool = False) -> DataFrame:
    """Return a frame over files; without files, a frame without rows.

    Args:
        like: the frame that the files are from, perhaps in its present definition.
        files: the files.
        as_written: whether the files were written from it and have its columns.
    """
    spark = like.sparkSession
    if not files.written.files:
        return spark.createDataFrame([], like.schema)
    reader = spark.read.option("ignoreMissingFiles", False).option("ignoreCorruptFiles", False)
    return (reader.schema(like.schema) if as_written else reader).parquet(*files.uris)
