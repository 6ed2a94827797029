"""Whether a table of PostgreSQL takes the rows of an output, and which types stand for those of Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString

import pyarrow as pa

NAME = 63
"""Bytes of a name on the server; a longer one it cuts off."""
COLUMNS: LiteralString = """
SELECT a.attname::text, t.typname::text, coalesce(e.typname, '')::text, format_type(a.atttypid, a.atttypmod),
       a.atttypmod, a.attnotnull, a.atthasdef OR a.attidentity <> '',
       a.attgenerated <> '' OR a.attidentity = 'a', a.attgenerated <> ''
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typlen = -1
WHERE a.attrelid = to_regclass(format('%%I.%%I', %s::text, %s::text)) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
UNIQUE: LiteralString = """
SELECT count(*) > 0 FROM pg_index i
WHERE i.indrelid = to_regclass(format('%%I.%%I', %s::text, %s::text)) AND i.indisunique AND i.indisvalid
  AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
  AND NOT EXISTS (SELECT 1 FROM unnest(i.indkey::int2[], i.indcollation::oid[]) AS c (number, other)
                  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = c.number
                  WHERE c.other <> a.attcollation AND c.other <> 0)
  AND (SELECT array_agg(a.attname::text ORDER BY a.attname::text) FROM pg_attribute a
       WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])) = %s::text[]
"""


def is_name(text: str) -> bool:
    """Say whether the server can have a name."""
    try:
        return 0 < len(text.encode()) <= NAME and "\0" not in text
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, in the order of `COLUMNS`."""

    name: str
    kind: str
    """Its type's name in the catalogue: `int8`, `_text` for an array of `text`."""
    element: str
    """The type of an array's elements."""
    said: str
    """The type as people write it."""
    modifier: int
    """Of a numeric, precision and scale; -1 for none."""
    not_null: bool
    has_default: bool
    generated: bool
    """Whether no value may be given."""
    computed: bool = False
    """Whether no value can be given, not even with `OVERRIDING SYSTEM VALUE`."""

    @property
    def is_text(self) -> bool:
        """Whether its values are ordered by a collation."""
        return self.kind in ("text", "varchar")

    @property
    def is_array(self) -> bool:
        return self.kind.startswith("_") and bool(self.element)


def ddl(table: Sequence[str], schema: pa.Schema, key: Sequence[str]) -> str:
    """Return a statement that creates a table for the rows, for a message.

    Args:
        table: its schema's name and its own.
        schema: the columns of the rows.
        key: the columns that tell rows apart.
    """
    lines = [f"  {quoted(field.name)} {_first(field.type)}" for field in schema]
    if key:
        lines.append(f"  PRIMARY KEY ({', '.join(map(quoted, key))})")
    return f"CREATE TABLE {'.'.join(map(quoted, table))} (\n" + ",\n".join(lines) + "\n)"


def quoted(name: str) -> str:
    """Return a name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def misfits(
    schema: pa.Schema,
    columns: Sequence[Column],
    key: Sequence[str],
    unique: bool,
    sequence: Sequence[str] = (),
) -> Iterator[str]:
    """Iterate the reasons why a table cannot take the rows, a line each."""
    there: Mapping[str, Column] = {column.name: column for column in columns}
    for field in schema:
        column = there.get(field.name)
        if column is None:
            yield f"column {field.name!r} is missing: it would be {_first(field.type)}"
        elif column.generated:
            yield f"column {field.name!r} is generated: it takes no value"
        elif not _fits(field.type, column):
            yield f"column {field.name!r} is {column.said}, and the rows have {_said(field.type)}"
    for column in columns:
        filled = column.has_default or column.generated or not column.not_null
        if column.name not in schema.names and not filled:
            yield f"column {column.name!r} must not be null and has no default, and the rows do not have it"
    for name in key:
        if name not in schema.names:
            yield f"key column {name!r} is not among the columns of the rows"
        elif name in there and not there[name].not_null:
            yield f"key column {name!r} may be null: rows with a null key are never merged, make it NOT NULL"
    if key and not unique:
        yield (
            f"there is no unique index on ({', '.join(key)}), with the collations of these columns, and that "
            "is what tells rows apart"
        )
    yield from _without_order(schema, there, sequence)


def _without_order(schema: pa.Schema, there: Mapping[str, Column], sequence: Sequence[str]) -> Iterator[str]:
    for name in sequence:
        if name not in schema.names:
            yield f"column {name!r} of sequence_by is not among the columns of the rows"
        elif name in there and not _orders(there[name]):
            yield (
                f"column {name!r} of sequence_by is {there[name].said}, which does not keep the order of "
                "all values"
            )


def _orders(column: Column) -> bool:
    rounds = column.kind in ("timestamp", "timestamptz") and 0 <= column.modifier < _MICROSECONDS
    return not rounds and not column.is_array and column.kind not in (*_JSON, "uuid")


_JSON = ("jsonb", "json")
_MICROSECONDS = 6
_SCALARS: Sequence[tuple[pa.DataType, tuple[str, ...]]] = (
    (pa.bool_(), ("bool",)),
    (pa.int8(), ("int2", "int4", "int8", "numeric")),
    (pa.int16(), ("int2", "int4", "int8", "numeric")),
    (pa.int32(), ("int4", "int8", "numeric")),
    (pa.int64(), ("int8", "numeric")),
    (pa.float32(), ("float4", "float8")),
    (pa.float64(), ("float8",)),
    (pa.string(), ("text", "varchar", *_JSON, "uuid")),
    (pa.binary(), ("bytea",)),
    (pa.date32(), ("date",)),
    (pa.timestamp("us", "UTC"), ("timestamptz",)),
    (pa.timestamp("us"), ("timestamp",)),
)


def _takers(kind: pa.DataType) -> tuple[str, ...]:
    """Return the types that take a value, the recommended type first."""
    if pa.types.is_decimal(kind):
        return ("numeric",)
    if pa.types.is_nested(kind):
        return (*_JSON, "text")
    return next((takers for known, takers in _SCALARS if known == kind), ())


def _first(kind: pa.DataType) -> str:
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return f"{_first(kind.value_type)}[]"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    return next(iter(_takers(kind)), "of a type that PostgreSQL does not have")


def _fits(kind: pa.DataType, column: Column) -> bool:
    if pa.types.is_list(kind) and column.is_array:
        return not pa.types.is_nested(kind.value_type) and _taken(
            kind.value_type, column.element, column.modifier
        )
    return not column.is_array and _taken(kind, column.kind, column.modifier)


def _taken(kind: pa.DataType, name: str, modifier: int) -> bool:
    if name not in _takers(kind):
        return False
    if name != "numeric" or modifier < 0:
        return True
    precision, scale = ((modifier - 4) >> 16) & 0xFFFF, (modifier - 4) & 0x7FF
    scale = scale - 2048 if scale > 1023 else scale
    digits, behind = (kind.precision, kind.scale) if pa.types.is_decimal(kind) else (19, 0)
    return scale >= behind and precision - scale >= digits - behind


def _said(kind: pa.DataType) -> str:
    takers = _takers(kind)
    if not takers:
        return f"{kind}, which has no counterpart: cast it in the stage"
    first = _first(kind)
    others = [t for t in takers if not first.startswith(t)]
    return f"{kind}: make it {first}" + (f" (or {', '.join(others)})" if others else "")
