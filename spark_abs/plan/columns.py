"""Which columns of its channels a stage uses: gates read no others from the files.

The draft of a stage reads channels whose columns are all `raise_error`. Spark's optimizer takes out of a
plan what nothing uses; what is left says which columns are used. Then the gate is opened with these, and the
others are `raise_error` for good: they cost nothing while the optimizer takes them out, and a plan that came
to use one would fail and not go on with wrong values.
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
"""Types by the names that SQL has for them, whatever a session says."""
_VARIABLE = (t.StringType, t.BinaryType, t.StructType, t.ArrayType, t.MapType, t.VariantType)


def unread_columns(channel: ChannelId, schema: t.StructType, beside: str) -> list[Column]:
    """Return the columns of a channel as ones that nothing may use.

    Args:
        channel: the channel.
        schema: its columns.
        beside: a column that is there: Spark moves and evaluates an expression that depends on none.
    """
    return [_unread(channel, place, field, beside) for place, field in enumerate(schema.fields)]


def without_marks(sql: str) -> str:
    """Return the SQL of an expression over `unread_columns` with a null in the place of each."""
    return _UNREAD_SQL.sub("NULL", sql)


def used_columns(plan: Any | None) -> Mapping[ChannelId, frozenset[int]] | None:
    """Return the places of the columns that a stage uses of each channel; None for all of them.

    Args:
        plan: its optimized draft, whose channels have `unread_columns`; None if that could not be had.
    """
    if plan is None:
        return None
    found: dict[ChannelId, set[int]] = {}
    try:
        for expression in (e for node in nodes(plan) for e in items(node.expressions())):
            for place, channel in _MARK.findall(str(expression.sql())):
                found.setdefault(ChannelId(channel), set()).add(int(place))
    except Py4JJavaError as error:
        log.debug("gates read whole rows, since an expression has no SQL: %s", error)
        return None
    return {channel: frozenset(places) for channel, places in found.items()}


def narrowed(schema: t.StructType, used: frozenset[int]) -> t.StructType:
    """Return the columns that are read: the used ones, at least one, in order."""
    if not used:
        fixed = (i for i, f in enumerate(schema.fields) if not isinstance(f.dataType, _VARIABLE))
        used = frozenset([next(fixed, 0)])
    return t.StructType([field for i, field in enumerate(schema.fields) if i in used])


def widened(frame: DataFrame, channel: ChannelId, schema: t.StructType) -> DataFrame:
    """Return the frame of a channel with all its columns, of which the given one has some."""
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
