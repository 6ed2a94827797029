"""Calls into the JVM and Spark's private API for the planning of a job. Written for Spark 4.2."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException

from spark_abs.errors import UsageError
from spark_abs.model import PROVIDER_KEY, ChannelId, Provider
from spark_abs.spark.plan_facts import PlanFacts, Watermark, function_in
from spark_abs.spark.session import read_version
from spark_abs.spark.versions import TRANSFORM_IN_PYTHON, node_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

DRAFT = "sparkAbsChannel"
"""The option that names the channel of a draft gate."""
_EXECUTORS_S, _EXECUTORS_POLL_S = 10.0, 0.1
_DELTA = ("delta", "org.apache.spark.sql.delta.sources.deltadatasource")
_FILES = "org.apache.spark.sql.execution.datasources.HadoopFsRelation"
_TRANSFORMS = frozenset(("TransformWithState", TRANSFORM_IN_PYTHON))
_HOLDING = _TRANSFORMS | {"Aggregate", "FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState"}
_KEEPING = _HOLDING | {"Deduplicate", "DeduplicateWithinWatermark", "GlobalLimit"}
_ROW_BY_ROW = frozenset(
    (
        "EventTimeWatermark",
        "Filter",
        "Generate",
        "Project",
        "Repartition",
        "RepartitionByExpression",
        "StreamingRelation",
        "StreamingRelationV2",
        "SubqueryAlias",
        "Union",
    )
)
"""Operators of which no rows go out where none come in; a function over whole partitions is none of them."""
_GIVEN = frozenset(("LogicalRDD", "LocalRelation", "OneRowRelation", "Range"))
"""Leaves of a batch's plan: its rows, and rows that the plan itself contains."""
_COORDINATION = "spark.hadoop.outputCommitCoordination.enabled"
_OUTER = frozenset(("LeftOuter", "RightOuter", "FullOuter"))


def plan_facts(frame: DataFrame) -> PlanFacts:
    """Read the analysed plan of a stage's frame."""
    plan = frame._jdf.queryExecution().analyzed()
    sources: list[str] = []
    channels: list[ChannelId] = []
    static: dict[str, int] = {}
    moving: list[str] = []
    streamed: list[str] = []
    watermarks: list[Watermark] = []
    functions: list[str] = []
    holds, keeps, inside, row_by_row = False, False, "", True
    for node in nodes(plan):
        name = node_name(node)
        streaming = bool(node.isStreaming())
        keeps |= streaming and (name in _KEEPING or (name == "Join" and of_streams(node)))
        if streaming and name not in _ROW_BY_ROW:
            row_by_row &= name == "Join" and not of_streams(node)
        if name == "MapInArrow":
            inside = str(node.expressions().head().name())  # a PythonUDF
        elif name in _TRANSFORMS:
            functions.append(function_in(inside) or "")
            inside = ""
        if name in ("StreamingRelation", "StreamingRelationV2"):
            channel = channel_of(node) if name == "StreamingRelationV2" else None
            if channel is None:
                sources.append(str(node.sourceName()))
                streamed += _streamed_tables(node)
            else:
                channels.append(channel)
        elif name == "EventTimeWatermark":
            watermarks.append(_watermark(frame.sparkSession, node))
        elif (index := _delta_index(frame.sparkSession, node)) is not None:
            static[str(index.path().toString())] = int(index.getSnapshot().version())
            if not index.isTimeTravelQuery():
                moving.append(str(index.path().toString()))
        elif streaming and (
            name in _HOLDING or (name == "Join" and node.joinType().toString() in _OUTER and of_streams(node))
        ):
            holds = True
    return PlanFacts(
        tuple(sources),
        tuple(channels),
        watermarks=tuple(watermarks),
        holds_rows=holds,
        streaming=frame.isStreaming,
        static_tables=static,
        moving_tables=tuple(moving),
        keeps_state=keeps,
        functions=tuple(functions),
        streamed_tables=tuple(streamed),
        repeatable=bool(plan.deterministic()) and not moving,
        row_by_row=row_by_row,
    )


def repeatable(frame: DataFrame) -> bool:
    """Say whether a frame made from a batch has the same rows in every evaluation.

    False if something in it is random, or if it reads anything but the batch. Spark takes a Python function
    as deterministic unless it is declared with `asNondeterministic`.
    """
    plan = frame._jdf.queryExecution().analyzed()
    leaves = (_class(node) for node in nodes(plan) if not node.children().size())
    return bool(plan.deterministic()) and all(name in _GIVEN for name in leaves)


def refusal(frame: DataFrame, output_mode: str) -> str | None:
    """Return in one line why Spark would refuse to start a stream with this plan; None if it would start.

    It calls the check that each start of a streaming query runs. The session must be the active one.
    """
    spark: Any = frame.sparkSession
    if spark.conf.get("spark.sql.streaming.unsupportedOperationCheck", "true") == "false":
        return None
    modes = spark._jvm.org.apache.spark.sql.streaming.OutputMode
    mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[output_mode]()
    checker = spark._jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), mode)
    except AnalysisException as error:
        return str(error).strip().partition("\n")[0].rstrip(";")
    return None


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A static table that a run reads at one version."""

    path: str
    version: int


def pin_version(frame: DataFrame) -> tuple[DataFrame, PinnedTable | None]:
    """Return a frame that only reads a Delta table pinned to its present version; any other frame unchanged.

    Without this, Spark reads the newest version of a static table in each batch, also in a repeated one.
    """
    plan, alias = _below_alias(frame)
    index = _delta_index(frame.sparkSession, plan)
    if index is None or index.isTimeTravelQuery():
        return frame, None
    pinned = PinnedTable(str(index.path().toString()), int(index.getSnapshot().version()))
    table = read_version(frame.sparkSession, pinned.path, pinned.version)
    return table if alias is None else table.alias(alias), pinned


@dataclass(frozen=True, slots=True)
class ReadTable:
    """A Delta table as a static frame reads it."""

    path: str
    """As in `PlanFacts`."""
    id: str


def read_tables(frame: DataFrame) -> tuple[ReadTable, ...]:
    """Return the Delta tables that a frame reads as static tables, each with its id at the version read."""
    plan = frame._jdf.queryExecution().analyzed()
    found = (_delta_index(frame.sparkSession, node) for node in nodes(plan))
    return tuple(
        ReadTable(str(index.path().toString()), str(index.getSnapshot().metadata().id()))
        for index in found
        if index is not None
    )


def is_delta_stream(frame: DataFrame) -> bool:
    """Say whether a streaming frame only reads a Delta table."""
    node = _below_alias(frame)[0]
    if _class(node) != "StreamingRelation":
        return False
    return str(node.dataSource().className()).lower() in _DELTA


def read_anew(frame: DataFrame) -> DataFrame:
    """Return such a frame (`is_delta_stream`) again, with the table's present columns."""
    node, alias = _below_alias(frame)
    source = node.dataSource()
    reader = frame.sparkSession.readStream.format("delta")
    reader = reader.options(**{str(pair._1()): str(pair._2()) for pair in items(source.options().toSeq())})
    named = source.catalogTable()
    made = reader.table(str(named.get().identifier().quotedString())) if named.isDefined() else reader.load()
    return made if alias is None else made.alias(alias)


def _below_alias(frame: DataFrame) -> tuple[Any, str | None]:
    """Return the relation below a frame's aliases, and the outermost alias."""
    plan, alias = frame._jdf.queryExecution().analyzed(), None
    while _class(plan) == "SubqueryAlias":
        plan, alias = plan.child(), alias or str(plan.alias())
    return plan, alias


def optimized(frame: DataFrame) -> Any | None:
    """Return a frame's plan as optimized by Spark, None if that fails."""
    state = frame.sparkSession._jsparkSession.sessionState()
    try:
        return state.optimizer().execute(frame._jdf.queryExecution().analyzed())
    except Py4JJavaError as error:
        log.debug("a plan cannot be optimized: %s", error)
        return None


def nodes(plan: Any) -> Iterator[Any]:
    """Iterate a plan from the top, subqueries of expressions (`IN (SELECT …)`) included."""
    yield plan
    for below in (plan.children(), plan.subqueries()):
        for node in items(below):
            yield from nodes(node)


def items(seq: Any) -> Iterator[Any]:
    """Iterate a sequence of Scala."""
    for i in range(seq.size()):
        yield seq.apply(i)


def of_streams(join: Any) -> bool:
    """Say whether both sides of a join are streams."""
    return bool(join.left().isStreaming() and join.right().isStreaming())


def channel_of(node: Any) -> ChannelId | None:
    """Return the channel of a relation that is a draft gate, None for any other relation."""
    channel = node.extraOptions().get(DRAFT)
    return None if channel is None else ChannelId(str(channel))


def _streamed_tables(node: Any) -> tuple[str, ...]:
    """Return the path of a Delta table that is read as a stream, by path or by name."""
    if _class(node) != "StreamingRelation":
        return ()
    source = node.dataSource()
    path = source.options().get("path")
    return (str(path.get()),) if str(source.className()).lower() in _DELTA and path.isDefined() else ()


def _watermark(spark: SparkSession, node: Any) -> Watermark:
    jvm: Any = spark._jvm
    delay = jvm.org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark.getDelayMs(node.delay())
    below = (channel_of(leaf) for leaf in nodes(node) if _class(leaf) == "StreamingRelationV2")
    column = str(node.eventTime().toString()).partition("#")[0].lstrip("'")
    return Watermark(column, int(delay), tuple(c for c in below if c is not None))


def _delta_index(spark: SparkSession, node: Any) -> Any | None:
    """Return Delta's file index if a node is a Delta table read as a static frame."""
    if _class(node) != "LogicalRelation" or node.isStreaming():
        return None
    jvm: Any = spark._jvm
    if not jvm.py4j.reflection.TypeUtil.isInstanceOf(_FILES, node.relation()):
        return None
    index = node.relation().location()
    return index if _class(index) == "TahoeLogFileIndex" else None


def refuse_unsupported_session(spark: SparkSession) -> None:
    """Refuse session settings under which a stage's cut or the rows written by a batch are uncertain.

    Raises:
        UsageError: the message names the setting and the value that it must have.
    """
    conf: Callable[[str, str], str | None] = spark.conf.get
    if conf("spark.sql.streaming.asyncProgressTracking.enabled", "false") == "true":
        raise UsageError(
            "asynchronous progress tracking leaves batches unlogged: unset asyncProgressTracking.enabled"
        )
    if conf(_COORDINATION, "true") == "false":
        raise UsageError(
            f"two attempts of a task could both leave their files in a batch: unset {_COORDINATION}"
        )
    provider = spark.conf.get(PROVIDER_KEY)
    if provider not in list(Provider):
        raise UsageError(
            f"the session keeps state in {provider}, whose files spark_abs does not know: set {PROVIDER_KEY} "
            f"to {Provider.ROCKSDB}, with spark.conf.set or in the configuration of the cluster"
        )


@contextmanager
def as_active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread, while this lasts.

    Spark registers and finds Python data sources in the active session, whichever session is used.
    """
    sessions: Any = spark._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def active_query(spark: SparkSession, query_id: str) -> Any | None:
    """Return the JVM object of a query that runs in any session of this process, None if it does not run."""
    jvm: Any = spark._jvm
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    return queries.get(jvm.java.util.UUID.fromString(query_id))


def session_of(spark: SparkSession, query: Any) -> SparkSession:
    """Return the session in which a query was started.

    Args:
        spark: any session of the process.
        query: the query's object in the JVM.
    """
    return type(spark)(spark.sparkContext, query.sparkSession())


def checkpoint_of(query: Any) -> str:
    """Return the checkpoint location of a query that has opened its sources; empty if it has only just begun.

    Args:
        query: the query's object in the JVM.
    """
    with suppress(Py4JError):
        query.logicalPlan()  # an error in any other thread until the query's own has made it
        return str(query.resolvedCheckpointRoot())
    return ""


def feeds_read(query: Any) -> tuple[str, ...]:
    """Return the ids of the Delta tables of which a query in a batch is known to read the change feed alone.

    Args:
        query: the query's object in the JVM.
    """
    read: list[tuple[str, bool]] = []
    with suppress(Py4JError):  # another Delta than the open one: then it is not known
        leaves = (n for n in nodes(query.logicalPlan()) if _class(n) == "StreamingExecutionRelation")
        delta = [source for leaf in leaves if _class(source := leaf.source()) == "DeltaSource"]
        read = [(str(source.tableId()), bool(source.options().readChangeFeed())) for source in delta]
    return tuple(sorted({table for table, _ in read} - {table for table, feed in read if not feed}))


def _class(of: Any) -> str:
    return str(of.getClass().getSimpleName())


def executor_count(spark: SparkSession) -> int:
    """Return the present number of executors without the driver, at least one."""
    context: Any = spark.sparkContext._jsc
    return max(1, len(context.sc().statusTracker().getExecutorInfos()) - 1)


def task_slots(spark: SparkSession) -> int:
    """Return how many tasks can run at once: on the cores of this machine, or of all executors.

    On a cluster that is the cores of its present executors, or of the configured ones if they are more. Waits
    a moment for the first executor if neither is known. At least one.
    """
    java_context: Any = spark.sparkContext._jsc
    context = java_context.sc()
    conf = context.conf()
    promised = 0
    if not context.isLocal():
        dynamic = conf.get("spark.dynamicAllocation.enabled", "false") == "true"
        name = "spark.dynamicAllocation.maxExecutors" if dynamic else "spark.executor.instances"
        promised = int(conf.get(name, "0") or 0) * int(conf.get("spark.executor.cores", "1") or 1)
    deadline, pause = time.monotonic() + _EXECUTORS_S, threading.Event()
    while not (cores := _executor_cores(context)) and not promised and time.monotonic() < deadline:
        pause.wait(_EXECUTORS_POLL_S)
    found = max(cores, promised) or int(context.defaultParallelism())
    return max(1, found // int(conf.get("spark.task.cpus", "1") or 1))


def _executor_cores(context: Any) -> int:
    """Return the cores of all live executors, or of the driver if there are none."""
    listed = context.statusStore().executorList(True)
    local = bool(context.isLocal())
    return sum(int(e.totalCores()) for e in items(listed) if local or str(e.id()) != "driver")


def batches_retained(spark: SparkSession) -> int:
    """Return for how many batches Spark keeps logs and state."""
    return int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or 100)
