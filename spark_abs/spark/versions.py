"""Supported versions of Spark and their differences. No other module checks a version.

A difference is detected by an import or by a class in the JVM, since platforms may have a feature earlier
than Spark. Only the coordinates of jars depend on the version number.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyspark
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql.pandas import types as arrow_types

from spark_abs.errors import Refused, UsageError
from spark_abs.protocol.state_compatibility import recounted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_HADOOP: Mapping[str, str] = {"4.0": "3.4.1", "4.1": "3.4.2", "4.2": "3.5.0"}
"""The Hadoop version of each supported Spark. Spark 4.3 is missing: Delta has no jar for it."""
SUPPORTED = tuple(_HADOOP)
_DELTA = "4.4.0"
"""The newest Delta with a jar for each supported Spark. 4.4.1 has none."""
_NUMBER = re.compile(r"\d+\.\d+\.\d+")


def release_of(version: str) -> str:
    """Return a version without the suffix of a platform or a development build: `4.1.0` of `4.1.0-amzn-1`."""
    found = _NUMBER.match(version)
    return found[0] if found else version


def _line_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


PYSPARK = release_of(pyspark.__version__)
"""The release of the pyspark that this process has."""

DELTA_CONNECTOR = f"io.delta:delta-spark_{_line_of(PYSPARK)}_2.13:{_DELTA}"
"""Delta's jar for the pyspark that is installed: `spark_session` and `configure` fetch it by themselves."""

_HERE = _HADOOP.get(_line_of(PYSPARK), _HADOOP[SUPPORTED[-1]])

S3_CONNECTOR = f"org.apache.hadoop:hadoop-aws:{_HERE}"
"""Hadoop's connector for S3, in the version of the Hadoop that pyspark brings along."""

AZURE_CONNECTOR = f"org.apache.hadoop:hadoop-azure:{_HERE}"
"""Hadoop's connector for Azure's storage, in that version."""

GOOGLE_CONNECTOR = "org.apache.hadoop:hadoop-gcp:3.5.0"
"""Hadoop's connector for Google's storage. 3.5.0, the Hadoop of Spark 4.2, is the first that has it."""

KAFKA_CONNECTOR = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{PYSPARK}"
"""Spark's Kafka connector: a session that reads from Kafka needs it among its `packages`."""


def require_supported(found: str = PYSPARK) -> None:
    """Refuse a release of Spark that spark_abs does not support.

    Raises:
        UsageError: the release is not supported; the message has the supported ones.
    """
    if _line_of(found) not in SUPPORTED:
        raise UsageError(
            f"spark_abs runs on Spark {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}, this Python has "
            f"pyspark {found}: install a supported release, pip install 'pyspark=={SUPPORTED[-1]}.*'"
        )


def tells_start() -> bool:
    """Say whether Spark passes the start position when it asks a data source for the end of a batch."""
    return find_spec("pyspark.sql.streaming.datasource") is not None


STATE_REWRITER_SINCE = "4.2"
"""The first release that can rewrite state."""

_STATE_REWRITER = "_streamingCheckpointManager"
"""The attribute of a pyspark session by which Spark can rewrite state."""


def rewrites_state() -> bool:
    """Say whether Spark can rewrite state."""
    from pyspark.sql import SparkSession

    return hasattr(SparkSession, _STATE_REWRITER)


def require_state_rewriter(what: str) -> None:
    """Refuse to rewrite state if this Spark cannot.

    Args:
        what: the requested action, as the subject of the error.

    Raises:
        Refused: this Spark cannot rewrite state; the message has the first release that can.
    """
    if not rewrites_state():
        raise Refused(
            f"{what} needs Spark {STATE_REWRITER_SINCE}, the first release that can rewrite state, but this "
            f"Python has pyspark {PYSPARK}. Nothing was changed. Repeat the command with pyspark "
            f"{STATE_REWRITER_SINCE}; the job can then run with this release again"
        )


_STREAMING, _PYTHON = "org.apache.spark.sql.execution.streaming", "org.apache.spark.sql.execution.python"
FILE_MANAGER, WRITE_RULE, MICRO_BATCHES = (
    (f"{_STREAMING}.{since_4_1}.{name}", f"{_STREAMING}.{name}")
    for since_4_1, name in (
        ("checkpointing", "FileSystemBasedCheckpointFileManager"),
        ("runtime", "ResolveWriteToStream"),
        ("runtime", "MicroBatchExecution"),
    )
)
TRANSFORM_IN_PYTHON = "TransformWithStateInPySpark"
_TRANSFORM_IN_4_0 = "TransformWithStateInPandas"
STATE_SERVER = tuple(
    f"{_PYTHON}.streaming.{node}StateServer" for node in (TRANSFORM_IN_PYTHON, _TRANSFORM_IN_4_0)
)
"""Private classes of Spark, each with all names in the supported releases."""


def node_name(node: Any) -> str:
    """Return the class of a plan node, by its name in the newest Spark."""
    name = str(node.getClass().getSimpleName())
    return TRANSFORM_IN_PYTHON if name == _TRANSFORM_IN_4_0 else name


_RAISED_IN_4_1 = "raise_error('USER_RAISED_EXCEPTION', map('errorMessage', "
_IN_SQL = re.compile(r"'(?:[^'\\]|\\.)*'|`[^`]*`|[()]", re.DOTALL)


def sql_of(expression: Any) -> str:
    """Return an expression in SQL as the newest Spark writes it; recorded jobs are compared by this text."""
    return canonical_sql(str(expression.sql()))


def canonical_sql(sql: str) -> str:
    """Return SQL of any supported Spark as the newest Spark writes it; see also `recounted`."""
    while (at := sql.find(_RAISED_IN_4_1)) >= 0:
        begin = at + len(_RAISED_IN_4_1)
        end = _end_of_call(sql, begin)
        sql = f"{sql[:at]}raise_error({sql[begin:end]}{sql[end + 1 :]}"
    return recounted(sql)


def _end_of_call(sql: str, begin: int) -> int:
    """Return the end of a call whose arguments continue at `begin`."""
    depth = 1
    for found in _IN_SQL.finditer(sql, begin):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    return len(sql)


def has_method(of: Any, name: str) -> bool:
    """Say whether an object in the JVM has a method of a name."""
    return any(str(method.getName()) == name for method in of.getClass().getMethods())


def class_in(jvm: Any, names: Iterable[str]) -> str:
    """Return the first of several names for which the JVM has a class.

    Raises:
        UsageError: the JVM has none of the classes.
    """
    for name in names:
        if class_there(jvm, name):
            return name
    raise UsageError(
        f"this Spark has no class {' or '.join(names)}: spark_abs runs on Spark {', '.join(SUPPORTED)}"
    )


def class_there(jvm: Any, name: str) -> bool:
    """Say whether the JVM has a class of a name."""
    try:
        jvm.py4j.reflection.ReflectionUtil.classForName(name)
    except Py4JError:
        return False
    return True


_SCHEMES = {S3_CONNECTOR: "s3a", AZURE_CONNECTOR: "abfss", GOOGLE_CONNECTOR: "gs"}


def has_package(session: Any, package: str) -> bool:
    """Say whether a session has a package, in any version: a platform brings its own.

    The connectors are known by what they are for, any other package by the names of the jars.
    """
    jvm = session._jvm
    if package == KAFKA_CONNECTOR:
        return class_there(jvm, "org.apache.spark.sql.kafka010.KafkaSourceProvider")
    if package in _SCHEMES:
        return _serves(session, _SCHEMES[package])
    artifact = package.split(":")[1]
    given = str(session.sparkContext._jsc.sc().listJars().mkString("\n"))
    paths = given.splitlines() + str(jvm.System.getProperty("java.class.path")).split(":")
    names = (path.rpartition("/")[2] for path in paths)
    return any(name.startswith(f"{artifact}-") or f"_{artifact}-" in name for name in names)


def _serves(session: Any, scheme: str) -> bool:
    """Say whether Hadoop has a file system for the URLs of a scheme."""
    hadoop = session._jsparkSession.sessionState().newHadoopConf()
    try:
        session._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, hadoop)
    except Py4JError:
        return False
    return True


_TAKES_ZONE = "timezone" in inspect.signature(arrow_types.to_arrow_schema).parameters


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Return a schema of Spark as an Arrow schema; the zone of timestamps is UTC."""
    zone: dict[str, Any] = {"timezone": "UTC"} if _TAKES_ZONE else {"timestamp_utc": True}
    return arrow_types.to_arrow_schema(schema, **zone)


def from_arrow_schema(schema: pa.Schema) -> StructType:
    """Return a schema of Arrow as a Spark schema; timestamps without a zone stay without."""
    return arrow_types.from_arrow_schema(schema, prefer_timestamp_ntz=True)
