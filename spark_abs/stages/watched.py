"""The Delta tables that a sink function writes by itself: their versions are recorded at every cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spark_abs.catalog.target import TableTarget
from spark_abs.errors import UsageError
from spark_abs.manifest import OutputVersion
from spark_abs.model import BatchId, StageId
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table

WATCHED = "table"
"""The kind of these outputs in a manifest."""


class WatchedTables:
    """Knows where each table is. Not thread-safe: the holder of the stage's batch lock uses it."""

    def __init__(
        self,
        stage: StageId,
        tables: Sequence[TableTarget],
        storage: Storage,
        find: Callable[[TableTarget], TableTarget],
        came: Callable[[TableTarget], None],
    ) -> None:
        """Take the tables.

        Args:
            stage: whose function writes them.
            tables: where each is, or is expected.
            storage: how object stores are reached.
            find: returns where a missing table is now: its name may lead to another place.
            came: called with each missing table that has come.
        """
        self._stage, self._storage = stage, storage
        self._find, self._came = find, came
        self._tables = list(tables)
        self._missing = [number for number, table in enumerate(tables) if not self._is_there(table)]

    def require(self, batch: BatchId) -> None:
        """Require that the function has made the missing tables. Costs nothing once they are there.

        Raises:
            UsageError: a table is missing; names the place where it was expected.
        """
        for number in tuple(self._missing):
            found = self._find(self._tables[number])
            if not self._is_there(found):
                raise UsageError(self._said(self._tables[number], batch))
            self._came(found)
            self._tables[number] = found
            self._missing.remove(number)

    def versions(self) -> tuple[OutputVersion, ...]:
        """Return the version of each table, between two batches of the stage that writes it."""
        return tuple(map(self._version, self._tables))

    def _is_there(self, target: TableTarget) -> bool:
        return Table.find(self._storage.place(target.uri)) is not None

    def _said(self, target: TableTarget, batch: BatchId) -> str:
        expected = f"a Delta table at {target.uri}"
        if target.name is not None:
            expected += f", as {target.name} of the catalog; ./{target.text} would be a path"
        return (
            f"query {self._stage!r}: tables= names {target.text!r}, and after batch {batch} of its function "
            f"there is no such table. Expected is {expected}. Without it no restore could undo the rows of "
            "the function: give tables= the text that the function gives to its writer, or create the table "
            "before the query starts"
        )

    def _version(self, target: TableTarget) -> OutputVersion:
        place = self._storage.place(target.uri)
        table = Table.find(place)
        if table is None:
            return OutputVersion(
                self._stage, WATCHED, table=place.uri, table_id="", version=None, name=target.said
            )
        return OutputVersion(
            self._stage, WATCHED, table=place.uri, table_id=table.id, version=table.version, name=target.said
        )
