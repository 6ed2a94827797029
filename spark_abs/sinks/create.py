"""The tables of sinks: made where there are none, checked where there are."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from spark_abs.channels.schema import check_schema, delta_schema
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def ensure_sink(place: Place, schema: StructType) -> str:
    """Create the table of a sink if there is none, and return its table id. Two creators end with one.

    A table that was there must have every column of the frame with the same type; columns that only the
    table has stay null.

    Raises:
        UsageError: the table cannot take the frame's rows; names every column that differs.
    """
    table = Table.ensure(place, delta_schema(schema), {})
    _check(table, schema)
    return table.id


def check_sink(place: Place, schema: StructType) -> None:
    """Check that the table of a sink, if there is one, can take the frame's rows.

    Raises:
        UsageError: as `ensure_sink`.
    """
    with suppress(FileNotFoundError):
        _check(Table.open(place), schema)


def _check(table: Table, schema: StructType) -> None:
    check_schema(f"table {table.place}", table.delta.schema().to_json(), schema, may_lack=True)
