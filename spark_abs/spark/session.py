"""Spark sessions that are ready for a job: Delta, RocksDB state, one scheduler pool per stage."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pandas
from pyspark import SparkContext
from pyspark.errors import AnalysisException, PySparkRuntimeError
from pyspark.sql import DataFrame, SparkSession

from spark_abs.errors import SparkNotStarted, UsageError
from spark_abs.logs import STRUCTURED
from spark_abs.model import PROVIDER_KEY, Provider
from spark_abs.spark.gateway import KnownJars, may_name_jars, quiet_log
from spark_abs.spark.versions import (
    AZURE_CONNECTOR,
    DELTA_CONNECTOR,
    GOOGLE_CONNECTOR,
    PYSPARK,
    S3_CONNECTOR,
    class_there,
    has_package,
    release_of,
    require_supported,
)
from spark_abs.store.storage import DATABRICKS, Storage

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

OF_DELTA = ("spark.sql.extensions", "spark.sql.catalog.spark_catalog")
"""Settings without which a session has no Delta. Spark reads them once, when a session begins."""
AT_START = frozenset(
    (*OF_DELTA, "spark.scheduler.mode", "spark.hadoop.fs.file.impl", "spark.ui.showConsoleProgress")
)
"""Settings of `SESSION_CONF` that cannot be set in an existing session. A job runs without the last three."""

_PANDAS = ("2.", "3.")

log = logging.getLogger(__name__)


def spark_session(
    app_name: str, master: str | None = None, *, packages: Sequence[str] = (), **conf: str
) -> SparkSession:
    """Build a session with Delta, or return the existing session of this thread or process.

    An existing session stays as it is, except that it gets `conf` and those settings of `SESSION_CONF` that
    can be set at run time and are not set. It keeps them, and the log names them. This package does not stop
    it.

    Args:
        app_name: the name shown by Spark.
        master: Spark's master; None leaves it to spark-submit or `spark-defaults.conf`.
        packages: Maven coordinates to fetch beside Delta's: `S3_CONNECTOR`, `AZURE_CONNECTOR` or
            `GOOGLE_CONNECTOR` for a root in an object store, `KAFKA_CONNECTOR` for jobs that read from Kafka.
        **conf: further settings, which override `SESSION_CONF`.

    Raises:
        UsageError: this is Spark Connect, spark_abs does not support this version of Spark, or the existing
            session has no Delta or lacks one of `packages`.
        SparkNotStarted: Spark finds no usable Java.
    """
    builder = _prepared(SparkSession.builder.appName(app_name))
    if SparkContext._active_spark_context is not None:
        return _set_up(_there(), packages, conf)
    if master is not None:
        builder = builder.master(master)
    known = KnownJars([PYSPARK, DELTA_CONNECTOR, *packages])
    jars = known.find() if may_name_jars(conf) else ()
    if jars:
        builder = builder.config("spark.jars", ",".join(jars))
    else:
        builder = _fetching(builder, packages)
    try:
        with quiet_log(structured=conf.get(STRUCTURED, "false") == "true"):
            session = builder.config(map=dict(conf)).getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        home = os.environ.get("JAVA_HOME")
        where = f"JAVA_HOME is {home}" if home else "JAVA_HOME is not set"
        raise SparkNotStarted(
            f"Spark could not be started: Java 17 is missing, or JAVA_HOME is wrong ({where}); messages of "
            "the JVM, if any, are above"
        ) from error
    if not jars and may_name_jars(conf):
        known.keep(session.sparkContext.getConf().get("spark.jars", "") or "")
    check_session(session)
    return session


def _there() -> SparkSession:
    """Return the active session of this thread, such as a notebook's, or the first session of this process.

    pyspark remembers the session that last made a frame of Python rows, which may not be the active session
    of the JVM.
    """
    first = SparkSession.builder.getOrCreate()
    active = first._get_j_spark_session_class(first._jvm).getActiveSession()
    if not active.isDefined():
        return first
    known = (session for session in (first, SparkSession.getActiveSession()) if session is not None)
    same = (session for session in known if session._jsparkSession == active.get())
    return next(same, None) or SparkSession(first.sparkContext, active.get())


def _set_up(session: SparkSession, packages: Sequence[str], conf: Mapping[str, str]) -> SparkSession:
    """Check that an existing session can run a job, and apply the settings that can still be set."""
    check_session(session)
    require_packages(session, packages)
    ours = {name: value for name, value in SESSION_CONF.items() if name not in AT_START}
    unset = {name: value for name, value in ours.items() if session.conf.get(name, None) is None}
    kept = []
    for name, value in {**unset, **conf}.items():
        try:
            session.conf.set(name, value)
        except AnalysisException:
            kept.append(name)
    if taken := sorted({*unset, *conf} - {*kept}):
        log.info("the existing session takes, until it ends: %s", taken)
    if changed := [name for name in kept if session.conf.get(name, None) != conf.get(name)]:
        log.warning(
            "the existing session keeps its %s: Spark reads these settings only at its start", changed
        )
    return session


def session_at(uris: Iterable[str], app_name: str, **conf: str) -> SparkSession:
    """Build a session on this machine that reaches the stores of places; errors as for `spark_session`."""
    return spark_session(app_name, "local[*]", packages=connectors(uris), **conf)


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
    refuse_connect("a session for jobs")
    if type(builder) is not SparkSession.Builder:
        raise UsageError(_NO_CONNECT.format("a session for jobs"))
    _check_versions()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return builder.config(map=dict(SESSION_CONF))


def apply_storage_conf(session: SparkSession, storage: Storage, locations: Iterable[str]) -> list[str]:
    """Give a session and its executors the settings to reach stores. Other sessions are not changed.

    The session keeps these settings until it ends: queries and frames that were made with it need them. Spark
    shows their names but not the secrets.

    Args:
        session: the session.
        storage: the given settings, all of which the session gets.
        locations: the places that the session must reach. For the kinds of their stores it is told to find
            credentials as usual, if neither `storage` nor the session has any.

    Returns:
        The names of the settings that have changed.
    """
    given = storage.hadoop()
    defaults = storage.hadoop_defaults(locations)
    if defaults and isinstance(session, SparkSession):  # Connect does not say what Hadoop has been told
        known = session._jsparkSession.sessionState().newHadoopConf()
        for kind in defaults:
            if not any(name in given or _is_set(known, name) for name in kind):
                given.update(kind)
    if _AZURE_KEY in given:
        hidden = str(session.conf.get(_HIDDEN))
        if _KEY_OF_AZURE not in hidden:
            given[_HIDDEN] = f"{hidden}|{_KEY_OF_AZURE}"
    changed = {name: value for name, value in given.items() if session.conf.get(name, None) != value}
    for name, value in changed.items():
        session.conf.set(name, value)
    return sorted(changed)


def _is_set(conf: Any, name: str) -> bool:
    """Say whether anybody has set a name, beside Hadoop itself: it has a default for some."""
    return list(conf.getPropertySources(name) or ()) not in ([], ["core-default.xml"])


_HIDDEN = "spark.sql.redaction.options.regex"
_AZURE_KEY = "fs.azure.account.key"
_KEY_OF_AZURE = re.escape(_AZURE_KEY)
"""Spark hides settings with "secret", "token" or "access.key" in their names; this name has none of these."""


def connectors(locations: Iterable[str]) -> list[str]:
    """Return the connectors that a session needs for locations."""
    by_scheme = {"s3a:": S3_CONNECTOR, "abfss:": AZURE_CONNECTOR, "gs:": GOOGLE_CONNECTOR}
    places = tuple(locations)
    return [c for scheme, c in by_scheme.items() if any(place.startswith(scheme) for place in places)]


_REFUSES_OLD = "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration"
_old_versions = threading.Lock()


@contextmanager
def old_versions(session: SparkSession) -> Iterator[None]:
    """In this block, Delta opens versions of a table older than `delta.deletedFileRetentionDuration`.

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
    """Return a Delta table as of a version, however old; see `old_versions`.

    A session of Connect reads the table when the frame is used, so there Delta may refuse old versions.
    """
    with old_versions(session) if isinstance(session, SparkSession) else nullcontext():
        return session.read.format("delta").option("versionAsOf", int(at)).load(uri)


def require_classic(session: object, what: str) -> None:
    """Refuse a session of Spark Connect, which has no JVM in this process.

    Args:
        session: any session.
        what: the feature that needs the JVM, as the subject of the error.

    Raises:
        UsageError: the message says which session to use; or the release of Spark is not supported.
    """
    require_supported()
    if session is None:
        raise UsageError(f"{what} needs a session: give spark=spark_abs.spark_session(...), or your own")
    if not isinstance(session, SparkSession):
        raise UsageError(_NO_CONNECT.format(what))


def refuse_connect(what: str) -> None:
    """Refuse a feature that needs the JVM if the environment asks for Spark Connect.

    Errors as `require_classic`.
    """
    if _connect_requested():
        raise UsageError(_NO_CONNECT.format(what))


def check_session(session: SparkSession, what: str = "a job") -> None:
    """Refuse a session on which a job cannot run.

    Args:
        session: the session.
        what: the feature that runs on the session, as the subject of the error.

    Raises:
        UsageError: it is a Spark Connect session, its version is not pyspark's, or it has no Delta.
    """
    require_classic(session, what)
    _check_versions()
    if release_of(session.version) != PYSPARK:
        raise UsageError(
            f"the cluster runs Spark {session.version}, this Python has pyspark {PYSPARK}: "
            "install the same version on both"
        )
    if DATABRICKS in os.environ:  # whose sessions have Delta without these settings
        return
    found = {name: session.conf.get(name, "") or "" for name in OF_DELTA}
    lacking = delta_settings(found)
    jar = class_there(session._jvm, SESSION_CONF[OF_DELTA[0]])
    if lacking or not jar:
        packages = () if jar else (DELTA_CONNECTOR,)
        raise UsageError(_at_start("the existing session has no Delta", lacking, packages))


def require_packages(session: SparkSession, packages: Sequence[str]) -> None:
    """Refuse a session that lacks packages: it takes none while it runs.

    Raises:
        UsageError: names them, and says where they are set.
    """
    missing = [package for package in packages if not has_package(session, package)]
    if missing:
        raise UsageError(_at_start(f"the existing session lacks {', '.join(missing)}", {}, missing))


def delta_settings(found: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of `OF_DELTA` that a session lacks, merged with its values.

    Empty if none are missing.
    """
    lacking = {}
    for name in OF_DELTA:
        there = [part.strip() for part in found[name].split(",") if part.strip()]
        if SESSION_CONF[name] not in there:
            kept = there if name == "spark.sql.extensions" else []
            lacking[name] = ",".join((*kept, SESSION_CONF[name]))
    return lacking


def _at_start(lacks: str, lacking: Mapping[str, str], packages: Sequence[str]) -> str:
    """Say where settings and packages are given that Spark takes only when it starts."""
    wanted = {**lacking, **({"spark.jars.packages": ",".join(packages)} if packages else {})}
    submit = [f"--packages {package}" for package in packages]
    submit += [f"--conf {name}={value}" for name, value in lacking.items()]
    return "\n  ".join(
        [
            f"{lacks}, and Spark loads it only at its start. On a cluster, add to the Spark configuration "
            "(spark-defaults.conf) and restart the cluster:",
            *(f"{name} {value}" for name, value in wanted.items()),
            "or start the program with:",
            f"spark-submit {' '.join(submit)} ...",
            "If the jar is on the class path already, leave the package out. In a program or notebook that "
            "builds its own session, use spark_abs.configure(SparkSession.builder), in a new process: a JVM "
            "loads jars only at its start",
        ]
    )


_NO_CONNECT = (
    "{} needs the driver's JVM, which a session of Spark Connect does not have. Use a classic session: "
    "unset SPARK_REMOTE, SPARK_API_MODE and spark.remote; on Databricks, use compute with dedicated access "
    "mode, not standard access mode and not serverless"
)


def _connect_requested() -> bool:
    named = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
    return (
        any(name in os.environ for name in named) or os.environ.get("SPARK_API_MODE", "").lower() == "connect"
    )


def _check_versions() -> None:
    require_supported()
    found = str(pandas.__version__)
    if not found.startswith(_PANDAS):
        raise UsageError(f"spark_abs needs pandas 2 or 3, found {found}: install it with pip")
