"""Keys of a merge as Delta stores them: two values that Delta stores as one are one key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spark_abs.catalog.names import quoted
from spark_abs.store.table import Table

_CHAR = "__CHAR_VARCHAR_TYPE_STRING"


class StoredKey:
    """The columns of a key, as expressions of Spark. Nulls are equal, and so are NaNs, and -0.0 and 0.0."""

    def __init__(self, table: Table, key: Sequence[str]) -> None:
        """Take the columns as the table has them, as of the version read."""
        fields = json.loads(table.delta.schema().to_json())["fields"]
        self._fields: Mapping[str, Mapping[str, Any]] = {f["name"].casefold(): f for f in fields}
        self._partitions = {name.casefold() for name in table.delta.metadata().partition_columns}
        self.columns = tuple(key)

    @property
    def names(self) -> list[str]:
        """The fields of `struct`."""
        return [f"k{number}" for number in range(len(self.columns))]

    def struct(self) -> str:
        """Return the key of a row of a frame as one value."""
        return named_struct("k", [self._stored(quoted(column), column) for column in self.columns])

    def same(self, old: str, new: str) -> str:
        """Return the condition that row `old` of the table has the key `new`, a `struct`."""
        return " AND ".join(
            f"{self._stored(f'{old}.{quoted(column)}', column)} <=> {new}.{name}"
            for column, name in zip(self.columns, self.names, strict=True)
        )

    def unpadded(self, value: str, column: str) -> str:
        """Return a value of a column, also one that is no part of the key, as it was before it was stored."""
        if str(self._field(column)["metadata"].get(_CHAR, "")).startswith("char("):
            return f"rtrim({value})"  # they are read as if blanks filled them up
        return value

    def _field(self, column: str) -> Mapping[str, Any]:
        return self._fields.get(column.casefold(), {"type": "", "metadata": {}})

    def _stored(self, value: str, column: str) -> str:
        value = self.unpadded(value, column)
        if column.casefold() in self._partitions and self._field(column)["type"] in ("string", "binary"):
            value = f"IF(octet_length({value}) = 0, NULL, {value})"  # what is empty is stored as null
        return value


def named_struct(prefix: str, values: Sequence[str]) -> str:
    """Return expressions as one value, whose fields are the prefix with a number."""
    fields = (f"'{prefix}{number}', {value}" for number, value in enumerate(values))
    return f"named_struct({', '.join(fields)})"
