"""The streams and the state in a stage's analysed plan; a later start recognises the stage by them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from spark_abs.errors import UsageError
from spark_abs.manifest import CHANNEL, OperatorShape, SourceShape
from spark_abs.plan.columns import without_marks
from spark_abs.snapshots.delta_offsets import DELTA, FEED
from spark_abs.snapshots.kafka_offsets import KAFKA, is_kafka
from spark_abs.spark.kafka_source import BROKERS, KafkaSource
from spark_abs.spark.plans import channel_of, items, nodes, of_streams
from spark_abs.spark.versions import TRANSFORM_IN_PYTHON, node_name, sql_of
from spark_abs.state.packing import GROUP, PACKED
from spark_abs.store.storage import location_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMING = ("path", "subscribe", "subscribePattern", "assign", "topic", "streamName", "table")
"""Options that decide which data a native source reads; all others may change between two runs."""
_GLOB = "pathGlobFilter"
_FEEDS = ("readChangeFeed", "readChangeData")
_KEYED = frozenset(("Deduplicate", "DeduplicateWithinWatermark"))
_GROUPED = frozenset(
    ("FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState", "TransformWithState", TRANSFORM_IN_PYTHON)
)
"""Operators that call a user's function with the state of a key."""
_LIMIT = "GlobalLimit"
"""Operators whose state is not described by expressions."""
_GENERATED = re.compile(r"\b_gen_alias_\d+")
"""A column name that Spark generates anew in each analysis."""


def source_shapes(frame: DataFrame) -> tuple[SourceShape, ...]:
    """Return the streams that a plan reads, in the order of Spark's offset files.

    Spark collects them from the root down, left to right. A stream that occurs twice has a line for each
    occurrence and one directory below `sources/` (`MicroBatchExecution.logicalPlan`).
    """
    plan = frame._jdf.queryExecution().analyzed()
    return tuple(_source(node) for node in nodes(plan) if _is_source(node))


def operator_shapes(frame: DataFrame) -> tuple[OperatorShape, ...]:
    """Return the stateful operators of a plan, from the root down."""
    plan = frame._jdf.queryExecution().analyzed()
    streaming = (n for n in nodes(plan) if n.isStreaming())
    return tuple(shape for node in streaming if (shape := _operator(node, plan)) is not None)


def kept_by_place(plan: Any | None) -> tuple[tuple[str, ...], ...] | None:
    """Return the parts of an optimized plan that Spark stores by position, see `StageShape.by_place`.

    The state of an aggregate has its functions in the order of their first occurrence; the state of a join
    has the columns of each side. The optimizer removes unused functions and columns, and orders functions as
    a `select` above them (`PhysicalAggregation`, `CollapseProject`).
    """
    return None if plan is None else tuple(kept for node in nodes(plan) for kept in _by_place(node))


def _by_place(node: Any) -> Iterator[tuple[str, ...]]:
    name = node.getClass().getSimpleName()
    if name == "Aggregate" and node.isStreaming():
        functions = (f for e in items(node.aggregateExpressions()) for f in _functions(e))
        yield tuple(dict.fromkeys(functions))
    elif name == "Join" and of_streams(node):
        for side in _sides(node):
            yield tuple(f"{a.name()} {a.dataType().catalogString()}" for a in items(side.output()))


def _functions(expression: Any) -> Iterator[str]:
    """Iterate the calls of aggregate functions in an expression."""
    if expression.getClass().getSimpleName() == "AggregateExpression":
        yield without_marks(sql_of(expression))
        return
    for inner in items(expression.children()):
        yield from _functions(inner)


def _is_source(node: Any) -> bool:
    return node.getClass().getSimpleName() in ("StreamingRelation", "StreamingRelationV2")


def _source(node: Any) -> SourceShape:
    at = ""
    if node.getClass().getSimpleName() == "StreamingRelation":
        source = node.dataSource()
        options = source.options()
        given = {name: str(options.apply(name)) for name in _NAMING if options.contains(name)}
        kind = str(source.className())
        at = str(options.apply(_GLOB)) if options.contains(_GLOB) else ""
        if kind.lower() == DELTA:
            read = (str(options.apply(o)).lower() for o in _FEEDS if options.contains(o))
            at = FEED if "true" in read else at
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


def _operator(node: Any, plan: Any) -> OperatorShape | None:
    name = node_name(node)
    keys: list[Any]
    if name == "Aggregate":
        keys = list(items(node.groupingExpressions()))
        functions = (_sql(e) for e in items(node.aggregateExpressions()))
        found = OperatorShape(name, (f"by {', '.join(_key(node, e) for e in keys)}", *sorted(functions)))
    elif name in _KEYED or name == "Distinct":
        keys = list(items(node.keys() if name in _KEYED else node.output()))
        found = OperatorShape(name, tuple(_key(node, e) for e in keys))
    elif name == "Join" and of_streams(node):
        condition = node.condition()
        keys = [condition.get()] if condition.isDefined() else []
        on = _sql(keys[0]) if keys else ""
        sides = tuple(tuple(str(_source(n)) for n in nodes(side) if _is_source(n)) for side in _sides(node))
        apart = tuple(_known_by(side, plan, keys) for side in _sides(node))
        found = OperatorShape(f"{node.joinType().toString()}Join", (f"on {on}",), sides, apart=apart)
    elif name in _GROUPED and not _is_own(node):
        keys = list(_grouping(node))
        found = OperatorShape(name, (f"by {', '.join(_key(node, e) for e in keys)}",))
    else:
        return OperatorShape(name) if name in _GROUPED or name == _LIMIT else None
    return replace(found, computed=tuple(_computed_down(node, keys)))


def _grouping(node: Any) -> Iterator[Any]:
    """Iterate the keys of an operator in `_GROUPED`."""
    if node_name(node) != TRANSFORM_IN_PYTHON:
        return items(node.groupingAttributes())
    return islice(items(node.leftAttributes()), node.groupingAttributesLen())


def _is_own(node: Any) -> bool:
    """Say whether an operator in `_GROUPED` runs a function of spark_abs: its form then names its key."""
    if node_name(node) != TRANSFORM_IN_PYTHON:
        return False
    return [str(a.name()) for a in items(node.left().output())] == [GROUP, *PACKED.names]


def _sides(join: Any) -> tuple[Any, Any]:
    return join.left(), join.right()


def _known_by(side: Any, plan: Any, conditions: Iterable[Any]) -> tuple[str, ...]:
    """Return the parts of a plan that identify the rows of one side of a join.

    These are its sources, its filters, and those conditions of the join and of later filters that use only
    columns of this side: Spark moves them below the join.
    """
    sources = (_source(n) for n in nodes(side) if _is_source(n))
    found = [f"{s}@{s.at}" if s.at and s.kind.lower() != DELTA else str(s) for s in sources]
    found += map(_unqualified, _filters(side))
    after = chain(_filters(plan), (c for condition in conditions for c in _conjuncts(condition)))
    of_side = (c for c in after if c.references().nonEmpty() and c.references().subsetOf(side.outputSet()))
    return tuple(dict.fromkeys([*found, *map(_unqualified, of_side)]))


def _filters(plan: Any) -> Iterator[Any]:
    """Iterate the filters of a plan."""
    for node in nodes(plan):
        if node.getClass().getSimpleName() == "Filter":
            yield from _conjuncts(node.condition())


def _conjuncts(condition: Any) -> Iterator[Any]:
    if condition.getClass().getSimpleName() != "And":
        yield condition
        return
    for part in items(condition.children()):
        yield from _conjuncts(part)


def _unqualified(expression: Any) -> str:
    """Return an expression in SQL, without the frame aliases of its columns."""
    sql = _sql(expression)
    for column in items(expression.references().toSeq()):
        sql = sql.replace(str(column.sql()), str(column.withQualifier(column.qualifier().take(0)).sql()))
    return _GENERATED.sub("_gen_alias", sql)


def _sql(expression: Any) -> str:
    """Return an expression in SQL, without the name of its result."""
    named = expression.getClass().getSimpleName() == "Alias"
    return without_marks(sql_of(expression.child() if named else expression))


def _key(node: Any, expression: Any) -> str:
    """Return a key with its type, and with the expressions of projections that compute it."""
    computed = "".join(f" = {sql}" for sql in _computed(node, expression))
    return f"{_sql(expression)} {expression.dataType().catalogString()}{computed}"


def _computed(node: Any, expression: Any) -> Iterator[str]:
    """Iterate the expressions of projections below `node` that compute the columns of an expression.

    The columns in those expressions are not resolved further, nor are sliding windows: records of earlier
    versions do not either.
    """
    wanted = _references(expression)
    for below in nodes(node):
        if below.getClass().getSimpleName() == "Project":
            for column, (computing,) in _definitions(below):
                if str(column.exprId().toString()) in wanted:
                    yield without_marks(sql_of(computing))


def _computed_down(node: Any, expressions: Iterable[Any]) -> Iterator[str]:
    """Iterate all expressions below an operator that compute the columns of `expressions`."""
    wanted = {a for expression in expressions for a in _references(expression)}
    for below in (n for child in items(node.children()) for n in nodes(child)):
        for column, computing in _definitions(below):
            if wanted and str(column.exprId().toString()) in wanted:
                wanted |= {a for expression in computing for a in _references(expression)}
                sql = ", ".join(map(sql_of, computing))
                if without_marks(sql) == sql:  # else it is a column of a channel
                    yield _GENERATED.sub("_gen_alias", sql)


def _definitions(node: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Iterate the columns that a node computes, each with its expressions."""
    name = node.getClass().getSimpleName()
    if name in ("Project", "Aggregate"):
        for column in items(node.projectList() if name == "Project" else node.aggregateExpressions()):
            if column.getClass().getSimpleName() == "Alias":
                yield column, [column.child()]
    elif name == "Expand":  # of a window that slides, or of grouping sets
        projections = [list(items(projection)) for projection in items(node.projections())]
        for place, column in enumerate(items(node.output())):
            yield column, [projection[place] for projection in projections]
    elif name == "Generate":
        for column in items(node.generatorOutput()):
            yield column, [node.generator()]


def _references(expression: Any) -> set[str]:
    return {str(a.exprId().toString()) for a in items(expression.references().toSeq())}
