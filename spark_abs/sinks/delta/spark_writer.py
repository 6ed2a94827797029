"""What only Delta's own writer can do: tables that are not plain, merges, layouts.

Where another commit stands in the way of one, each raises `CommitConflict`: read again, and decide again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.catalog.names import quoted
from spark_abs.model import NO_TABLE
from spark_abs.sinks.delta.options import Delta
from spark_abs.spark.delta import SparkDeltaTable, conflicts, create_table
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

_CONF = "spark.databricks.delta"
_COMPUTED = ("delta.generationExpression", "delta.identity.")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a commit says of itself: a repeated or burnt transaction id is skipped in silence."""

    app: str
    number: int
    note: str


def append(frame: DataFrame, place: Place, stamp: Stamp) -> None:
    """Append rows."""
    _write(frame, place, "append", stamp)


def overwrite(frame: DataFrame, place: Place, stamp: Stamp) -> None:
    """Let rows take the place of all that are there.

    Under a condition that all rows meet: an overwrite without one would end the table's clustering.
    """
    _write(frame, place, "overwrite", stamp, replaceWhere="true")


@dataclass(frozen=True, slots=True)
class Clauses:
    """What a MERGE does with each row `new` that it gets, and the rows `old` that are there."""

    same: str
    """When they are of one key."""
    update: Mapping[str, str]
    insert: Mapping[str, str]
    newer: str = ""
    """When the old row gives way; empty: always."""
    gone: str = ""
    """When the new row is a delete; empty: never."""


def merge(frame: DataFrame, place: Place, clauses: Clauses, stamp: Stamp) -> None:
    """Merge rows, one for each key, into a table in one commit."""
    own = _session(frame.sparkSession, place)
    own.conf.set(f"{_CONF}.write.txnAppId", stamp.app)
    own.conf.set(f"{_CONF}.write.txnVersion", str(stamp.number))
    own.conf.set(f"{_CONF}.commitInfo.userMetadata", stamp.note)
    own.conf.set(f"{_CONF}.schema.autoMerge.enabled", "false")  # a column that is gone must not come back
    newer, gone = clauses.newer, clauses.gone
    with conflicts(place):
        SparkDeltaTable(own, place.uri).merge(
            frame,
            clauses.same,
            delete_when=f"{gone} AND {newer}" if gone and newer else gone,
            update_when=newer,
            update={quoted(column): value for column, value in clauses.update.items()},
            insert_when=f"NOT {gone}" if gone else "",
            insert={quoted(column): value for column, value in clauses.insert.items()},
        )


def mark(session: SparkSession, table: Table, stamp: Stamp) -> None:
    """Commit a transaction id and a note, and no rows."""
    append(no_rows(session, table), table.place, stamp)


def no_rows(session: SparkSession, table: Table) -> DataFrame:
    """Return a frame without rows that has the columns of a table which a writer gives."""
    fields = json.loads(table.delta.schema().to_json())["fields"]
    given = [f["name"] for f in fields if not any(key.startswith(_COMPUTED) for key in f["metadata"])]
    return session.read.format("delta").load(table.uri).select(*map(quoted, given)).limit(0)


def restore(session: SparkSession, place: Place, version: int, note: str) -> None:
    """Bring a table back to a version with Delta's RESTORE, or to no rows: `NO_TABLE`."""
    from spark_abs.spark.session import old_versions

    own = _session(session, place)
    own.conf.set(f"{_CONF}.commitInfo.userMetadata", note)
    table = SparkDeltaTable(own, place.uri)
    with conflicts(place), old_versions(own):
        if version == NO_TABLE:
            table.delete_rows()
        else:
            table.restore_to(version)


def create(session: SparkSession, place: Place, schema: StructType, delta: Delta) -> None:
    """Create a table that has partitions or clusters, if there is none."""
    with conflicts(place):
        create_table(_session(session, place), place.uri, schema, delta.partition_by, delta.cluster_by)


def add_columns(session: SparkSession, table: Table, fields: Sequence[StructField]) -> None:
    """Add columns to a table, all of them null in the rows that are there."""
    from pyspark.sql import functions as F

    none = no_rows(session, table).withColumns({f.name: F.lit(None).cast(f.dataType) for f in fields})
    with conflicts(table.place):
        none.write.format("delta").mode("append").option("mergeSchema", "true").save(table.uri)


def clusters(session: SparkSession, place: Place) -> Sequence[str]:
    """Return the columns by which a table has liquid clustering."""
    return SparkDeltaTable(_session(session, place), place.uri).clustering()


def time_zone(session: SparkSession) -> str:
    """Return the time zone in which a merge writes: that with which the session was built."""
    return str(session.newSession().conf.get("spark.sql.session.timeZone"))


def _session(session: SparkSession, place: Place) -> SparkSession:
    """Return a session whose settings are those of one write."""
    from spark_abs.spark.session import apply_storage_conf

    own = session.newSession()
    apply_storage_conf(own, place.storage, [place.uri])
    return own


def _write(frame: DataFrame, place: Place, mode: str, stamp: Stamp, **options: str) -> None:
    # A column that is gone must not come back, whatever the session says.
    writer = frame.write.format("delta").mode(mode).options(mergeSchema="false", **options)
    writer = writer.option("txnAppId", stamp.app).option("txnVersion", str(stamp.number))
    with conflicts(place):
        writer.option("userMetadata", stamp.note).save(place.uri)
