"""Writes to Delta tables that only Delta's own writer can serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_abs.model import NO_TABLE
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_COMPUTED = ("delta.generationExpression", "delta.identity.")


def append(session: SparkSession, uri: str, files: Sequence[str], app: str, number: int, note: str) -> None:
    """Append the rows of files under a transaction id; a repeated or burnt id is skipped in silence."""
    _write(session.read.parquet(*files), uri, app, number, note)


def mark(session: SparkSession, table: Table, app: str, number: int, note: str) -> None:
    """Commit a transaction id and a note, and no rows."""
    fields = json.loads(table.delta.schema().to_json())["fields"]
    given = [f["name"] for f in fields if not any(key.startswith(_COMPUTED) for key in f["metadata"])]
    columns = [f"`{name.replace('`', '``')}`" for name in given]
    frame = session.read.format("delta").load(table.uri).select(*columns).limit(0)
    _write(frame, table.uri, app, number, note)


def restore(session: SparkSession, place: Place, version: int, note: str) -> None:
    """Bring a table back to a version with Delta's RESTORE, or to no rows: `NO_TABLE`."""
    from delta.tables import DeltaTable

    from spark_abs.session import apply_storage_conf

    own = session.newSession()
    apply_storage_conf(own, place.storage)
    own.conf.set(_USER_METADATA, note)
    table = DeltaTable.forPath(own, place.uri)
    if version == NO_TABLE:
        table.delete()
    else:
        table.restoreToVersion(version)


def _write(frame: DataFrame, uri: str, app: str, number: int, note: str) -> None:
    (
        frame.write.format("delta")
        .mode("append")
        .option("txnAppId", app)
        .option("txnVersion", str(number))
        .option("userMetadata", note)
        .save(uri)
    )
