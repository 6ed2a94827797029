"""Find the columns of its channels that a stage uses: gates read only these from the files.

The draft of a stage reads channels whose columns are all `raise_error`. Spark's optimizer removes the columns
that nothing uses; the remaining ones are used. Then the gate is opened with the used columns, and the others
stay `raise_error`: they cost nothing while the optimizer removes them, and a plan that does use one fails
instead of computing wrong values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import functions as F
from pyspark.sql import types as t

from spark_abs.catalog.names import quoted
from spark_abs.model import ChannelId
from spark_abs.spark.plans import items, nodes

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

log = logging.getLogger(__name__)

_UNREAD = "spark_abs does not read column {} of channel {}: at the start nothing used it; row "
_MARK = re.compile(_UNREAD.partition(":")[0].format(r"(\d+)", r"([\w-]+\.[\w-]+)"))
_UNREAD_SQL = re.compile(
    rf"raise_error\(concat\('{_UNREAD.format('[^ ]+', '[^ ]+')}', CAST\(\w+ AS STRING\)\)\)"
)
_IN_SQL: Mapping[t.DataType, str] = {
    t.BooleanType(): "boolean",
    t.ByteType(): "tinyint",
    t.ShortType(): "smallint",
    t.IntegerType(): "int",
    t.LongType(): "bigint",
    t.FloatType(): "float",
    t.DoubleType(): "double",
    t.DateType(): "date",
    t.TimestampType(): "timestamp_ltz",
    t.TimestampNTZType(): "timestamp_ntz",
    t.BinaryType(): "binary",
    t.StringType(): "string",
}
"""SQL names of types, independent of session settings."""
_VARIABLE = (t.StringType, t.BinaryType, t.StructType, t.ArrayType, t.MapType, t.VariantType)


def unread_columns(channel: ChannelId, schema: t.StructType, beside: str) -> list[Column]:
    """Return expressions for the columns of a channel that fail if anything uses them.

    Args:
        channel: the channel.
        schema: its columns.
        beside: a column that exists. Spark would move and evaluate an expression without columns.
    """
    return [_unread(channel, place, field, beside) for place, field in enumerate(schema.fields)]


def without_marks(sql: str) -> str:
    """Return the SQL of an expression, with each of the `unread_columns` replaced by null."""
    return _UNREAD_SQL.sub("NULL", sql)


def used_columns(plan: Any | None) -> Mapping[ChannelId, frozenset[int]] | None:
    """Return, for each channel, the indexes of the columns that a stage uses; None for all columns.

    Args:
        plan: the optimized draft of the stage, whose channels have `unread_columns`; None if Spark gave none.
    """
    if plan is None:
        return None
    found: dict[ChannelId, set[int]] = {}
    try:
        for expression in (e for node in nodes(plan) for e in items(node.expressions())):
            for place, channel in _MARK.findall(str(expression.sql())):
                found.setdefault(ChannelId(channel), set()).add(int(place))
    except Py4JJavaError as error:
        log.debug("gates read all columns, because the SQL of an expression is unknown: %s", error)
        return None
    return {channel: frozenset(places) for channel, places in found.items()}


def narrowed(schema: t.StructType, used: frozenset[int]) -> t.StructType:
    """Return the columns to read: the used columns in order, at least one."""
    if not used:
        fixed = (i for i, f in enumerate(schema.fields) if not isinstance(f.dataType, _VARIABLE))
        used = frozenset([next(fixed, 0)])
    return t.StructType([field for i, field in enumerate(schema.fields) if i in used])


def widened(frame: DataFrame, channel: ChannelId, schema: t.StructType) -> DataFrame:
    """Return the frame of a channel with all columns; `frame` has some of them."""
    there = set(frame.columns)
    if len(there) == len(schema.fields):
        return frame
    return frame.select(
        *(
            F.col(quoted(field.name))
            if field.name in there
            else _unread(channel, place, field, frame.columns[0])
            for place, field in enumerate(schema.fields)
        )
    )


def _unread(channel: ChannelId, place: int, field: t.StructField, beside: str) -> Column:
    text = f"concat('{_UNREAD.format(place, channel)}', CAST({quoted(beside)} AS STRING))"
    sql = _IN_SQL.get(field.dataType)
    if sql is not None:  # one call into the JVM, where functions of columns need ten
        return F.expr(f"CAST(raise_error({text}) AS {sql}) AS {quoted(field.name)}")
    return F.expr(f"raise_error({text})").cast(field.dataType).alias(field.name)
