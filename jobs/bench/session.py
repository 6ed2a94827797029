"""The session of all benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import spark_abs
from spark_abs.session import KAFKA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JDBC = "org.postgresql:postgresql:42.7.8"
_CONF = {
    "spark.driver.memory": "4g",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Snapshots of state are written soon after they are due, not up to a minute later.
    "spark.sql.streaming.stateStore.maintenanceInterval": "5s",
}


def session() -> SparkSession:
    """Return it; the first call builds it."""
    return spark_abs.spark_session("bench", "local[2]", packages=[KAFKA, _JDBC], **_CONF)
