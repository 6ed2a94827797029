"""What is in a topic twice after kills: by our sink, and by Spark's own.

A process takes the same files to a topic and is killed with SIGKILL, again and again, while it sends; each
time it stays down for longer than the broker keeps what it knows of a transactional id. A last one comes to
the end. Started as a module it is that process: sink, broker, directory of the rows, its own directory.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import spark_abs
from bench.figures import Figure, figure
from bench.outside import bounded, records
from spark_abs.spark.session import spark_session
from spark_abs.spark.versions import KAFKA_CONNECTOR
from tests.outside.kafka_server import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILES, _ROWS, _SEED = 200, 5_000, 7
_EXPIRY_S = 2
_BROKER = {
    "transactional.id.expiration.ms": str(_EXPIRY_S * 1000),
    "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    "transaction.max.timeout.ms": str(900_000),
}
_TOPIC = {"ours": "ours", "spark": "spark"}


def figures(spark: SparkSession, base: Path, kills: int, console: Console) -> Iterator[Figure]:
    """Kill both so many times, and count."""
    base.mkdir()
    spark.range(0, _FILES * _ROWS, 1, _FILES).write.parquet(str(base / "rows"))
    spark.stop()  # the processes have the machine
    with KafkaServer(_BROKER) as broker:
        for sink, topic in _TOPIC.items():
            broker.make(topic)
            chance = random.Random(_SEED)
            for kill in range(kills):
                _killed(sink, broker, base, len(broker.read(topic, committed=False)), chance.random())
                console.print(f"repeats, {sink}: killed {kill + 1} times")
                time.sleep(2 * _EXPIRY_S)
            assert _process(sink, broker, base).wait() == 0, (base / f"{sink}.log").read_text()[-3000:]
            found = Counter(message.key() for message in broker.read(topic))
            twice, rows = found.total() - len(found), _FILES * _ROWS
            console.print(f"repeats, {sink}: {kills} kills, {rows - len(found)} lost, {twice} repeated")
            yield figure(f"kafka_lost_{sink}", [rows - len(found)], "records")
            yield figure(f"kafka_repeated_{sink}", [twice], "records")


def _killed(sink: str, broker: KafkaServer, base: Path, before: int, after_s: float) -> None:
    """Run until something new is in the topic, and for a moment longer."""
    process = _process(sink, broker, base)
    while len(broker.read(_TOPIC[sink], committed=False)) <= before:
        assert process.poll() is None, (base / f"{sink}.log").read_text()[-3000:]
        time.sleep(0.2)
    time.sleep(after_s)
    assert process.poll() is None, "it was through before it was killed: give it more rows"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _process(sink: str, broker: KafkaServer, base: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.repeats", sink, broker.bootstrap, str(base / "rows")]
    with (base / f"{sink}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, str(base / sink)], start_new_session=True, stdout=log, stderr=subprocess.STDOUT
        )


def main() -> None:
    """Take all rows to the topic."""
    sink, bootstrap, rows, place = sys.argv[1:]
    spark = spark_session("repeats", "local[2]", packages=[KAFKA_CONNECTOR])
    stream = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(rows)
    if sink == "spark":
        bounded(records(stream), Path(place), topic="spark", **{"kafka.bootstrap.servers": bootstrap})
        return
    job = spark_abs.Job("repeats", root=f"{place}/root", spark=spark, interval="1s")
    to = spark_abs.Kafka("ours", bootstrap=bootstrap)
    job.sink("out", job.source("rows", records(stream)), kafka=to)
    job.start(available_now=True).await_termination()


if __name__ == "__main__":
    main()
