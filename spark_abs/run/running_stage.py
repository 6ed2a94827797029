"""One stage of a run: its present runner and query."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.errors import DamageError
from spark_abs.model import NO_BATCH, BatchId, StageId, Version
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.plan.specs import StageSpec
from spark_abs.run_context import RunContext
from spark_abs.spark.file_streams import without_files
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.spark.plans import as_active
from spark_abs.stages.late_rows import LateRows
from spark_abs.stages.native import check_native
from spark_abs.stages.outputs import newest_output
from spark_abs.stages.queries import QueryStart, run_only, start_queries
from spark_abs.stages.snapshotter import Snapshotter, StageFacts
from spark_abs.stages.stage import StageRunner
from spark_abs.state.declared import Declared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_S = 0.1
_quiet = threading.Event()


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parts of a stage that stay the same over restarts."""

    spark: SparkSession
    ctx: RunContext
    graph: JobGraph
    decl: StageDecl
    spec: StageSpec
    plan: PlanFacts
    frame: DataFrame
    declared: Declared
    """The stateful functions of the frame, which count dropped rows."""
    snapshots: Snapshotter
    late: LateRows
    renew: Callable[[], DataFrame | None]
    """Creates the frame again, as a start would; None if the frame stays."""
    reopen: Callable[[], StageRunner]
    """Opens the outputs again, which fences older runs, and makes a runner with separate handles."""
    skipped: Callable[[], frozenset[str]]
    """Returns the input files that the stage does not read."""


class RunningStage:
    """Owns the runner and the query of a stage; only this object replaces them.

    Any thread may read them. All other methods are for the thread that starts the run, and later for the
    thread that watches it.
    """

    def __init__(self, parts: StageParts, runner: StageRunner) -> None:
        self._parts = parts
        self._frame = parts.frame
        self.runner = runner
        self._register()
        self.query: StreamingQuery | None = None
        """None before the first start; a restart replaces it."""
        self.halted = False
        """Whether the stage has stopped reading: an ended or missing query is then no failure."""

    @property
    def name(self) -> StageId:
        """The stage."""
        return self._parts.decl.name

    def query_start(self) -> QueryStart:
        """Return the parameters of the first query; the stage adopts the query after its start."""
        return self._start_with(self._take_first)

    def start(self) -> None:
        """Start the query from the native checkpoint."""
        self.query = self._begun()

    def run_only(self, batch: BatchId, meanwhile: Callable[[], None]) -> None:
        """Run only one planned batch, in a query that has ended when this returns.

        Raises:
            StageFailed: the batch failed; the message names the batch and the cause.
        """
        run_only(self._begun, self.runner, batch, meanwhile)

    @property
    def is_quiet(self) -> bool:
        """Whether the query has ended, or runs no batch and begins none that it has planned."""
        return self.query is None or self._is_quiet(self.query)

    def _is_quiet(self, query: StreamingQuery) -> bool:
        runner = self.runner
        return not query.isActive or runner.native.idle_at() is not None or runner.batch_lock.parked

    def restart(self, coordination: Coordination) -> None:
        """Start the stage again after its query has failed or was stopped, within the same run.

        1. Wait until all threads of the old query have ended. 2. Check the native checkpoint: without one
        a query would silently begin with batch 0. 3. Make a new frame and a new runner with new handles. 4.
        In the coordinator's thread, let the new runner take over the barriers of the old runner, which gets
        no calls after that. 5. Start the query.

        Raises:
            DamageError: the native checkpoint is missing or damaged.
            Refused: the new frame does not fit the running job.
        """
        parts = self._parts
        self.runner.batch_lock.stop()  # 1
        if self.query is not None:
            with suppress(StreamingQueryException):
                self.query.awaitTermination()
        newest = newest_output(parts.ctx, parts.graph, self.name)
        finding = check_native(parts.ctx.native(self.name), newest)  # 2
        if finding is not None:
            raise DamageError(
                f"{finding}; start the job again: the start rebuilds the stage or says what to do"
            )
        self._frame = parts.renew() or self._frame  # 3
        runner = parts.reopen()
        if not coordination.await_done(coordination.join(runner)):  # 4
            return  # the run ends with the error of the coordination
        self.runner = runner
        self._register()
        self.start()  # 5

    def halt(self) -> StreamingQueryException | None:
        """Stop the query gracefully: its batch ends; a batch planned meanwhile is left to the next run.

        Returns as `end_query`.
        """
        if self.query is None:
            return None
        self.runner.batch_lock.stop()
        self._parts.ctx.failpoint(f"end.{self.name}.halt")
        return self.end_query(self.query)

    def end_query(
        self, query: StreamingQuery, meanwhile: Callable[[], None] = lambda: None
    ) -> StreamingQueryException | None:
        """Stop a query as soon as no batch is running; return its error if it had failed before.

        An error of the stop is ignored: with Java's flight recorder, Spark does not recognise its own
        interrupt of a waiting query. A failed query has its error while it still counts as active.
        """
        try:
            while not self._is_quiet(query):
                meanwhile()
                _quiet.wait(_LOOK_S)
            return query.exception()
        finally:
            query.stop()

    def read_no_more(self) -> None:
        """Let no further batch begin; `read_on` undoes it."""
        self.halted = True
        self.runner.only = NO_BATCH

    def read_on(self) -> None:
        """Start the query of a stage that has stopped reading."""
        self.runner.only = None
        self.start()
        self.halted = False

    def _register(self) -> None:
        tables = {table: Version(version) for table, version in self._parts.plan.static_tables.items()}
        facts = StageFacts(tables, self._dropped_late, self._parts.plan.functions)
        self._parts.snapshots.register(self.name, facts, self.runner.batch_lock.wake)
        self.runner.find_query = self._find_query

    def _find_query(self) -> Any | None:
        return None if self.query is None else self.query._jsq

    def _dropped_late(self) -> int:
        """Return the number of rows dropped as late since the run began."""
        by_spark = self._parts.late.dropped(str(self.query.id)) if self.query is not None else 0
        return self._parts.declared.dropped() + by_spark

    def _begun(self) -> StreamingQuery:
        """Start a query, and wait until it has opened its sources."""
        started: list[StreamingQuery] = []
        start_queries(self._parts.spark, self._parts.ctx, [self._start_with(started.append)])
        return started[0]

    def _start_with(self, take: Callable[[StreamingQuery], None]) -> QueryStart:
        parts = self._parts
        after = parts.graph.stages_after(self.name)
        with as_active(parts.spark):
            frame = without_files(self._frame, parts.skipped())
        return QueryStart(
            parts.spec,
            frame,
            runner=self.runner,
            keeps_state=parts.plan.keeps_state,
            stages_after=after,
            started=take,
        )

    def _take_first(self, query: StreamingQuery) -> None:
        self.query = query
        self._parts.ctx.failpoint(f"start.{self.name}.query.after")
