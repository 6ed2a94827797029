"""The options of an Iceberg sink."""

from __future__ import annotations

import re
from dataclasses import InitVar, dataclass

from spark_abs.errors import UsageError
from spark_abs.sinks.environment import check_variables

MAIN_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class Iceberg:
    """A table of Iceberg that gets the rows of an output, in a snapshot after each checkpoint that has rows.

    The class has names only, never a secret.

    Where the catalog is comes from pyiceberg's own configuration: `PYICEBERG_CATALOG__<NAME>__URI` and so on,
    or `.pyiceberg.yaml`.
    """

    table: str
    """Namespace and name, as `shop.orders`."""
    catalog: str = "default"
    """The catalog as pyiceberg's configuration names it."""
    catalog_env: str | None = None
    """The name of an environment variable with properties of the catalog as JSON: passwords, tokens."""
    branch: str = MAIN_BRANCH
    evolve: bool = False
    """Whether a column that the output has got is added to the table, with the first rows that have it."""

    key: InitVar[object] = ()
    sequence_by: InitVar[object] = ()
    apply_as_deletes: InitVar[object] = ()
    """These three are refused: rows are appended."""

    def __post_init__(self, key: object, sequence_by: object, apply_as_deletes: object) -> None:
        """Check the names.

        Raises:
            UsageError: a name is invalid, or changes by key are asked for.
        """
        changes = {"key": key, "sequence_by": sequence_by, "apply_as_deletes": apply_as_deletes}
        if given := [word for word, value in changes.items() if value]:
            raise UsageError(
                f"table {self.table!r}: {' and '.join(f'{word}=' for word in given)} would merge rows by "
                "key, and this sink only appends: a merge would write whole data files anew, in the driver. "
                "Merge into a Delta table or PostgreSQL, or append here and let an engine merge"
            )
        for name, what in ((self.table, "table"), (self.branch, "branch"), (self.catalog, "catalog")):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*", name):
                raise UsageError(f"{name!r} is not the name of a {what}: letters, digits, '_' and '-'")
        if "." not in self.table:
            raise UsageError(f"table {self.table!r} says no namespace: shop.{self.table}, for example")
        check_variables(self.catalog_env)

    @property
    def target(self) -> str:
        """The table as messages name it."""
        return self.table if self.branch == MAIN_BRANCH else f"{self.table} (branch {self.branch})"
