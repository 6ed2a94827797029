"""Calls to Delta in the JVM, since Delta's Python package is bound to one version of Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_abs.errors import CommitConflict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_CONFLICTS = "io.delta.exceptions."
"""The package that has exactly Delta's exceptions for conflicting commits."""


class SparkDeltaTable:
    """A table that Delta reads and writes in a session, by its URI."""

    def __init__(self, session: SparkSession, uri: str) -> None:
        self._session = session
        self._table = _class(session).forPath(session._jsparkSession, uri)

    def merge(
        self,
        new: DataFrame,
        same: str,
        *,
        delete_when: str,
        update_when: str,
        update: Mapping[str, str],
        insert_when: str,
        insert: Mapping[str, str],
    ) -> None:
        """Merge rows `new` into the table's rows `old`, in one commit.

        Args:
            new: the rows.
            same: the condition for a new and an old row to match.
            delete_when: the condition to delete a matched row; empty: never.
            update_when: the condition to update a matched row that is not deleted; empty: always.
            update: columns, quoted, and their new values in SQL.
            insert_when: the condition to insert a new row without a match; empty: always.
            insert: columns, quoted, and their values in SQL.
        """
        merging = self._table.alias("old").merge(new.alias("new")._jdf, same)
        if delete_when:
            merging = merging.whenMatched(delete_when).delete()
        matched = merging.whenMatched(update_when) if update_when else merging.whenMatched()
        merging = matched.updateExpr(dict(update))
        unmatched = merging.whenNotMatched(insert_when) if insert_when else merging.whenNotMatched()
        unmatched.insertExpr(dict(insert)).execute()

    def delete_rows(self) -> None:
        """Delete all rows."""
        self._table.delete()

    def restore_to(self, version: int) -> None:
        """Restore the table to a version."""
        self._table.restoreToVersion(version)

    def clustering(self) -> Sequence[str]:
        """Return the columns of its liquid clustering."""
        from pyspark.sql import DataFrame

        found = DataFrame(self._table.detail(), self._session).select("clusteringColumns").head()
        return list(found[0]) if found is not None else []


def create_table(
    session: SparkSession,
    uri: str,
    schema: StructType,
    partition_by: Sequence[str],
    cluster_by: Sequence[str],
) -> None:
    """Create a table if it does not exist."""
    java_session: Any = session._jsparkSession
    builder = _class(session).createIfNotExists(java_session).location(uri)
    builder = builder.addColumns(java_session.parseDataType(schema.json()))
    if partition_by:
        builder = builder.partitionedBy(_strings(session, partition_by))
    if cluster_by:
        builder = builder.clusterBy(_strings(session, cluster_by))
    builder.execute()


@contextmanager
def conflicts(place: object) -> Iterator[None]:
    """Turn Delta's errors for conflicting commits into `CommitConflict`."""
    from pyspark.errors.exceptions.captured import CapturedException

    try:
        yield
    except CapturedException as error:
        if error._origin is None or not str(error._origin.toString()).startswith(_CONFLICTS):
            raise
        raise CommitConflict(f"{place} was changed by another commit: {error}") from error


def _class(session: SparkSession) -> Any:
    jvm: Any = session._jvm
    return jvm.io.delta.tables.DeltaTable


def _strings(session: SparkSession, values: Sequence[str]) -> Any:
    gateway: Any = session.sparkContext._gateway
    made = gateway.new_array(gateway.jvm.java.lang.String, len(values))
    for at, value in enumerate(values):
        made[at] = value
    return made
