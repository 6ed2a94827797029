"""The catalogs of a Spark session: entries of tables, and the location of a new table.

Read in Spark 4.2: the calls into the JVM are private to it. None of them opens a table, which takes Delta
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_abs.catalog.names import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SESSION_CATALOG = "spark_catalog"
"""The catalog that every session has."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a table in a catalog."""

    provider: str
    """The format, such as `delta`; empty for a view."""
    location: str
    """As Hadoop writes it; empty if the catalog does not say it."""


@dataclass(frozen=True, slots=True)
class FullName:
    """A name as a session understands it."""

    catalog: str
    namespace: tuple[str, ...]
    table: str

    def __str__(self) -> str:
        return str(TableName((self.catalog, *self.namespace, self.table)))

    @property
    def sql(self) -> str:
        """The name as an identifier of SQL, whatever is in its parts."""
        return TableName((self.catalog, *self.namespace, self.table)).sql

    @property
    def in_session_catalog(self) -> bool:
        """Whether the session's own catalog is asked."""
        return self.catalog == SESSION_CATALOG and len(self.namespace) == 1


def full_name(session: SparkSession, name: TableName) -> FullName:
    """Return a name with its catalog and schema: those of the session where it does not say them."""
    *above, table = name.parts
    if above and above[0].lower() == SESSION_CATALOG:
        return FullName(SESSION_CATALOG, tuple(above[1:]), table)
    if above and _manager(session).isCatalogRegistered(above[0]):
        return FullName(above[0], tuple(above[1:]), table)
    namespace = above or [str(part) for part in _manager(session).currentNamespace()]
    return FullName(str(session.catalog.currentCatalog()), tuple(namespace), table)


def entry_of(session: SparkSession, name: FullName) -> Entry | None:
    """Return the catalog's entry of a table, None if there is no such table."""
    if name.in_session_catalog:
        catalog, identifier = _catalog(session), _identifier(session, name)
        if catalog.tableExists(identifier):
            found = catalog.getTableMetadata(identifier)
            provider, location = found.provider(), found.storage().locationUri()
            return Entry(
                str(provider.get()).lower() if provider.isDefined() else "",
                _text(session, location.get()) if location.isDefined() else "",
            )
    if name.catalog == SESSION_CATALOG and len(name.namespace) != 1:
        return None
    jvm: Any = session._jvm
    identifier = jvm.org.apache.spark.sql.connector.catalog.Identifier.of(
        _strings(session, name.namespace), name.table
    )
    catalog = _manager(session).catalog(name.catalog)
    if not catalog.tableExists(identifier):
        return None
    properties = catalog.loadTable(identifier).properties()
    return Entry(str(properties.get("provider") or "").lower(), str(properties.get("location") or ""))


def is_temporary_view(session: SparkSession, name: TableName) -> bool:
    """Say whether a name is that of a temporary view of the session."""
    if len(name.parts) > 1:
        return name.parts[0].lower() == "global_temp"
    jvm: Any = session._jvm
    identifier = jvm.org.apache.spark.sql.catalyst.TableIdentifier(name.parts[0])
    return bool(_catalog(session).isTempView(identifier))


def has_schema(session: SparkSession, name: FullName) -> bool:
    """Say whether the schema of a table is there."""
    return bool(session.catalog.databaseExists(TableName((name.catalog, *name.namespace)).sql))


def planned_location(session: SparkSession, name: FullName) -> str:
    """Return where the session's own catalog puts a new managed table."""
    return _text(session, _catalog(session).defaultTablePath(_identifier(session, name)))


def register(session: SparkSession, name: FullName, location: str, managed: bool) -> None:
    """Register an existing table in the session's own catalog, as Delta does for a new table.

    One that is entered already stays as it is.

    Args:
        session: a session.
        name: a name in its own catalog.
        location: where the table is.
        managed: whether its files go when it is dropped.
    """
    jvm: Any = session._jvm
    types, option = jvm.org.apache.spark.sql.catalyst.catalog, jvm.scala.Option.apply
    empty = types.CatalogStorageFormat.empty()
    storage = empty.copy(
        option(jvm.org.apache.hadoop.fs.Path(location).toUri()),
        *_defaults(empty, "copy", 2),
    )
    companion = getattr(types, "CatalogTable$")
    made: Any = companion.__getattr__("MODULE$")
    table = made.apply(
        _identifier(session, name),
        types.CatalogTableType.MANAGED() if managed else types.CatalogTableType.EXTERNAL(),
        storage,
        jvm.org.apache.spark.sql.types.StructType(),  # the table's own log has it
        option("delta"),
        *_defaults(made, "apply", 6),
    )
    _catalog(session).createTable(table, True, False)


def _defaults(owner: Any, method: str, first: int) -> list[Any]:
    """Return what Scala fills in for the parameters of a method from one on."""
    prefix = f"{method}$default$"
    numbers = sorted(int(name.removeprefix(prefix)) for name in dir(owner) if name.startswith(prefix))
    return [getattr(owner, f"{prefix}{number}")() for number in numbers if number >= first]


def _catalog(session: SparkSession) -> Any:
    return session._jsparkSession.sessionState().catalog()


def _manager(session: SparkSession) -> Any:
    return session._jsparkSession.sessionState().catalogManager()


def _identifier(session: SparkSession, name: FullName) -> Any:
    jvm: Any = session._jvm
    schema = jvm.scala.Option.apply(name.namespace[0])
    return jvm.org.apache.spark.sql.catalyst.TableIdentifier(name.table, schema)


def _text(session: SparkSession, uri: Any) -> str:
    """Return a location without the escapes of a URI."""
    jvm: Any = session._jvm
    return str(jvm.org.apache.hadoop.fs.Path(uri).toString())


def _strings(session: SparkSession, values: Sequence[str]) -> Any:
    jvm, context = session._jvm, session.sparkContext
    gateway: Any = context._gateway
    array = gateway.new_array(jvm.java.lang.String, len(values))  # type: ignore[union-attr]
    for at, value in enumerate(values):
        array[at] = value
    return array
