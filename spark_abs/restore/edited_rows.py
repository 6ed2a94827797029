"""Checks of the rows that a user gives as the state of a function, before they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_abs.errors import UsageError
from spark_abs.manifest import StateFunction
from spark_abs.state.keys import check_key_groups, check_key_type
from spark_abs.state.operator import Timeout
from spark_abs.state.rows import EXPIRES_MS, TIMEOUT_MS, StateRows
from spark_abs.store.clock import now_ms

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_STRUCTS = ("key", "value")


def fitted(frame: DataFrame, form: StateFunction, who: str) -> DataFrame:
    """Return rows in the columns and types of a form; columns that are left out are filled.

    Args:
        frame: the rows.
        form: the form of the state.
        who: the stage and function, for messages.

    Raises:
        UsageError: the rows do not fit; the message has both types.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    from spark_abs.spark.versions import from_arrow_schema

    wanted = from_arrow_schema(StateRows(form).schema)
    unknown = sorted(set(frame.columns) - set(wanted.names))
    missing = sorted(set(_STRUCTS) - set(frame.columns))
    if unknown or missing:
        wrong = f"there is no column {missing[0]!r}" if missing else f"there is a column {unknown[0]!r}"
        raise UsageError(f"{who}: rows of state have the columns {', '.join(wanted.names)}; {wrong}")
    columns = []
    for field in wanted.fields:
        if field.name not in frame.columns:
            ends = now_ms() + form.ttl_ms if field.name == EXPIRES_MS and form.ttl_ms is not None else None
            columns.append(F.lit(ends).cast("long").alias(field.name))
            continue
        have, column = frame.schema[field.name].dataType, F.col(field.name)
        names = field.dataType.names if isinstance(field.dataType, StructType) else []
        if isinstance(have, StructType) and sorted(have.names) == sorted(names):
            column = F.when(column.isNotNull(), F.struct(*(column.getField(n).alias(n) for n in names)))
            have = StructType([have[name] for name in names])
        if _plain(have) != _plain(field.dataType):
            raise UsageError(
                f"{who}: column {field.name!r} is {have.simpleString()}, the state has "
                f"{field.dataType.simpleString()}: cast it, or change the form with rekey"
            )
        columns.append(column.alias(field.name))
    rows = frame.select(*columns)
    if form.timeout == Timeout.NONE and not rows.where(F.col(TIMEOUT_MS).isNotNull()).isEmpty():
        raise UsageError(f"{who}: the function has no timeouts, and a row has a {TIMEOUT_MS}")
    return rows


def form_of_frame(frame: DataFrame, form: StateFunction) -> StateFunction:
    """Return the form of a state with these rows: key and fields are theirs, and it has no earlier forms.

    Raises:
        UsageError: there is no struct `key` or `value`, their columns cannot be those of a state, or there
            cannot be so many key groups.
    """
    from pyspark.sql.types import StructType

    from spark_abs.spark.versions import to_arrow_schema

    check_key_groups(form.key_groups, f"function {form.uid!r}")
    found = {}
    for name in _STRUCTS:
        kind = frame.schema[name].dataType if name in frame.columns else None
        if not isinstance(kind, StructType):
            raise UsageError(
                f"rows of state have a struct {name!r}; the frame has {', '.join(frame.columns)}"
            )
        schema = to_arrow_schema(StructType.fromJson(_plain(kind)))
        found[name] = pa.schema([pa.field(f.name, f.type) for f in schema])
    key, state = found["key"], found["value"]
    for field in key:
        check_key_type(field.name, field.type)
    twice = sorted({n for n in state.names if n in key.names or state.names.count(n) > 1})
    if not key.names or twice:
        raise UsageError(
            f"state field {twice[0]!r} is there twice" if twice else "give at least one key column"
        )
    texts = {name: tuple(f"{f.name}: {f.type}" for f in schema) for name, schema in found.items()}
    form = replace(form, renamed={}, dropped=(), defaults={}, older=())
    return replace(form, key=texts["key"], state=texts["value"])


def require_one_row_a_key(rows: DataFrame, who: str) -> None:
    """Refuse rows without a key, and two rows with the same key.

    Raises:
        UsageError: names one of the keys.
    """
    from pyspark.sql import functions as F

    if not rows.where(F.col("key").isNull()).isEmpty():
        raise UsageError(f"{who}: a row of state has no key")
    twice = rows.groupBy("key").count().where("count > 1").limit(1).collect()
    if twice:
        raise UsageError(
            f"{who}: key {tuple(twice[0].key)} has {twice[0]['count']} rows of state: give one row a key"
        )


def require_something(rows: DataFrame, who: str) -> None:
    """Refuse rows with neither value nor timeout: such a key has no state.

    Raises:
        UsageError: names one of the keys.
    """
    from pyspark.sql import functions as F

    if nothing := rows.where(F.col("value").isNull() & F.col(TIMEOUT_MS).isNull()).take(1):
        raise UsageError(
            f"{who}: key {tuple(nothing[0].key)} has neither a value nor a timeout: leave it out"
        )


def corrected(before: DataFrame, changed: DataFrame, kept: Sequence[str] = ()) -> DataFrame:
    """Return a state with the rows of some keys replaced; a row without value and timeout removes its key.

    Args:
        before: the state.
        changed: rows in the same columns.
        kept: columns whose values stay for keys that `before` has.
    """
    from pyspark.sql import functions as F

    columns, mark = before.columns, "#changed"

    def changed_to(column: str) -> Column:
        new = F.col(f"new.{column}")
        both = F.coalesce(F.col(f"old.{column}"), new)
        return F.when(F.col("new.value").isNotNull(), both) if column in kept else new

    new = changed.withColumn(mark, F.lit(True)).alias("new")
    joined = before.alias("old").join(new, F.col("old.key").eqNullSafe(F.col("new.key")), "full_outer")
    taken = [F.when(F.col(mark), changed_to(c)).otherwise(F.col(f"old.{c}")).alias(c) for c in columns]
    rows = joined.select(*taken)
    return rows.where(F.col("value").isNotNull() | F.col(TIMEOUT_MS).isNotNull())


def _plain(kind: DataType) -> Any:
    """Return a type as JSON, without whether values may be null."""
    return _without(kind.jsonValue())


def _without(plain: Any) -> Any:
    if isinstance(plain, dict):
        said = {"nullable": True, "containsNull": True, "valueContainsNull": True, "metadata": {}}
        return {key: said.get(key, _without(value)) for key, value in plain.items()}
    return [_without(item) for item in plain] if isinstance(plain, list) else plain
