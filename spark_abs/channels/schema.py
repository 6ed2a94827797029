"""Schemas of channels and sinks: what can be carried, and how two differ."""

from __future__ import annotations

import json
from collections import Counter
from typing import cast

import pyarrow as pa
from pyspark.sql import types as t

from spark_abs.errors import UsageError
from spark_abs.spark.versions import to_arrow_schema

_CARRIED = (
    t.BooleanType,
    t.ByteType,
    t.ShortType,
    t.IntegerType,
    t.LongType,
    t.FloatType,
    t.DoubleType,
    t.DecimalType,
    t.BinaryType,
    t.DateType,
    t.TimestampType,
    t.TimestampNTZType,
)


def plain_schema(schema: t.StructType) -> t.StructType:
    """Return the schema as a channel declares it: everything nullable, no column metadata.

    Metadata must not travel: Spark keeps the delay of a watermark there, and the next stage would take
    the column to have one.

    Raises:
        UsageError: a type cannot be carried, or two columns have the same name but for case.
    """
    return cast(t.StructType, _plain(schema, ""))


def _plain(kind: t.DataType, where: str) -> t.DataType:
    match kind:
        case t.StructType():
            names = Counter(field.name.casefold() for field in kind.fields)
            for name, times in names.items():
                if times > 1:
                    raise UsageError(
                        f"column {where + name!r} occurs {times} times; names must differ by more than case"
                    )
            fields = [t.StructField(f.name, _plain(f.dataType, f"{where}{f.name}.")) for f in kind.fields]
            return t.StructType(fields)
        case t.ArrayType():
            return t.ArrayType(_plain(kind.elementType, f"{where}element."))
        case t.MapType():
            return t.MapType(_plain(kind.keyType, f"{where}key."), _plain(kind.valueType, f"{where}value."))
        case t.StringType() if kind == t.StringType():
            return kind
        case _ if isinstance(kind, _CARRIED):
            return kind
    raise UsageError(
        f"column {where[:-1]!r} is {kind.simpleString()}, which a Delta table cannot store: cast it"
    )


def arrow_schema(schema: t.StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark takes record batches of `schema`."""
    return to_arrow_schema(schema)


def delta_schema(schema: t.StructType) -> pa.Schema:
    """Return the schema of the Delta table that holds rows of `schema`.

    Raises:
        UsageError: as `plain_schema`.
    """
    return arrow_schema(plain_schema(schema))


def differences(stored: str, schema: t.StructType, may_lack: bool = False) -> list[str]:
    """Compare a table's schema, as Delta's JSON, with a frame's: a line for each column that differs.

    Neither order nor nullability matter. With `may_lack`, neither do columns that the frame lacks.
    """
    have = {field.name: field.dataType.simpleString() for field in _parsed(stored).fields}
    want = {field.name: field.dataType.simpleString() for field in schema.fields}
    spelled = {name.casefold(): name for name in have}
    renamed = {name: other for name in want if (other := spelled.get(name.casefold(), name)) != name}
    lines = [
        f"  {name}: {have.get(name, 'missing')} in the table, {want.get(name, 'missing')} in the query"
        for name in sorted(want.keys() if may_lack else have.keys() | want.keys())
        if have.get(name) != want.get(name) and name not in {*renamed, *renamed.values()}
    ]
    return lines + [
        f"  {name}: spelled {other} in the table: use withColumnRenamed('{name}', '{other}')"
        for name, other in sorted(renamed.items())
    ]


def check_schema(what: str, stored: str, schema: t.StructType, may_lack: bool = False) -> None:
    """Check that a table can take the rows of a frame.

    Raises:
        UsageError: it cannot; a line for each column that differs.
    """
    lines = differences(stored, schema, may_lack)
    if lines:
        raise UsageError(
            f"{what} has another schema than the query: cast the columns in the query, or write to another "
            "name\n" + "\n".join(lines)
        )


def _parsed(stored: str) -> t.StructType:
    return t.StructType.fromJson(json.loads(stored))


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Bring a record batch into exactly `schema`: columns by name, missing nullable ones as nulls.

    Raises:
        pyarrow.ArrowException: a column cannot be cast, or one that may not be null is missing.
    """
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at >= 0:
            columns.append(batch.column(at).cast(field.type))
        elif field.nullable:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            raise pa.ArrowInvalid(f"column {field.name} is missing and may not be null")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def struct_of(schema: str) -> t.StructType:
    """Read the schema of rows in SQL's words.

    Raises:
        UsageError: it is the type of one value.
    """
    found = t.StructType.fromDDL(schema)
    if not isinstance(found, t.StructType):
        raise UsageError(f"{schema!r} is not the schema of rows: give each column a name and a type")
    return found
