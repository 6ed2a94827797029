"""The gate: how fast it reads, and how fast it decides before a long backlog."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType
from rich.console import Console

from bench.figures import Figure, figure, ratios
from spark_abs.channels.files import Written, directory_name
from spark_abs.channels.gate import GateReader, GateSpec, open_gate
from spark_abs.channels.writer import ChannelWriter, create_channel
from spark_abs.model import AttemptId, BatchId, Branch, CheckpointId, DataFile, RunId, StageId, channel_id
from spark_abs.protocol.changes import first_position
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ENTRIES, _ROWS = 20, 1_000_000
BACKLOG, _ENTRIES_PER_BATCH = 10_000, 100
_OFFSETS = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}\n{"logOffset":0}'
_CHANNEL = channel_id(StageId("producer"), "main")


def _writer(root: Root, schema: StructType) -> ChannelWriter:
    Control.create(root, "bench", 0)
    create_channel(root, _CHANNEL, schema)
    return ChannelWriter(
        root, "bench", stage=StageId("producer"), output="main", attempt=AttemptId(1), run=RunId(1)
    )


def _spec(root: Root, schema: StructType, native: str, max_entries: int) -> GateSpec:
    return GateSpec(
        root=root.uri,
        start=first_position(_CHANNEL),
        schema=schema.json(),
        native=native,
        path=(Branch(AttemptId(1), None),),
        run=RunId(1),
        attempt=AttemptId(1),
        floor=CheckpointId(0),
        control_version=Control.open(root).version,
        max_entries=max_entries,
        max_bytes=2**60,
        partition_bytes=64 * 2**20,
        poll_ms=50,
        native_poll_ms=50,
    )


def reading(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Read the same files through the gate and through Delta's own source; time from start to all read."""
    rows = spark.range(_ROWS).select(
        F.col("id"), F.rand(7).alias("value"), F.sha1(F.col("id").cast("string")).alias("name")
    )
    root = Root(str(base / "reading"))
    writer = _writer(root, rows.schema)
    for number in range(_ENTRIES):
        writer.commit_batch(writer.write_files(rows, BatchId(number)), BatchId(number))
    found: dict[str, list[float]] = {"gate": [], "native": []}
    for turn in range(-1, runs):
        for name in found:
            checkpoint = base / "query"
            frame = (
                open_gate(spark, _spec(root, rows.schema, str(checkpoint), _ENTRIES))
                if name == "gate"
                else spark.readStream.format("delta").load(root.at(root.channel(_CHANNEL)))
            )
            rate = _ENTRIES * _ROWS / _seconds(frame, checkpoint)
            console.print(f"{name}: {rate:,.0f} rows/s")
            if turn >= 0:
                found[name].append(rate)
    shutil.rmtree(root.uri)
    yield figure("gate_rows", found["gate"], "rows/s")
    yield figure("gate_rows_vs_native", ratios(found["gate"], found["native"]))


def _seconds(frame: DataFrame, checkpoint: Path) -> float:
    began = time.monotonic()
    query = frame.writeStream.foreachBatch(_run).option("checkpointLocation", str(checkpoint)).start()
    query.processAllAvailable()
    took = time.monotonic() - began
    query.stop()
    shutil.rmtree(checkpoint)
    return took


def _run(frame: DataFrame, _: int) -> None:
    frame.write.format("noop").mode("overwrite").save()


def deciding(base: Path, runs: int, console: Console, backlog: int = BACKLOG) -> Iterator[Figure]:
    """Let a gate decide its way through a backlog of ten thousand entries; no Spark. Medians of each run."""
    root = Root(str(base / "deciding"))
    schema = StructType([StructField("n", LongType())])
    writer = _writer(root, schema)
    for number in range(backlog):
        path, size = f"data/{directory_name(AttemptId(1), RunId(1), BatchId(number))}/0.parquet", 1000
        written = Written((AddFile(path, size, '{"numRecords": 10}'),), (DataFile(path, size, 10),))
        writer.commit_batch(written, BatchId(number), offsets=_OFFSETS)
    found = []
    for _ in range(runs):
        gate = GateReader(_spec(root, schema, root.at("native/1/reader"), _ENTRIES_PER_BATCH), schema)
        at, samples = gate.initialOffset(), []
        while True:
            began = time.perf_counter()
            reached = gate.latestOffset(at, gate.getDefaultReadLimit())
            samples.append((time.perf_counter() - began) * 1000)
            if reached == at:
                break
            gate.commit(at := reached)
        found.append(statistics.median(samples))
        console.print(f"decision: {found[-1]:.2f} ms, {len(samples)} of them, slowest {max(samples):.2f} ms")
    shutil.rmtree(root.uri)
    yield figure("gate_decision_ms_10k_entries", found, "ms")
