"""Read the tables of a job at one consistent cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_abs.errors import Refused, UsageError
from spark_abs.lookup.find import lookup
from spark_abs.manifest import Manifest, OutputVersion
from spark_abs.store.root import Root
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_sink(session: SparkSession, root: Root, name: str, checkpoint: str | int) -> DataFrame:
    """Read a Delta sink as it was at a checkpoint; see `JobRoot.read`."""
    from spark_abs.session import apply_storage_conf

    uri, version = recorded_version(root, name, checkpoint)
    apply_storage_conf(session, root.storage)
    return session.read.format("delta").option("versionAsOf", version).load(uri)


def recorded_version(root: Root, name: str, checkpoint: str | int = "latest") -> tuple[str, int]:
    """Return the URI of a sink's table and its version at a checkpoint. No JVM; errors as `JobRoot.read`."""
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
