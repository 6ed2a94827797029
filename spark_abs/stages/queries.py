"""Starting the native queries of stages."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from spark_abs.errors import StageFailed
from spark_abs.model import PROVIDER_KEY, PROVIDERS, BatchId
from spark_abs.plan.specs import StageSpec, query_name
from spark_abs.run_context import RunContext
from spark_abs.snapshots.layout import PARTITIONS_KEY
from spark_abs.spark.causes import cause_of, is_slow_start
from spark_abs.spark.driver import make_pool
from spark_abs.spark.local_disk import local_disk_conf
from spark_abs.spark.plans import task_slots
from spark_abs.stages.native import clear_leftovers, clear_unplanned, forget_plans
from spark_abs.stages.partitions import partitions_of, warn
from spark_abs.stages.stage import StageRunner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_SOURCES_POLL_S = 0.05
_BATCH_POLL_S = 0.02
_MORE_STARTS = 3
_starting = threading.Lock()
"""A start changes settings of a session on which other jobs may start queries."""
_copying = threading.Lock()
"""A query copies the settings of its session while it is started: so stages set theirs one at a time."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueryStart:
    """The parameters of the start of a stage's query."""

    spec: StageSpec
    frame: DataFrame
    runner: StageRunner
    keeps_state: bool
    stages_after: int
    """The most stages that its rows go through."""
    started: Callable[[StreamingQuery], None]
    """Called with the query when it has opened its sources, in any thread."""


def start_queries(spark: SparkSession, ctx: RunContext, starts: Sequence[QueryStart]) -> None:
    """Start queries from their native checkpoints, in the given order, and wait until all have their sources.

    As many at a time as there are cores: the start of the gates' processes takes most of the time.

    Raises:
        Exception: the error of a query's start or of `started`. Later queries are then not started.
    """
    with _starting:
        local = all(ctx.native(start.spec.name).local for start in starts)
        conf = local_disk_conf(spark) if local else {}
        # While they open their sources: those ask the session itself, and not the copy that a query has.
        with session_conf(spark, conf), ThreadPoolExecutor(_at_a_time(), "spark-abs-start") as pool:
            begun = [pool.submit(_start, spark, ctx, start, bool(conf)) for start in starts]
            try:
                wait(begun, return_when=FIRST_EXCEPTION)
            finally:  # of an interrupt, too
                for one in begun:
                    one.cancel()
        for one in begun:
            if not one.cancelled():
                one.result()


def _at_a_time() -> int:
    return max(1, os.cpu_count() or 1)


def _start(spark: SparkSession, ctx: RunContext, start: QueryStart, clear: bool) -> None:
    spec, native = start.spec, ctx.native(start.spec.name)
    clear_unplanned(native)
    if clear:
        clear_leftovers(native)
    writer = (
        start.frame.writeStream.outputMode(spec.output_mode)
        .queryName(query_name(ctx.job, spec.name))
        .option("checkpointLocation", native.uri)
        .foreachBatch(start.runner.run_batch)
    )
    if ctx.bounded and not spec.channels:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=spec.trigger or "0 seconds")
    query = _begun(spark, ctx, start, writer)
    for _ in range(_MORE_STARTS):
        if not _was_too_slow(query):
            break
        log.warning("stage %s: its gates did not come up in ten seconds, it is tried again", spec.name)
        query = _begun(spark, ctx, start, writer)
    start.started(query)


def _begun(
    spark: SparkSession, ctx: RunContext, start: QueryStart, writer: DataStreamWriter
) -> StreamingQuery:
    """Start a query once, and wait until it has opened its sources, or has ended."""
    spec, runner, slots = start.spec, start.runner, task_slots(spark)
    conf: dict[str, str] = {}
    if spec.state_provider is not None:
        conf[PROVIDER_KEY] = PROVIDERS[spec.state_provider]
    with _copying:
        session = spark.conf.get(PARTITIONS_KEY, None)
        partitions = partitions_of(runner.native, spec.shuffle_partitions, session, slots)
        if partitions is not None:
            warn(spec.name, partitions, spec.shuffle_partitions, start.keeps_state, slots)
            conf[PARTITIONS_KEY] = str(partitions.number)
        spread = f" in {partitions}" if start.keeps_state and partitions is not None else ""
        log.info("stage %s begins with batch %s%s", spec.name, runner.native.newest_committed() + 1, spread)
        with session_conf(spark, conf), _pool(spark, f"stage {start.stages_after:03} {ctx.job}/{spec.name}"):
            query = writer.start()
    _await_sources(query)
    return query


def _await_sources(query: StreamingQuery) -> None:
    """Wait until a query has opened its sources, or has ended.

    Spark gives a gate's process ten seconds to start: many at a time, on few cores, take longer.
    """
    pause = threading.Event()
    while query.isActive and str(query.status["message"]).startswith("Initializing"):
        pause.wait(_SOURCES_POLL_S)


def _was_too_slow(query: StreamingQuery) -> bool:
    """Say whether a query has ended because a gate's process did not start in time."""
    if query.isActive and not str(query.status["message"]).startswith("Terminated"):
        return False
    with suppress(StreamingQueryException):
        query.awaitTermination()
    error = query.exception()
    return error is not None and is_slow_start(error)


@contextmanager
def session_conf(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Set session settings for a while."""
    before = {key: spark.conf.get(key, None) for key in values}
    for key, value in values.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


@contextmanager
def _pool(spark: SparkSession, name: str) -> Iterator[None]:
    """Start a query in a scheduler pool of its own: its thread inherits it.

    Among pools without a running task, Spark serves the first by name (`FairSchedulingAlgorithm`). If there
    are more stages than cores, the others wait. So the last stages of a job get the first names: rows and
    barriers pass through before more rows are read. A user's own query, in the pool `default`, comes before
    them all.
    """
    make_pool(spark, name)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    try:
        yield
    finally:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", None)  # type: ignore[arg-type]


def run_only(
    start: Callable[[], StreamingQuery], runner: StageRunner, batch: BatchId, meanwhile: Callable[[], None]
) -> None:
    """Run one planned batch of a stage and nothing else; its query has ended when this returns.

    When a batch ends, Spark plans the next one by itself. That next batch is refused before it does anything,
    and its plan is removed.

    Args:
        start: starts the query.
        runner: what runs its batches.
        batch: the batch that the offset log has planned.
        meanwhile: called while waiting.

    Raises:
        StageFailed: the batch failed; the message names it and the cause.
    """
    pause, before = threading.Event(), runner.only
    runner.only = batch
    try:
        query = start()
        try:
            while query.isActive and not runner.native.has_committed(batch):
                meanwhile()
                pause.wait(_BATCH_POLL_S)
        finally:
            query.stop()
        error: BaseException | None = query.exception()
    finally:
        runner.only = before
    if runner.native.has_committed(batch):
        forget_plans(runner.native.place)
        return
    fixed = ""
    if runner.failure is not None:
        error, fixed = runner.failure.error, runner.failure.fixed
    said = "its query ended without an error" if error is None else cause_of(error)
    raise StageFailed(f"stage {runner.name!r} failed in batch {batch}: {said}{fixed}") from error
