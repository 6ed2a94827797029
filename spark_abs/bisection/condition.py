"""A condition in SQL over versions of Delta tables, which deltalake's own engine (DataFusion) answers.

The user's text stands inside of a SELECT, so it cannot write, and it finds only tables that are registered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from spark_abs.errors import AbsError, Refused, UsageError

_CASE = {"datafusion.sql_parser.enable_ident_normalization": "false"}
"""Names are taken as they are written: Delta's columns have capitals."""
_QUERY = re.compile(r"(select|with|values)\b", re.IGNORECASE)


class CannotAsk(AbsError):
    """The condition does not fit the tables of a moment: what it names is missing, or is several tables."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What makes data bad: a boolean expression, or a query."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.strip().rstrip(";").rstrip())
        if not self.text:
            raise UsageError("the condition is empty")

    def names_in(self, tables: Collection[str]) -> tuple[str, ...]:
        """Return those of some tables that the text names; perhaps more than it reads.

        Raises:
            UsageError: it names none.
        """
        found = tuple(
            sorted(t for t in tables if re.search(rf"(?<!\w){re.escape(t)}(?!\w)", self.text) is not None)
        )
        if not found:
            known = ", ".join(sorted(tables)) or "none"
            raise UsageError(f"the condition names none of the tables, which are {known}: {self.text}")
        return found

    def check(self, tables: Mapping[str, DeltaTable]) -> None:
        """See whether the condition can be asked of some tables; reads no rows.

        Raises:
            CannotAsk: it cannot; says why.
        """
        try:
            _registered(tables).execute(f"EXPLAIN {self._sql}")
        except DeltaError as error:
            known = ", ".join(f'"{name}"' for name in sorted(tables))
            raise CannotAsk(f"{' '.join(str(error).split())} (the tables are {known})") from error

    def is_true(self, tables: Mapping[str, DeltaTable]) -> bool:
        """Say whether the tables are bad.

        They are if the expression is true. They are if the query returns a row; if it has one column, a
        boolean, they are if that is true in a row.

        Raises:
            Refused: the tables cannot be read, or the computation fails.
        """
        try:
            found = _registered(tables).execute(self._sql)
            of_booleans = [field.type for field in pa.schema(found.schema)] == [pa.bool_()]
            for batch in found:
                rows = pa.record_batch(batch)
                if rows.num_rows and (not of_booleans or any(rows.column(0).to_pylist())):
                    return True
        except Exception as error:  # the engine raises no narrower one
            raise Refused(f"the condition cannot be computed: {' '.join(str(error).split())}") from error
        return False

    @property
    def _sql(self) -> str:
        if _QUERY.match(self.text):
            return "\n".join(("SELECT * FROM (", self.text, ") AS asked"))
        return "\n".join(("SELECT 1 AS bad WHERE (", self.text, ")"))


def _registered(tables: Mapping[str, DeltaTable]) -> QueryBuilder:
    builder = QueryBuilder(_CASE)
    for name, table in tables.items():
        quoted = name.replace('"', '""')
        builder.register(f'"{quoted}"', table)
    return builder
