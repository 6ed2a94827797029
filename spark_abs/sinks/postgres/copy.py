"""Arrow to the CSV that PostgreSQL's COPY reads, a column at a time."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_OPTIONS = csv.WriteOptions(include_header=False, quoting_style="all_valid")
"""Every value is quoted and a null is not, by which COPY tells an empty string from a null."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_OTHERS = {chr(code): f"\\u{code:04x}" for code in range(0x20) if chr(code) not in _ESCAPES}
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint8).reshape(256, 2)


def copy_text(batch: pa.RecordBatch, arrays: Sequence[bool]) -> bytes:
    """Return the rows of a batch for `COPY … FROM STDIN (FORMAT csv)`.

    Args:
        batch: the rows.
        arrays: for each column whether a list goes into an array; where not, nested values become JSON.
    """
    columns = [_column(column, array) for column, array in zip(batch.columns, arrays, strict=True)]
    sink = io.BytesIO()
    csv.write_csv(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), sink, _OPTIONS)
    return sink.getvalue()


def with_nul(batch: pa.RecordBatch, arrays: Sequence[bool]) -> str | None:
    """Return the name of a column that has a NUL in a string, None if none has; arguments as `copy_text`."""
    for name, column, array in zip(batch.schema.names, batch.columns, arrays, strict=True):
        text = _column(column, array)
        nul = "\\u0000" if pa.types.is_nested(column.type) and not array else "\0"
        if pa.types.is_string(text.type) and pc.any(pc.match_substring(text, nul)).as_py():
            return str(name)
    return None


def _column(values: pa.Array, array: bool) -> pa.Array:
    kind = values.type
    if array and pa.types.is_list(kind):
        return _array_literal(values)
    if pa.types.is_nested(kind):
        return pc.if_else(values.is_null(), pa.scalar(None, pa.string()), json_text(values))
    if pa.types.is_binary(kind):
        return hex_text(values)
    return values


def hex_text(values: pa.Array) -> pa.Array:
    r"""Return bytes as PostgreSQL reads them, `\x` and two digits for each; null stays null."""
    values = values.cast(pa.large_binary())
    offsets = np.frombuffer(values.buffers()[1], dtype=np.int64)[values.offset :][: len(values) + 1]
    held = values.buffers()[2]
    data = np.frombuffer(held, dtype=np.uint8)[: offsets[-1]] if held is not None else np.zeros(0, np.uint8)
    digits = _HEX[data[offsets[0] :]].reshape(-1)
    places = (offsets - offsets[0]) * 2
    text = pa.LargeStringArray.from_buffers(len(values), pa.py_buffer(places), pa.py_buffer(digits))
    text = pc.binary_join_element_wise(
        pa.scalar("\\x", pa.large_string()), text, pa.scalar("", pa.large_string())
    )
    return pc.if_else(values.is_null(), pa.scalar(None, pa.large_string()), text)


def _array_literal(values: pa.Array) -> pa.Array:
    inner = values.type.value_type
    flat = values.flatten()
    text = hex_text(flat).cast(pa.string()) if pa.types.is_binary(inner) else flat.cast(pa.string())
    for raw, escaped in (("\\", "\\\\"), ('"', '\\"')):
        text = pc.replace_substring(text, raw, escaped)
    text = pc.fill_null(_around('"', text, '"'), "NULL")
    return _around("{", _joined(values, text), "}")


def json_text(values: pa.Array) -> pa.Array:
    """Return each value as JSON; a null as the text `null`.

    Keys of maps are strings, bytes are written as PostgreSQL writes them, what JSON has no number for is a
    string.
    """
    kind = values.type
    if pa.types.is_null(kind):
        return pa.array(["null"] * len(values), pa.string())
    if pa.types.is_struct(kind):
        text = _object([_quoted(pa.scalar(field.name)) for field in kind], list(_fields(values)), len(values))
    elif pa.types.is_map(kind):
        start, length = _extent(values)
        keys, items = values.keys.slice(start, length), values.items.slice(start, length)
        named = pc.binary_join_element_wise(_quoted(_plain_text(keys)), json_text(items), ":")
        text = _around("{", _joined(values, named), "}")
    elif pa.types.is_list(kind):
        text = _around("[", _joined(values, json_text(values.flatten())), "]")
    elif pa.types.is_floating(kind):
        number = values.cast(pa.string())
        text = pc.if_else(pc.is_finite(values), number, _around('"', number, '"'))
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        text = values.cast(pa.string())
    else:
        text = _quoted(_plain_text(values))
    return pc.fill_null(pc.if_else(values.is_null(), pa.scalar(None, pa.string()), text), "null")


def _plain_text(values: pa.Array) -> pa.Array:
    if pa.types.is_binary(values.type):
        return hex_text(values).cast(pa.string())
    return values.cast(pa.string())


def _quoted(text: pa.Array | pa.Scalar) -> pa.Array:
    for raw, escaped in _ESCAPES.items():
        text = pc.replace_substring(text, raw, escaped)
    if isinstance(text, pa.Scalar) or pc.any(pc.match_substring_regex(text, "[\\x00-\\x1f]")).as_py():
        for raw, escaped in _OTHERS.items():
            text = pc.replace_substring(text, raw, escaped)
    return _around('"', text, '"')


def _fields(values: pa.StructArray) -> list[pa.Array]:
    return [json_text(values.field(number)) for number in range(values.type.num_fields)]


def _object(names: list[pa.Scalar], fields: list[pa.Array], length: int) -> pa.Array:
    if not fields:
        return pa.array(["{}"] * length, pa.string())
    parts = [pc.binary_join_element_wise(name, field, ":") for name, field in zip(names, fields, strict=True)]
    return _around("{", pc.binary_join_element_wise(*parts, ","), "}")


def _around(before: str, text: pa.Array | pa.Scalar, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, text, after, "")


def _extent(values: pa.MapArray) -> tuple[int, int]:
    start, end = values.offsets[0].as_py(), values.offsets[len(values)].as_py()
    return start, end - start


def _joined(values: pa.Array, text: pa.Array) -> pa.Array:
    """Join the texts of the elements of each list; `text` has those of all lists that are not null."""
    lengths = pc.fill_null(pc.list_value_length(values.cast(_as_list(values.type))), 0)
    offsets = np.concatenate(([0], np.cumsum(lengths.to_numpy(zero_copy_only=False))))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), text)
    joined = pc.binary_join(lists, ",")
    return pc.if_else(values.is_null(), pa.scalar(None, pa.string()), joined)


def _as_list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct([kind.key_field, kind.item_field])) if pa.types.is_map(kind) else kind
