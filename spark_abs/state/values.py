"""Arrow to Python values and back, like Spark's `collect` and `createDataFrame`.

Timestamps with a zone become naive datetimes in the local zone, structs rows, maps dicts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Row

Convert = Callable[[Any], Any]


def tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return the rows of a table as tuples."""
    if not table.num_columns:
        return [()] * table.num_rows
    return list(zip(*(_column(c) for c in table.columns), strict=True))


def rows(table: pa.Table) -> list[Row]:
    """Return the rows of a table as Spark's rows."""
    from pyspark.sql import Row

    make = Row(*table.column_names)
    return [make(*values) for values in tuples(table)]


def table(values: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Make a table from rows: tuples, lists, rows or dicts; None is a row of nulls.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: a row does not fit the schema.
    """
    width, names = len(schema), schema.names
    plain: list[Sequence[Any]] = []
    for value in values:
        if value is None:
            plain.append([None] * width)
        elif isinstance(value, dict):
            if unknown := set(value) - set(names):
                raise ValueError(f"a row has the fields {sorted(unknown)}, its schema has {names}")
            plain.append([value.get(name) for name in names])
        elif not isinstance(value, (tuple, list)):
            raise TypeError(f"a row is a tuple, a Row or a dict, found {type(value).__name__}: {value!r}")
        elif len(value) != width:
            raise ValueError(f"a row has {len(value)} values, its schema has {width}: {value!r}")
        else:
            plain.append(value)
    columns = zip(*plain, strict=True) if plain else [()] * width
    arrays = []
    for field, column in zip(schema, columns, strict=True):
        convert = _to_arrow(field.type)
        items = list(column) if convert is None else [None if v is None else convert(v) for v in column]
        try:
            arrays.append(pa.array(items, field.type))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"field {field.name!r} ({field.type}): {error}") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(column: pa.ChunkedArray) -> list[Any]:
    values: list[Any] = column.to_pylist()
    convert = _from_arrow(column.type)
    return values if convert is None else [None if v is None else convert(v) for v in values]


def _from_arrow(kind: pa.DataType) -> Convert | None:
    """Return the conversion of a value from Arrow; None: no conversion."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _local
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _from_arrow(kind.value_type)
        return None if inner is None else lambda v: [None if i is None else inner(i) for i in v]
    if pa.types.is_map(kind):
        key, item = _from_arrow(kind.key_type) or _same, _from_arrow(kind.item_type) or _same
        return lambda v: {key(k): None if i is None else item(i) for k, i in v}
    if pa.types.is_struct(kind):
        from pyspark.sql import Row

        fields = [kind.field(i) for i in range(kind.num_fields)]
        make, inside = (
            Row(*(f.name for f in fields)),
            [(f.name, _from_arrow(f.type) or _same) for f in fields],
        )
        return lambda v: make(*(None if v[n] is None else c(v[n]) for n, c in inside))
    return None


def _to_arrow(kind: pa.DataType) -> Convert | None:
    """Return the conversion of a value for Arrow; None: no conversion."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _utc
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _to_arrow(kind.value_type)
        return None if inner is None else lambda v: [None if i is None else inner(i) for i in v]
    if pa.types.is_map(kind):
        key, item = _to_arrow(kind.key_type) or _same, _to_arrow(kind.item_type) or _same
        return lambda v: [(key(k), None if i is None else item(i)) for k, i in v.items()]
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        inside = [(f.name, _to_arrow(f.type) or _same) for f in fields]
        return lambda v: _fields(v, inside)
    return None


def _fields(value: Any, inside: list[tuple[str, Convert]]) -> dict[str, Any]:
    if not isinstance(value, dict):
        value = dict(zip((name for name, _ in inside), value, strict=True))
    return {n: None if value.get(n) is None else c(value[n]) for n, c in inside}


def _local(value: datetime.datetime) -> datetime.datetime:
    """Return a moment in local time. `fold` tells the two moments apart in the hour that occurs twice."""
    found = value.astimezone().replace(tzinfo=None)
    return found if found.astimezone(datetime.UTC) == value else found.replace(fold=1)


def _utc(value: datetime.datetime) -> datetime.datetime:
    return value.astimezone(datetime.UTC)


def _same(value: Any) -> Any:
    return value
