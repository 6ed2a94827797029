"""A channel written without Spark: pyarrow makes the files, the real writer commits them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types as t

from spark_abs.channels.files import Written, read_written
from spark_abs.channels.writer import ChannelWriter, create_channel
from spark_abs.model import (
    AttemptId,
    Barrier,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    Position,
    RunId,
    StageId,
    Version,
)
from spark_abs.store.root import Root

JOB = "job"
NUMBERS = t.StructType([t.StructField("n", t.LongType())])


def barrier(number: int, name: str | None = None) -> Barrier:
    return Barrier(CheckpointId(number), CheckpointKind.CHECKPOINT, 1_000 + number, name)


def position(
    channel: str, version: int, epoch: int = 0, at_barrier: bool = False, closed: int = 0
) -> Position:
    return Position(
        ChannelId(channel), AttemptId(1), Version(version), CheckpointId(epoch), at_barrier, RunId(closed)
    )


def make_writer(
    root: Root,
    stage: str = "a",
    output: str = "main",
    attempt: int = 1,
    run: int = 1,
    schema: t.StructType = NUMBERS,
) -> ChannelWriter:
    create_channel(root, ChannelId(f"{stage}.{output}"), schema)
    return ChannelWriter(
        root, JOB, stage=StageId(stage), output=output, attempt=AttemptId(attempt), run=RunId(run)
    )


def write_table(root: Root, channel: str, table: pa.Table, directory: str | None = None) -> Written:
    """Write the rows as one Parquet file below the channel, as a batch would, and commit nothing."""
    relative = f"data/{directory or f'1-1-0-{uuid.uuid4().hex[:12]}'}"
    place = root.path(f"{root.channel(ChannelId(channel))}/{relative}")
    root.fs.create_dir(place, recursive=True)
    pq.write_table(table, f"{place}/part-0.parquet", filesystem=root.fs)
    return read_written(root.fs, root.path(root.channel(ChannelId(channel))), relative)


def numbers(root: Root, channel: str, values: Sequence[int]) -> Written:
    return write_table(root, channel, pa.table({"n": pa.array(values, pa.int64())}))


class Log:
    """Writes the batches of one channel, one line of a test each."""

    def __init__(self, root: Root, stage: str = "a", attempt: int = 1, run: int = 1) -> None:
        self.root, self.channel = root, f"{stage}.main"
        self.writer = make_writer(root, stage, attempt=attempt, run=run)
        self.next_batch = int(self.writer.newest().batch) + 1

    def rows(self, table: pa.Table) -> int:
        """Commit rows of any columns as the next batch and return its version."""
        written = write_table(self.root, self.channel, table)
        self.next_batch += 1
        return int(self.writer.commit_batch(written, BatchId(self.next_batch - 1)).entry.version)

    def batch(self, *values: int, barrier_id: int | None = None, cancel: int | None = None) -> int:
        """Commit the next batch and return its version."""
        written = numbers(self.root, self.channel, values) if values else Written()
        standing = self.writer.commit_batch(
            written,
            BatchId(self.next_batch),
            barrier=None if barrier_id is None else barrier(barrier_id),
            cancel=None if cancel is None else CheckpointId(cancel),
        )
        self.next_batch += 1
        assert standing.fresh
        return int(standing.entry.version)
