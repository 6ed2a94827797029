"""What a Delta table is, beside its rows: by it files are written, and by it a commit is refused later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

_RUNNING = "delta.identity.highWaterMark"
"""Moves with each commit to a table that numbers its rows."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a field in one."""

    path: tuple[str, ...]
    """Its name, after those of the fields that it is in; parts are `element` of arrays, `key` and `value`."""
    type: str
    """As Delta names it; `struct`, `array` or `map` if there are fields in it, which follow it."""
    nullable: bool
    metadata: tuple[tuple[str, str], ...] = ()
    """Keys, and values as JSON."""

    def __str__(self) -> str:
        told = "".join(f" {key}={value}" for key, value in self.metadata)
        return f"{'.'.join(self.path)} {self.type}{'' if self.nullable else ' NOT NULL'}{told}"


@dataclass(frozen=True, slots=True)
class TableShape:
    """Identity, columns, layout, properties and protocol of a table at a version."""

    id: str
    columns: tuple[Column, ...]
    """With their nested fields, each after its own."""
    partitions: tuple[str, ...]
    properties: tuple[tuple[str, str], ...]
    """Of its configuration, those of Delta's; what users put beside them means nothing to a writer."""
    reader: int
    writer: int
    features: frozenset[str]

    def __str__(self) -> str:
        told = [f"table {self.id}: {', '.join(map(str, self.columns))}"]
        told += [f"partitioned by {', '.join(self.partitions)}"] if self.partitions else []
        told += [f"{key}={value}" for key, value in self.properties]
        told += [f"features {', '.join(sorted(self.features))}"] if self.features else []
        return "; ".join(told)

    @property
    def append_only(self) -> bool:
        """Whether no row may leave it."""
        return any(
            (key.casefold(), value.casefold()) == ("delta.appendonly", "true")
            for key, value in self.properties
        )


def shape_of(table: DeltaTable) -> TableShape:
    """Read the shape of a table as of the version read; asks nothing of the store."""
    protocol, metadata = table.protocol(), table.metadata()
    mine = {k: v for k, v in metadata.configuration.items() if k.casefold().startswith("delta.")}
    return TableShape(
        str(metadata.id),
        columns_of(json.loads(table.schema().to_json())),
        partitions=tuple(metadata.partition_columns),
        properties=tuple(sorted((key, str(value)) for key, value in mine.items())),
        reader=protocol.min_reader_version,
        writer=protocol.min_writer_version,
        features=frozenset(protocol.reader_features or ()) | frozenset(protocol.writer_features or ()),
    )


def columns_of(schema: Any) -> tuple[Column, ...]:
    """Return the columns in a schema, as Delta's JSON has it, each before its own fields."""
    return tuple(_columns(schema, ()))


def _columns(kind: Any, where: tuple[str, ...]) -> Iterator[Column]:
    for name, of, nullable, metadata in _fields(kind):
        said = {key: json.dumps(value, sort_keys=True) for key, value in metadata.items() if key != _RUNNING}
        path, plain = (*where, name), of if isinstance(of, str) else str(of["type"])
        yield Column(path, plain, nullable, tuple(sorted(said.items())))
        yield from _columns(of, path)


def _fields(kind: Any) -> list[tuple[str, Any, bool, dict[str, Any]]]:
    match kind:
        case {"type": "struct", "fields": fields}:
            return [(f["name"], f["type"], bool(f["nullable"]), f["metadata"]) for f in fields]
        case {"type": "array", "elementType": element, "containsNull": nullable}:
            return [("element", element, bool(nullable), {})]
        case {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": nullable}:
            return [("key", key, True, {}), ("value", value, bool(nullable), {})]
    return []
