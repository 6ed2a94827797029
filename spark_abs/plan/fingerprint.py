"""What a stage's analysed plan reads as streams and keeps as state: by which a later start knows it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_abs.errors import UsageError
from spark_abs.manifest import CHANNEL, OperatorShape, SourceShape
from spark_abs.plan.columns import without_marks
from spark_abs.plan.jvm import channel_of, nodes
from spark_abs.plan.kafka import BROKERS, KafkaSource
from spark_abs.snapshots.kafka_offsets import KAFKA, is_kafka
from spark_abs.store.storage import location_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMING = ("path", "subscribe", "subscribePattern", "assign", "topic", "streamName", "table")
"""Options that say what a native source reads; all others may change between two runs."""
_KEYED = frozenset(("Deduplicate", "DeduplicateWithinWatermark"))
_OPAQUE = frozenset(
    (
        "GlobalLimit",
        "FlatMapGroupsWithState",
        "FlatMapGroupsInPandasWithState",
        "TransformWithState",
        "TransformWithStateInPySpark",
    )
)
"""Operators whose state is not described by expressions; stateful functions have a form of their own."""


def source_shapes(frame: DataFrame) -> tuple[SourceShape, ...]:
    """Return the streams that a plan reads, in the order in which Spark's offset files have them.

    Spark collects them from the root down, left to right. One that occurs twice has a line for each place,
    and one directory below `sources/` (`MicroBatchExecution.logicalPlan`).
    """
    plan = frame._jdf.queryExecution().analyzed()
    return tuple(_source(node) for node in nodes(plan) if _is_source(node))


def operator_shapes(frame: DataFrame) -> tuple[OperatorShape, ...]:
    """Return the stateful operators of a plan, from the root down."""
    streaming = (n for n in nodes(frame._jdf.queryExecution().analyzed()) if n.isStreaming())
    return tuple(shape for node in streaming if (shape := _operator(node)) is not None)


def _is_source(node: Any) -> bool:
    return node.getClass().getSimpleName() in ("StreamingRelation", "StreamingRelationV2")


def _source(node: Any) -> SourceShape:
    at = ""
    if node.getClass().getSimpleName() == "StreamingRelation":
        source = node.dataSource()
        options = source.options()
        given = {name: str(options.apply(name)) for name in _NAMING if options.contains(name)}
        kind = str(source.className())
    else:
        channel = channel_of(node)
        if channel is not None:
            return SourceShape(CHANNEL, channel)
        options = node.extraOptions()
        given = {name: str(options.get(name)) for name in _NAMING if options.containsKey(name)}
        kind = str(node.sourceName())
        if is_kafka(kind):
            kind = KAFKA
            at = str(options.get(BROKERS)) if options.containsKey(BROKERS) else ""
    return SourceShape(kind, " ".join(_named(name, value) for name, value in given.items()), at=at)


def kafka_sources(frame: DataFrame) -> tuple[KafkaSource, ...]:
    """Return the Kafka sources of a plan, in the order of `source_shapes`."""
    plan = frame._jdf.queryExecution().analyzed()
    found = (n for n in nodes(plan) if n.getClass().getSimpleName() == "StreamingRelationV2")
    return tuple(
        KafkaSource(
            _source(n), {str(e.getKey()).lower(): str(e.getValue()) for e in n.extraOptions().entrySet()}
        )
        for n in found
        if is_kafka(str(n.sourceName()))
    )


def _named(option: str, value: str) -> str:
    if option != "path":
        return value
    try:
        return location_of(value)
    except UsageError:
        return value


def _operator(node: Any) -> OperatorShape | None:
    name = str(node.getClass().getSimpleName())
    if name == "Aggregate":
        keys = (_key(node, e) for e in _items(node.groupingExpressions()))
        functions = (_sql(e) for e in _items(node.aggregateExpressions()))
        return OperatorShape(name, (f"by {', '.join(keys)}", *sorted(functions)))
    if name in _KEYED:
        return OperatorShape(name, tuple(_key(node, e) for e in _items(node.keys())))
    if name == "Distinct":
        return OperatorShape(name, tuple(_key(node, e) for e in _items(node.output())))
    if name == "Join" and node.left().isStreaming() and node.right().isStreaming():
        condition = node.condition()
        on = _sql(condition.get()) if condition.isDefined() else ""
        sides = tuple(tuple(str(_source(n)) for n in nodes(side) if _is_source(n)) for side in _sides(node))
        return OperatorShape(f"{node.joinType().toString()}Join", (f"on {on}",), sides)
    return OperatorShape(name) if name in _OPAQUE else None


def _sides(join: Any) -> tuple[Any, Any]:
    return join.left(), join.right()


def _sql(expression: Any) -> str:
    """Return an expression in SQL, without the name that its result has."""
    named = expression.getClass().getSimpleName() == "Alias"
    return without_marks(str((expression.child() if named else expression).sql()))


def _key(node: Any, expression: Any) -> str:
    """Return a key with its type, and where it is computed below, how."""
    computed = "".join(f" = {sql}" for sql in _computed(node, expression))
    return f"{_sql(expression)} {expression.dataType().catalogString()}{computed}"


def _computed(node: Any, expression: Any) -> Iterator[str]:
    """Iterate the expressions by which the columns in an expression are computed below an operator."""
    wanted = {str(a.exprId().toString()) for a in _items(expression.references().toSeq())}
    for below in nodes(node):
        if below.getClass().getSimpleName() != "Project":
            continue
        for column in _items(below.projectList()):
            if column.getClass().getSimpleName() == "Alias" and str(column.exprId().toString()) in wanted:
                yield without_marks(str(column.child().sql()))


def _items(seq: Any) -> Iterator[Any]:
    for i in range(seq.size()):
        yield seq.apply(i)
