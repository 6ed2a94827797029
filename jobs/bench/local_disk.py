"""A stateful micro-batch on a local disk: under the settings of a job's query, beside Spark's own defaults.

The same plain query from files into nothing, a small file a batch. What is timed is the whole batch, in
Spark's own words `triggerExecution`: planning, reading, state, and the logs.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import functions as F
from rich.console import Console

from bench.figures import Figure, figure, ratios
from bench.state_functions import write
from spark_abs.spark.local_disk import local_disk_conf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WARM_UP, _BATCHES = 3, 12
_KEYS = 100
_DEFAULTS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "false",
}
"""What Spark has where nobody has said anything, of what a session of ours says otherwise."""


def batch_ms(spark: SparkSession, base: Path, name: str, conf: Mapping[str, str]) -> float:
    """Return the median of a query's batches, under more settings and in a checkpoint of its own."""
    session = spark.newSession()
    for key, value in conf.items():
        session.conf.set(key, value)
    rows = session.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1)
    totals = rows.parquet(str(base / "input")).groupBy("k").agg(F.sum("v"))
    writer = totals.writeStream.outputMode("update").format("noop").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(base / name)).start()
    query.awaitTermination()
    took = [float(p["durationMs"]["triggerExecution"]) for p in query.recentProgress if p["numInputRows"]]
    return statistics.median(took[_WARM_UP:])


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Measure both in turns, the first turn to warm up."""
    for number in range(_WARM_UP + _BATCHES):
        write(base / "local" / "input", number, np.arange(2 * _KEYS) % _KEYS)
    jvm: Any = spark._jvm
    files = jvm.org.apache.hadoop.fs.FileSystem.getLocal(spark._jsparkSession.sessionState().newHadoopConf())
    raw = files.getRaw()
    behind = files.getClass().getSuperclass().getSuperclass().getDeclaredField("fs")
    behind.setAccessible(True)
    ours, theirs = list[float](), list[float]()
    for turn in range(1 + runs):
        files.setWriteChecksum(True)  # as Hadoop has it
        behind.set(files, raw)
        theirs.append(batch_ms(spark, base / "local", f"theirs-{turn}", _DEFAULTS))
        ours.append(batch_ms(spark, base / "local", f"ours-{turn}", local_disk_conf(spark)))
        console.print(f"a stateful batch: {ours[-1]:.0f} ms, {theirs[-1]:.0f} ms with Spark's defaults")
    yield figure("batch_vs_default_session", ratios(ours[1:], theirs[1:]))
    # Spark may still be at work on snapshots of state.
    shutil.rmtree(base / "local", ignore_errors=True)
