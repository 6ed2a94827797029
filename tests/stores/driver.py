"""A driver process for jobs on an object store: a JSON object a line on stdin, one on the pipe for each end.

It knows the store through the environment alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import spark_abs
from spark_abs.spark.session import session_at
from spark_abs.store.storage import location_of
from tests.crash.small_job import SCHEMA, pair, totals
from tests.jvm import java_options


def declare(spark: SparkSession, given: dict[str, Any]) -> spark_abs.Job:
    """Declare the job of the crash tests with its input here, and root and tables below `out`."""
    out = given["out"]
    config = {"checkpoint": {"interval": given["interval"], "keep": "100", "skipUnchanged": False}}
    job = spark_abs.Job(
        "small", root=f"{out}/root", spark=spark, config=config, native_root=given.get("native_root")
    )
    files = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(given["input"])
    events = job.source("events", files, outputs={"orders": lambda batch: batch.where("kind = 'order'")})
    paired = job.stage("pair", [events, events["orders"]], pair, shuffle_partitions=1)
    summed = job.stage(
        "tail", [paired], totals, shuffle_partitions=1, output_mode="update", state_provider="hdfs"
    )
    job.sink("arrivals", events, table=f"{out}/arrivals")
    job.sink("pairs", paired, table=f"{out}/pairs")
    job.sink("totals", summed, table=f"{out}/totals")
    return job


def main() -> None:
    told = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    scratch = Path(sys.argv[3])
    spark = session_at(
        [location_of(sys.argv[1])],
        "stores",
        **{
            "spark.master": "local[2]",
            "spark.driver.memory": "2g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": java_options(),
            "spark.local.dir": str(scratch / "local"),
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.session.timeZone": "UTC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            **json.loads(sys.argv[4]),
        },
    )
    for line in sys.stdin:
        given = json.loads(line)
        try:
            run = declare(spark.newSession(), given).start(**given["start"])
            run.await_termination()
        except Exception as error:  # noqa: BLE001 - the process's edge: the test is told
            told.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        else:
            told.write(json.dumps({"error": ""}) + "\n")


if __name__ == "__main__":
    main()
