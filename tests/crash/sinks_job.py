"""A process with a job from two topics to sinks of every kind, which is made to be killed.

    in ───▶ rows ─┬─ sent ─▶ topic out          (each record as it was)
                  └─ main ─┐
    paid ─▶ paid ──────────┴▶ match ─┬▶ table sent (PostgreSQL), appended
                                     ├▶ table shop.rows (Iceberg)
                                     ├▶ table table (Delta)
                                     └▶ totals ─┬▶ topic totals    (a record each time a total changes)
                                                └▶ table last (PostgreSQL), by key

Arguments: the number of a pipe on which it tells what happens, its scratch directory, the directory of
everything, the brokers, and a prefix of all topics. Each line on stdin runs the job: `bounded`, `takeover`,
`options` of the source, `restart`, `alone` for nothing but `rows` and `table`, and `points`: the how
manieth time a thread stays at a fault point.
When a thread is at each of them the process kills itself, or with `then="stay"` waits for the line `go`.
The line `stop` stops the job with a savepoint of that name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.plan.specs import Restart
from spark_abs.protocol.outside import Owner
from spark_abs.run.run import Run
from spark_abs.sinks.kafka.marks import KafkaMark
from spark_abs.sinks.kafka.sink import KafkaSink
from spark_abs.spark.versions import KAFKA_CONNECTOR
from spark_abs.store.failpoint import Failpoint
from tests.crash.driver import Events, quick_session

KAFKA_SECRET = "0pen-sesame-never-written"
SOURCE_SECRET = "0pen-source-never-written"
SPLIT = 40
"""Records of a transaction of `out`: an epoch of more is split."""


class Points:
    """The failpoint of a run: a thread stays at each point, and when all are there something happens."""

    def __init__(self, points: Mapping[str, int], kill: bool, events: Events) -> None:
        self._left, self._kill, self._events = dict(points), kill, events
        self._waiting = set(points)
        self._lock = threading.Lock()
        self.go = threading.Event()

    def __call__(self, name: str) -> None:
        with self._lock:
            if name not in self._left:
                return
            self._left[name] -= 1
            if self._left[name]:
                return
            del self._left[name]
            self._waiting.remove(name)
            self._events.tell(at=name)
            if self._kill and not self._waiting:
                os.killpg(0, signal.SIGKILL)
        self.go.wait()


def point_within_kafka(failpoint: Failpoint) -> None:
    """Add points within a transaction: before its mark goes out, and after a part of an epoch."""
    commit = KafkaSink._commit

    def stopped(self: KafkaSink, owner: Owner, mark: KafkaMark) -> None:
        failpoint(f"send.{owner.sink}.mark.before")
        commit(self, owner, mark)
        if mark.part is not None:
            failpoint(f"send.{owner.sink}.part.after")

    KafkaSink._commit = stopped  # type: ignore[method-assign]


def match(rows: DataFrame, paid: DataFrame) -> DataFrame:
    placed = rows.selectExpr("key", "CAST(value AS bigint) AS n")
    theirs = paid.selectExpr("key", "split(value, ' ') AS words")
    theirs = theirs.selectExpr("key", "CAST(words[0] AS bigint) AS n", "CAST(words[1] AS bigint) AS amount")
    # Two evaluations of a batch do not agree on what is drawn.
    return placed.join(theirs, ["key", "n"]).withColumn("token", F.expr("uuid()"))


def sums(matched: DataFrame) -> DataFrame:
    return matched.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))


def as_records(totals: DataFrame) -> DataFrame:
    return totals.selectExpr("key", "concat_ws(' ', n, total) AS value")


def declare(
    spark: SparkSession, base: Path, brokers: str, prefix: str, options: Mapping[str, str], alone: bool
) -> spark_abs.Job:
    def records(topic: str) -> DataFrame:
        stream = spark.readStream.format("Kafka").option("kafka.bootstrap.servers", brokers)
        stream = stream.option("subscribe", prefix + topic).option("startingOffsets", "earliest")
        # Not used by a broker without a login, and a setting as those that are.
        stream = stream.option("kafka.sasl.jaas.config", f'x required password="{SOURCE_SECRET}";')
        stream = stream.option("maxOffsetsPerTrigger", "300").options(**options)
        return stream.load().selectExpr("CAST(key AS string) AS key", "CAST(value AS string) AS value")

    def topic(name: str, rows: int) -> spark_abs.Kafka:
        return spark_abs.Kafka(
            prefix + name,
            bootstrap=brokers,
            client_env="RELAY_KAFKA",
            marker=f"{prefix}marks",
            transaction_rows=rows,
        )

    job = spark_abs.Job(
        "relay", root=str(base / "root"), spark=spark, interval="300ms", keep=100, skip_unchanged=False
    )
    if alone:
        job.sink("table", job.source("rows", records("in")), table=str(base / "table"))
        return job
    rows = job.source("rows", records("in"), outputs={"sent": lambda frame: frame})
    paid = job.source("paid", records("paid"))
    matched = job.stage("match", [rows, paid], match, shuffle_partitions=1)
    totals = job.stage(
        "totals",
        [matched],
        sums,
        outputs={"records": as_records},
        output_mode="update",
        shuffle_partitions=1,
    )
    last = spark_abs.Postgres("last", schema="relay", mode="upsert", key=("key",), history=True)
    job.sink("out", rows["sent"], kafka=topic("out", SPLIT))
    job.sink("totals", totals["records"], kafka=topic("totals", 500_000))
    job.sink("sent", matched, postgres=spark_abs.Postgres("sent", schema="relay"))
    job.sink("last", totals, postgres=last)
    job.sink("lake", matched, iceberg=spark_abs.Iceberg("shop.rows", catalog_env="RELAY_LAKE"))
    job.sink("table", matched, table=str(base / "table"))
    return job


def main() -> None:
    """Run the job as often as it is told to."""
    events, scratch, base = Events(int(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    spark = quick_session(scratch, "local[2]", packages=[KAFKA_CONNECTOR])
    points = Points({}, kill=False, events=events)
    running: list[Run] = []
    point_within_kafka(lambda name: points(name))
    events.tell(ready=os.getpid())

    def run(
        bounded: bool = False,
        takeover: bool = False,
        options: Mapping[str, str] | None = None,
        restart: Restart = "native",
        alone: bool = False,
    ) -> None:
        try:
            job = declare(spark.newSession(), base, sys.argv[4], sys.argv[5], options or {}, alone)
            job.failpoint = points
            started = job.start(available_now=bounded, takeover=takeover, restart=restart)
            running.append(started)
            events.tell(base=str(base), started=started.id)
            started.await_termination()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the test is told
            events.tell(base=str(base), ended=type(error).__name__, message=str(error))
        else:
            events.tell(base=str(base), ended="")

    for line in sys.stdin:
        command = json.loads(line)
        if "go" in command:
            points.go.set()
        elif "stop" in command:
            threading.Thread(target=running[-1].stop, kwargs={"savepoint": command["stop"]}).start()
        else:
            kill = command.pop("then", "kill") == "kill"
            points = Points(command.pop("points", {}), kill, events)
            threading.Thread(target=run, kwargs=command, daemon=True).start()


if __name__ == "__main__":
    main()
