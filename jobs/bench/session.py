"""The session of all benchmarks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import spark_abs
from spark_abs.spark.versions import KAFKA_CONNECTOR

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
_CLUSTER = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "900m",
    "spark.executor.cores": "1",
    "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
}


def session(master: str = "local[2]") -> SparkSession:
    """Return it; the first call builds it.

    On a cluster of this machine there is one executor of one core on each worker.
    """
    conf = _CONF if master.startswith("local") else {**_CONF, **_CLUSTER}
    return spark_abs.spark_session("bench", master, packages=[KAFKA_CONNECTOR, _JDBC], **conf)
