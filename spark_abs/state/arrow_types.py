"""Arrow types from their text in a manifest, for each column of a function's key and state."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from spark_abs.errors import Refused

_ATOMS = {
    str(kind): kind
    for kind in (
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.date32(),
        pa.time64("ns"),
        pa.null(),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
        *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    )
}
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns), tz=([^\]]+)\]")
_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Parse `name: type` of each column, the form of `StateFunction.key` and `.state`.

    Raises:
        Refused: a text has no type that Spark knows, or a name has `: `, commas or brackets.
    """
    return pa.schema([_field(column) for column in columns])


def type_of(text: str) -> pa.DataType:
    """Parse the text of an Arrow type.

    Raises:
        Refused: as `schema_of`.
    """
    if (atom := _ATOMS.get(text)) is not None:
        return atom
    if match := _ZONED.fullmatch(text):
        return pa.timestamp(match[1], match[2])
    if match := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(match[1]), int(match[2]))
    kind, angle, inside = text.partition("<")
    parts = _split(inside[:-1]) if angle and inside.endswith(">") else []
    match kind, len(parts):
        case "list", 1:
            return pa.list_(_field(parts[0]))
        case "large_list", 1:
            return pa.large_list(_field(parts[0]))
        case "map", 2:
            item, nullable = _nullable(parts[1])
            return pa.map_(type_of(parts[0]), pa.field("value", type_of(item), nullable))
        case "struct", _ if angle:
            return pa.struct([_field(part) for part in parts])
    raise Refused(f"{text!r} is not the type of a state column")


def _field(text: str) -> pa.Field:
    name, colon, kind = text.partition(": ")
    if not colon:
        raise Refused(f"{text!r} is not the name and type of a state column")
    kind, nullable = _nullable(kind)
    return pa.field(name, type_of(kind), nullable)


def _nullable(text: str) -> tuple[str, bool]:
    kind = text.removesuffix(" not null")
    return kind, kind == text


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts
