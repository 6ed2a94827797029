"""The Spark of plain pipelines: that of the tests, or of the environment that PLAIN_SPARK names.

PLAIN_KAFKA_RELEASE is the release of the connector for Kafka, where a repository does not have that of Spark.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import cache

from spark_abs.spark.versions import DELTA_CONNECTOR, KAFKA_CONNECTOR
from tests.jvm import QUICK, java_options
from tests.versions.run import NEWEST, OWN, python_of, variables_of

NAME = os.environ.get("PLAIN_SPARK", OWN)
PYTHON = python_of(NAME)
VARIABLES: Mapping[str, str] = variables_of(NAME)
_DELTA_OF_3_5 = "io.delta:delta-spark_2.12:3.3.2"
"""The newest Delta for a Spark before 4."""


@cache
def _release() -> str:
    told = subprocess.run(
        [PYTHON, "-c", "import pyspark; print(pyspark.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


def delta_connector() -> str:
    """Return the coordinates of Delta's jar."""
    if NAME in (OWN, NEWEST):
        return DELTA_CONNECTOR
    return _DELTA_OF_3_5 if NAME == "3.5" else DELTA_CONNECTOR.replace(f"_{OWN}_", f"_{NAME}_")


def kafka_connector() -> str:
    """Return the coordinates of Spark's connector for Kafka."""
    if NAME == OWN:
        return KAFKA_CONNECTOR
    scala = "2.12" if NAME == "3.5" else "2.13"
    release = os.environ.get("PLAIN_KAFKA_RELEASE") or _release()
    return f"org.apache.spark:spark-sql-kafka-0-10_{scala}:{release}"


def plain_java_options() -> str:
    """Return the options of the JVM; the archive of classes is of the tests' own Spark."""
    return java_options() if NAME == OWN else QUICK
