"""The tables of sinks: made where there are none, checked where there are, widened where that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spark_abs.channels.schema import check_schema, delta_schema, plain_schema
from spark_abs.errors import CommitConflict, UsageError
from spark_abs.protocol.change_data import END_AT, START_AT
from spark_abs.sinks.delete_predicate import require_one_answer, without_plan
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.native_writable import why_not_plain, why_not_sink
from spark_abs.sinks.delta.options import Delta
from spark_abs.sinks.delta.table_shape import shape_of
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType


def ensure_sink(place: Place, schema: StructType, delta: Delta, session: SparkSession) -> str:
    """Create the table of a sink if there is none, and return its table id. Two creators end with one.

    A table that was there must have every column of the frame with the same type, or gets those that it
    lacks with `evolve`; columns that only the table has stay null.

    Raises:
        UsageError: the table cannot take the frame's rows; names every column that differs.
    """
    from pyspark.sql.types import StructType

    schema = _of_table(place, schema, delta, session)
    plain = plain_schema(schema)
    while True:  # another start may make the table, or add columns of other types, meanwhile
        try:
            table = Table.open(place)
        except FileNotFoundError:
            if delta.partition_by or delta.cluster_by:
                with suppress(CommitConflict):
                    spark_writer.create(session, place, plain, delta)
            table = Table.ensure(place, delta_schema(schema), {})
        _check(table, schema, delta, session)
        lacking = _lacking(table, plain) if delta.evolve else frozenset()
        if not lacking:
            return table.id
        fields = [field for field in plain.fields if field.name in lacking]
        with suppress(CommitConflict):
            if why_not_plain(shape_of(table.delta)) is None:  # Delta's own writer refuses a name with a blank
                table.add_columns(delta_schema(StructType(fields)))
            else:
                spark_writer.add_columns(session, table, fields)


def check_sink(place: Place, schema: StructType, delta: Delta, session: SparkSession) -> None:
    """Check that the table of a sink, if there is one, can take the frame's rows.

    Raises:
        UsageError: as `ensure_sink`.
    """
    schema = _of_table(place, schema, delta, session)
    with suppress(FileNotFoundError):
        _check(Table.open(place), schema, delta, session)


def _of_table(place: Place, schema: StructType, delta: Delta, session: SparkSession) -> StructType:
    """Return the columns of the table for rows of a schema.

    Raises:
        UsageError: something is named that the rows, or the table, do not have, or that cannot be compared.
    """
    from pyspark.sql import types as t

    changes = delta.changes
    _require_columns(place, "the output", schema.names, changes, ("sequence_by", "except_columns"))
    _require_columns(place, "the output", schema.names, delta, ("key",))
    _require_comparable(place, schema, delta)
    if changes.apply_as_deletes:
        _require_predicate(place, schema, changes.apply_as_deletes, session)
    stored = set(changes.stored(schema.names))
    found = t.StructType([field for field in schema.fields if field.name in stored])
    if changes.scd_type == 2:
        if taken := [name for name in found.names if name.upper() in (START_AT, END_AT)]:
            raise UsageError(f"table {place}: scd_type=2 makes the column {taken[0]}, which the output has")
        ordered = [_field(schema, column) for column in changes.sequence_by]
        kind = ordered[0].dataType if len(ordered) == 1 else t.StructType(ordered)
        found = found.add(START_AT, kind).add(END_AT, kind)
    _require_columns(place, "the table", found.names, delta, ("partition_by", "cluster_by"))
    _require_one_clock(place, found, delta, delta.partition_by, session)
    return found


def _require_comparable(place: Place, schema: StructType, delta: Delta) -> None:
    """Require key and sequence columns whose values compare alike in Spark and in the table."""
    for said, columns in {"key": delta.key, "sequence_by": delta.changes.sequence_by}.items():
        if maps := [c for c in columns if "map<" in _field(schema, c).dataType.simpleString()]:
            raise UsageError(
                f"table {place}: {said} names {', '.join(maps)}, and maps cannot be compared: put "
                "the entries that tell rows apart into columns of their own"
            )
    if folding := [c for c in delta.key if "collate" in _field(schema, c).dataType.simpleString()]:
        raise UsageError(
            f"table {place}: key names {', '.join(folding)}, whose collation makes different texts equal, "
            "and Delta does not store collations: cast the column to STRING in the stage, and fold it there, "
            "for example with lower()"
        )


def _require_predicate(place: Place, schema: StructType, text: str, session: SparkSession) -> None:
    """Require a condition that gives a row the same answer whenever it is asked."""
    from pyspark.errors import PySparkException
    from pyspark.sql import types as t

    try:
        rows = session.createDataFrame([], schema).selectExpr(f"({text}) AS gone")
    except PySparkException as error:
        raise UsageError(f"table {place}: apply_as_deletes cannot be read: {without_plan(error)}") from error
    if not isinstance(rows.schema["gone"].dataType, t.BooleanType):
        raise UsageError(f"table {place}: apply_as_deletes is not a condition: {text}")
    plan: Any = rows._jdf.queryExecution().analyzed()
    require_one_answer(f"table {place}: apply_as_deletes={text!r}", plan)


def _require_one_clock(
    place: Place, schema: StructType, delta: Delta, partitions: Sequence[str], session: SparkSession
) -> None:
    """Require that moments by which rows are found or compared stay apart in the partitions.

    Delta's writer takes them through the local time of its session, where summer time ends with an hour that
    comes twice: of two moments it stores the earlier one.

    Raises:
        UsageError: they might not; names the columns.
    """
    from pyspark.sql import types as t

    compared = {column.casefold() for column in (*delta.key, *delta.changes.sequence_by)}
    compared |= {END_AT.casefold(), START_AT.casefold()} if delta.changes.scd_type == 2 else set()
    compared &= {column.casefold() for column in partitions}
    moments = [f.name for f in schema if f.name.casefold() in compared and f.dataType == t.TimestampType()]
    if moments and has_summer_time(session, zone := spark_writer.time_zone(session)):
        raise UsageError(
            f"table {place} is partitioned by {', '.join(moments)}, by which rows are found: in {zone} an "
            "hour comes twice when summer time ends, and Delta stores both as one. Set "
            "spark.sql.session.timeZone to UTC where the session is built, or partition by other columns"
        )


def has_summer_time(session: SparkSession, zone: str) -> bool:
    """Say whether the clocks of a zone are still changed."""
    jvm: Any = session._jvm
    rules = jvm.org.apache.spark.sql.catalyst.util.DateTimeUtils.getZoneId(zone).getRules()
    return rules.nextTransition(jvm.java.time.Instant.now()) is not None


def _require_columns(
    place: Place, who: str, columns: Sequence[str], said: object, fields: Sequence[str]
) -> None:
    there = {column.casefold() for column in columns}
    for field in fields:
        if unknown := [column for column in getattr(said, field) if column.casefold() not in there]:
            raise UsageError(f"table {place}: {field} names {', '.join(unknown)}, which {who} does not have")


def _field(schema: StructType, column: str) -> StructField:
    return next(field for field in schema.fields if field.name.casefold() == column.casefold())


def _check(table: Table, schema: StructType, delta: Delta, session: SparkSession) -> None:
    from pyspark.sql.types import StructType

    if why := why_not_sink(shape_of(table.delta), rewrites=bool(delta.key)):
        raise UsageError(f"table {table.place} cannot be that of a sink: {why}")
    lacking = _lacking(table, schema) if delta.evolve else frozenset()
    there = StructType([field for field in schema.fields if field.name not in lacking])
    check_schema(f"table {table.place}", table.delta.schema().to_json(), there, may_lack=True)
    partitions = table.delta.metadata().partition_columns
    _require_one_clock(table.place, schema, delta, partitions, session)
    if delta.partition_by:
        _require("partitioned", table, partitions, delta.partition_by)
    if delta.cluster_by:
        _require("clustered", table, spark_writer.clusters(session, table.place), delta.cluster_by)


def _lacking(table: Table, schema: StructType) -> frozenset[str]:
    there = {str(field.name).casefold() for field in table.delta.schema().fields}
    return frozenset(name for name in schema.names if name.casefold() not in there)


def _require(how: str, table: Table, found: Sequence[str], wanted: Sequence[str]) -> None:
    if list(found) != list(wanted):
        raise UsageError(
            f"table {table.place} is {how} by {', '.join(found) or 'nothing'}, and the sink says by "
            f"{', '.join(wanted)}: leave that out, or write to another table"
        )
