"""What is different between two frames of state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

CHANGE = "change"
ADDED, REMOVED, CHANGED = "added", "removed", "changed"
_SIDES = ("before", "after")
_ID, _ALL, _COUNT, _ROW = "#id", "#all", "#count", "#row"


def changes(before: DataFrame, after: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return the rows that are not the same in both frames, which have the same columns.

    With an identity: `change` (`added`, `removed`, `changed`), the columns of the identity, and structs
    `before` and `after` of the others, null where there is none. Without: `change` (`added`, `removed`) and
    the columns; of equal rows those count that one frame has more of.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.window import Window

    columns = after.columns
    names = list(identity) or columns
    others = [c for c in columns if c not in identity] if identity else []

    def side(frame: DataFrame, name: str) -> DataFrame:
        # What cannot be compared as it is, is compared by what it holds: maps have no order.
        keys = [comparable(F.col(c), frame.schema[c].dataType) for c in names]
        found = frame.select(
            F.struct(*(k.alias(f"c{i}") for i, k in enumerate(keys))).alias(_ID),
            F.struct(
                F.lit(0).alias("#"),
                *(comparable(F.col(c), frame.schema[c].dataType).alias(c) for c in others),
            ).alias(_ALL),
            F.struct(*columns).alias(_ROW),
            F.lit(1).alias(_COUNT),
        )
        if not identity:
            found = found.withColumn(_COUNT, F.row_number().over(Window.partitionBy(_ID).orderBy(F.lit(1))))
        return found.alias(name)

    left, right = side(before, _SIDES[0]), side(after, _SIDES[1])

    def col(of: str, name: str) -> Column:
        return F.col(f"{of}.`{name}`")

    same_row = col("before", _ID).eqNullSafe(col("after", _ID)) & (
        col("before", _COUNT) == col("after", _COUNT)
    )
    gone, new = col("after", _COUNT).isNull(), col("before", _COUNT).isNull()
    joined = left.join(right, same_row, "full_outer").where(
        gone | new | ~col("before", _ALL).eqNullSafe(col("after", _ALL))
    )
    change = F.when(new, ADDED).when(gone, REMOVED).otherwise(CHANGED).alias(CHANGE)
    row = F.when(gone, col("before", _ROW)).otherwise(col("after", _ROW))
    found = [row.getField(name).alias(name) for name in names]
    if identity:
        for at, absent in zip(_SIDES, (new, gone), strict=True):
            fields = F.struct(*(col(at, _ROW).getField(c).alias(c) for c in others))
            found.append(F.when(~absent, fields).alias(at))
    return joined.select(change, *found)


def comparable(column: Column, kind: DataType) -> Column:
    """Return a column that is equal exactly where the given one is, maps included."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if not _has_map(kind):
        return column
    match kind:
        case MapType():
            entry = StructType().add("key", kind.keyType).add("value", kind.valueType)
            entries = F.transform(F.map_entries(column), lambda e: comparable(e, entry))
            return F.array_sort(entries)
        case ArrayType():
            return F.transform(column, lambda item: comparable(item, kind.elementType))
        case StructType():
            inside = (comparable(column.getField(f.name), f.dataType).alias(f.name) for f in kind.fields)
            return F.when(column.isNotNull(), F.struct(*inside))
        case _:
            return column


def _has_map(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, MapType, StructType

    match kind:
        case MapType():
            return True
        case ArrayType():
            return _has_map(kind.elementType)
        case StructType():
            return any(_has_map(f.dataType) for f in kind.fields)
        case _:
            return False
