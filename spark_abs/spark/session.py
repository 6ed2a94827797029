"""Spark sessions that are ready for a job: Delta, RocksDB state, one scheduler pool per stage."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import DataFrame, SparkSession

from spark_abs.errors import SparkNotStarted, UsageError
from spark_abs.model import PROVIDER_KEY, Provider
from spark_abs.spark.gateway import KnownJars, may_name_jars, quiet_log
from spark_abs.spark.versions import DELTA_CONNECTOR, PYSPARK, S3_CONNECTOR, release_of, require_supported
from spark_abs.store.storage import Storage, in_object_store

SESSION_CONF: Mapping[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Each stage has a pool of its own, so that a long batch of one does not starve the others; the names of
    # the pools say who comes first.
    "spark.scheduler.mode": "FAIR",
    PROVIDER_KEY: Provider.ROCKSDB.value,
    # A batch then writes what it changed, not all of RocksDB: a checkpoint copies as little.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Hive's jars bring another one, which renames no file onto a file that is there: state that is written
    # again would stay as it was.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    # Delta's log, pyarrow and Spark agree on microseconds; Spark's own default is INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Delta splits the state of a table's log into 50 tasks otherwise, of any table, however small.
    "spark.databricks.delta.snapshotPartitions": "2",
    # A query without input asks its source a hundred times a second otherwise: a file source lists its
    # directory each time.
    "spark.sql.streaming.pollingDelay": "50ms",
    # A bar that is drawn over the lines of the log: pyspark has it by default.
    "spark.ui.showConsoleProgress": "false",
}
"""Settings that a session needs, or that make it much faster."""

_PANDAS = "2."


def spark_session(
    app_name: str, master: str | None = None, *, packages: Sequence[str] = (), **conf: str
) -> SparkSession:
    """Build a session with Delta, or return the session that this process has.

    Args:
        app_name: the name shown by Spark.
        master: Spark's master; None leaves it to spark-submit or `spark-defaults.conf`.
        packages: Maven coordinates to fetch beside Delta's: `S3_CONNECTOR` for a root in an object store,
            `KAFKA_CONNECTOR` for jobs that read from Kafka.
        **conf: further settings, which override `SESSION_CONF`.

    Raises:
        UsageError: this is Spark Connect, or a version that spark_abs does not support.
        SparkNotStarted: Spark finds no Java that it can use.
    """
    builder = _prepared(SparkSession.builder.appName(app_name))
    if master is not None:
        builder = builder.master(master)
    known = KnownJars([PYSPARK, DELTA_CONNECTOR, *packages])
    jars = known.find() if may_name_jars(conf) else ()
    if jars:
        builder = builder.config("spark.jars", ",".join(jars))
    else:
        builder = _fetching(builder, packages)
    fresh = SparkContext._active_spark_context is None
    try:
        with quiet_log():
            session = builder.config(map=dict(conf)).getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        home = os.environ.get("JAVA_HOME")
        where = f"JAVA_HOME is {home}" if home else "JAVA_HOME is not set"
        raise SparkNotStarted(
            f"Spark could not be started: Java 17 is missing, or JAVA_HOME is wrong ({where}); what the JVM "
            "said, if there was one, stands above"
        ) from error
    if fresh and not jars and may_name_jars(conf):
        known.keep(session.sparkContext.getConf().get("spark.jars", "") or "")
    check_session(session)
    return session


def session_at(uris: Iterable[str], app_name: str, **conf: str) -> SparkSession:
    """Build a session on this machine that reaches the stores of places; errors as for `spark_session`."""
    packages = [S3_CONNECTOR] if any(map(in_object_store, uris)) else []
    return spark_session(app_name, "local[*]", packages=packages, **conf)


def configure(builder: SparkSession.Builder, *, packages: Sequence[str] = ()) -> SparkSession.Builder:
    """Add to a builder the settings of a session: `SESSION_CONF`, Delta's jars, this Python for workers.

    Settings made on the builder afterwards win. If executors have Python at another path, set PYSPARK_PYTHON
    before the call: it is not changed then.

    Raises:
        UsageError: as for `spark_session`.
    """
    return _fetching(_prepared(builder), packages)


def _fetching(builder: SparkSession.Builder, packages: Sequence[str]) -> SparkSession.Builder:
    return builder.config("spark.jars.packages", ",".join([DELTA_CONNECTOR, *packages]))


def _prepared(builder: SparkSession.Builder) -> SparkSession.Builder:
    if type(builder) is not SparkSession.Builder or _connect_requested():
        raise UsageError(_NO_CONNECT)
    _check_versions()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return builder.config(map=dict(SESSION_CONF))


def apply_storage_conf(session: SparkSession, storage: Storage) -> None:
    """Tell a session and its executors how a store is reached. Other sessions are not changed.

    Spark shows the names of these settings but not the secrets.
    """
    for name, value in storage.hadoop().items():
        session.conf.set(name, value)


_REFUSES_OLD = "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration"
_old_versions = threading.Lock()


@contextmanager
def old_versions(session: SparkSession) -> Iterator[None]:
    """While this lasts, Delta opens versions of a table older than its `delta.deletedFileRetentionDuration`.

    Delta refuses older versions, since VACUUM may delete their files at any time. The versions that we read
    are recorded; they can be read while their files exist, and a missing file is an error.
    """
    with _old_versions:
        before = session.conf.get(_REFUSES_OLD, None)
        session.conf.set(_REFUSES_OLD, "false")
        try:
            yield
        finally:
            if before is None:
                session.conf.unset(_REFUSES_OLD)
            else:
                session.conf.set(_REFUSES_OLD, before)


def read_version(session: SparkSession, uri: str, at: int) -> DataFrame:
    """Return a Delta table as of a version, however old; see `old_versions`."""
    with old_versions(session):
        return session.read.format("delta").option("versionAsOf", int(at)).load(uri)


def check_session(session: SparkSession) -> None:
    """Refuse a session that a job cannot run on.

    Raises:
        UsageError: it is a Spark Connect session, its version is not pyspark's, or it has no Delta.
    """
    if not isinstance(session, SparkSession):
        raise UsageError(_NO_CONNECT)
    _check_versions()
    if release_of(session.version) != PYSPARK:
        raise UsageError(
            f"the cluster runs Spark {session.version}, this Python has pyspark {PYSPARK}: "
            "install the same version on both"
        )
    lacking = [
        name
        for name in _OF_DELTA
        if SESSION_CONF[name] not in (session.conf.get(name, "") or "").replace(" ", "").split(",")
    ]
    if lacking:
        raise UsageError(_without_delta(lacking))


_OF_DELTA = ("spark.sql.extensions", "spark.sql.catalog.spark_catalog")
"""Settings that give a session Delta. They can be set only before the session starts."""


def _without_delta(lacking: Sequence[str]) -> str:
    wanted = [f"{name}={SESSION_CONF[name]}" for name in lacking]
    return "\n  ".join(
        [
            "the session was built without Delta, and Spark takes these settings only when it starts:",
            *wanted,
            f"spark.jars.packages={DELTA_CONNECTOR} (or that jar on the class path)",
            "In a script or notebook, stop it with spark.stop() and call spark_abs.spark_session(...). On a "
            "cluster, put them into its Spark configuration or spark-defaults.conf, or give them to "
            "spark-submit with --conf. Other spark.sql.extensions stay beside it, separated by commas.",
        ]
    )


_NO_CONNECT = (
    "spark_abs needs a classic session, Spark Connect is not supported: unset SPARK_REMOTE and spark.remote"
)


def _connect_requested() -> bool:
    named = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
    return (
        any(name in os.environ for name in named) or os.environ.get("SPARK_API_MODE", "").lower() == "connect"
    )


def _check_versions() -> None:
    require_supported()
    found = version("pandas")
    if not found.startswith(_PANDAS):
        raise UsageError(f"spark_abs needs pandas {_PANDAS}*, found {found}: install it with pip")
