"""What a Delta table is, beside its rows: by it files are written, and by it a commit is refused later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from spark_abs.store.table import Table

_RUNNING = "delta.identity.highWaterMark"
"""Moves with each commit to a table that numbers its rows."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a field in one."""

    path: str
    """Names with dots between; the parts of arrays and maps are `element`, `key` and `value`."""
    type: str
    """As Delta writes it, as JSON if it is nested."""
    nullable: bool
    metadata: tuple[tuple[str, str], ...] = ()
    """Keys, and values as JSON."""


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

    @property
    def append_only(self) -> bool:
        """Whether no row may leave it."""
        return any(
            (key.casefold(), value.casefold()) == ("delta.appendonly", "true")
            for key, value in self.properties
        )


class KeptShape:
    """The shape of a kept table: read anew only after a commit that may have changed it."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._at, self._shape = table.defined, shape_of(table.delta)

    @property
    def now(self) -> TableShape:
        """The shape as of the version read; the same object as long as nothing has changed."""
        if self._table.defined != self._at:
            self._at, found = self._table.defined, shape_of(self._table.delta)
            if found != self._shape:
                self._shape = found
        return self._shape


def shape_of(table: DeltaTable) -> TableShape:
    """Read the shape of a table as of the version read; asks nothing of the store."""
    protocol, metadata = table.protocol(), table.metadata()
    mine = {k: v for k, v in metadata.configuration.items() if k.casefold().startswith("delta.")}
    return TableShape(
        str(metadata.id),
        tuple(_columns(json.loads(table.schema().to_json()), "")),
        tuple(metadata.partition_columns),
        tuple(sorted((key, str(value)) for key, value in mine.items())),
        protocol.min_reader_version,
        protocol.min_writer_version,
        frozenset(protocol.reader_features or ()) | frozenset(protocol.writer_features or ()),
    )


def _columns(kind: Any, where: str) -> Iterator[Column]:
    """Iterate the fields in a type, as Delta's JSON has it."""
    for name, of, nullable, metadata in _fields(kind):
        said = {key: json.dumps(value, sort_keys=True) for key, value in metadata.items() if key != _RUNNING}
        text = of if isinstance(of, str) else json.dumps(of, sort_keys=True)
        yield Column(f"{where}{name}", text, nullable, tuple(sorted(said.items())))
        yield from _columns(of, f"{where}{name}.")


def _fields(kind: Any) -> list[tuple[str, Any, bool, dict[str, Any]]]:
    match kind:
        case {"type": "struct", "fields": fields}:
            return [(f["name"], f["type"], bool(f["nullable"]), f["metadata"]) for f in fields]
        case {"type": "array", "elementType": element, "containsNull": nullable}:
            return [("element", element, bool(nullable), {})]
        case {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": nullable}:
            return [("key", key, True, {}), ("value", value, bool(nullable), {})]
    return []
