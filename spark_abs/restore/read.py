"""Read the tables of a job at one consistent cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import Manifest, OutputVersion
from spark_abs.restore.lookup import lookup
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    root: str,
    name: str,
    checkpoint: str | int = "latest",
    spark: SparkSession | None = None,
    **settings: object,
) -> DataFrame:
    """Read a Delta sink as it was at a checkpoint.

    Tables read at the same checkpoint belong together: no row of one has seen more input than any row of
    another. While the job runs `latest` moves on: to read several tables, name the checkpoint by its id.

    Args:
        root: the job's root.
        name: the sink.
        checkpoint: an id, the name of a savepoint, or `latest`.
        spark: a session with Delta; the active one if None.
        settings: of the area `storage`, by their short names.

    Raises:
        UsageError: there is no such sink at the checkpoint, it is a function, or there is no session.
        CheckpointNotFound: there is no such checkpoint.
        Refused: the table was replaced since.
    """
    from spark_abs.session import lend

    session = spark if spark is not None else active_session()
    storage = Storage.given(dict(session.conf.getAll), settings)
    uri, version = recorded_version(Root(root, storage), name, checkpoint)
    lend(session, storage)
    return session.read.format("delta").option("versionAsOf", version).load(uri)


def recorded_version(root: Root, name: str, checkpoint: str | int = "latest") -> tuple[str, int]:
    """Return the URI of a sink's table and its version at a checkpoint. No JVM; errors as `read`."""
    manifest = lookup(root, checkpoint).manifest
    found = _sink(manifest, name)
    if found.version is None:
        raise UsageError(f"sink {name!r} is a function: it has no versions to read")
    place = root.storage.place(found.table)
    try:
        table = Table.open(place)
    except FileNotFoundError:
        raise Refused(f"sink {name!r} has no table at {place} any more") from None
    if table.id != found.table_id:
        raise Refused(
            f"{place} is not the table of checkpoint {manifest.id} (its id is {table.id}, recorded was "
            f"{found.table_id}): versions of one mean nothing in the other"
        )
    return place.uri, int(found.version)


def _sink(manifest: Manifest, name: str) -> OutputVersion:
    sinks = {o.output: o for s in manifest.stages for o in s.outputs if o.kind != "channel"}
    if name not in sinks:
        known = ", ".join(sorted(sinks)) or "none"
        raise UsageError(f"checkpoint {manifest.id} has no sink {name!r}: it has {known}")
    return sinks[name]


def active_session() -> SparkSession:
    """Return the session of this thread.

    Raises:
        UsageError: there is none.
    """
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise UsageError("no Spark session is active: pass spark=spark_abs.spark_session(...)")
    return session
