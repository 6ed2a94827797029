"""A process with a job from Kafka to Kafka and Delta, which is made to be killed.

    in ─▶ rows ──┬── sent ─▶ topic out        (each record as it was)
                 └── main ─┬▶ table table
                           └▶ counts ─▶ topic totals   (a record each time a count changes)

Arguments: the number of a pipe on which it tells what happens, its scratch directory, the directory of
everything, the brokers, and a prefix of all topics. Each line on stdin runs the job: `bounded`, `takeover`,
`options` of the source, `restart`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.plan.specs import Restart
from spark_abs.session import KAFKA
from tests.crash.driver import Events, quick_session

SECRET = "0pen-sesame-never-written"


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").count().selectExpr("key", "CAST(count AS string) AS value")


def declare(
    spark: SparkSession, base: Path, brokers: str, prefix: str, options: Mapping[str, str]
) -> spark_abs.Job:
    stream = spark.readStream.format("Kafka").option("kafka.bootstrap.servers", brokers)
    stream = stream.option("subscribe", f"{prefix}in").option("startingOffsets", "earliest")
    # Not used by a broker without a login, and a setting as those that are.
    stream = stream.option("kafka.sasl.jaas.config", f'x required password="{SECRET}";')
    stream = stream.option("maxOffsetsPerTrigger", "300").options(**options)
    records = stream.load().selectExpr("CAST(key AS string) AS key", "CAST(value AS string) AS value")
    root = str(base / "root")
    job = spark_abs.Job("relay", root=root, spark=spark, interval="300ms", num_retained=100)
    rows = job.source("rows", records, outputs={"sent": lambda frame: frame})
    counted = job.stage("counts", [rows], counts, output_mode="update", shuffle_partitions=1)
    marker = f"{prefix}marks"
    out = spark_abs.Kafka(f"{prefix}out", bootstrap=brokers, marker=marker, transaction_rows=200)
    job.sink("out", rows["sent"], kafka=out)
    job.sink("totals", counted, kafka=spark_abs.Kafka(f"{prefix}totals", bootstrap=brokers, marker=marker))
    job.sink("table", rows, table=str(base / "table"))
    return job


def main() -> None:
    """Run the job as often as it is told to."""
    events, scratch, base = Events(int(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    spark = quick_session(scratch, "local[2]", packages=[KAFKA])
    events.tell(ready=os.getpid())

    def run(
        bounded: bool = False,
        takeover: bool = False,
        options: Mapping[str, str] | None = None,
        restart: Restart = "native",
    ) -> None:
        try:
            job = declare(spark.newSession(), base, sys.argv[4], sys.argv[5], options or {})
            started = job.start(available_now=bounded, takeover=takeover, restart=restart)
            events.tell(base=str(base), started=started.id)
            started.await_termination()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the test is told
            events.tell(base=str(base), ended=type(error).__name__, message=str(error))
        else:
            events.tell(base=str(base), ended="")

    for line in sys.stdin:
        threading.Thread(target=run, kwargs=json.loads(line), daemon=True).start()


if __name__ == "__main__":
    main()
