"""A stage with much state: the batch at a cut, what a checkpoint copies, what a restore costs."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from rich.console import Console

import spark_abs
from bench.figures import Figure, figure, ratios, wait
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import CheckpointId
from spark_abs.run.run import Run
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VALUE = 1024
_BUILD_ROWS, _TOUCHED = 100_000, 5_000
"""Rows in a file that builds the state, and in one that changes some of it."""
_SETTLE, _BEFORE, _AFTER = 3, 6, 4
"""Batches after a start that are not counted; ordinary batches before the cut; batches after it."""
_JOB, _STAGE = "big-state", "state"


@dataclass
class BigState:
    """A job of one stage that keeps the last value of `megabytes` thousand keys, 1 kB each."""

    spark: SparkSession
    base: Path
    megabytes: int
    calls: list[tuple[int, float]] = field(default_factory=list)
    """When each batch reached the sink."""
    _files: int = 0
    _samples: int = 0

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.megabytes * 1024

    def build(self) -> None:
        """Fill the state, and wait until Spark has written a snapshot of it."""
        (self.base / "input").mkdir(parents=True)
        for first in range(0, self.keys, _BUILD_ROWS):
            self._put(np.arange(first, min(self.keys, first + _BUILD_ROWS)))
        with self.running(self.base / "root") as run:
            run.query(_STAGE).processAllAvailable()
            native = self.base / "root" / "native" / "1" / _STAGE / "state" / "0"
            while not all(any((native / str(p)).glob("*.zip")) for p in range(2)):
                self.change(1)
                run.query(_STAGE).processAllAvailable()

    @contextmanager
    def running(self, root: Path, synchronous: bool = False) -> Iterator[Run]:
        """Run the job on a root, taking checkpoints only when asked to."""
        self.calls.clear()
        frame = self.spark.readStream.schema("key long, value binary").option("maxFilesPerTrigger", 1)
        job = spark_abs.Job(_JOB, root=str(root), spark=self.spark, interval="1d", synchronous=synchronous)
        last = job.stage(
            _STAGE,
            [frame.parquet(str(self.base / "input"))],
            lambda rows: rows.groupBy("key").agg(F.last("value").alias("value")),
            output_mode="update",
        )
        job.sink("out", last, foreach_batch=self._arrive)
        run = job.start()
        try:
            yield run
        finally:
            run.stop()

    def _arrive(self, frame: DataFrame, batch: int) -> None:
        self.calls.append((batch, time.monotonic()))
        frame.write.format("noop").mode("overwrite").save()

    def change(self, batches: int, keys: int = _TOUCHED) -> None:
        """Send batches that give new values to keys chosen at random."""
        for _ in range(batches):
            self._put(np.random.default_rng(self._files).choice(self.keys, min(keys, self.keys), False))

    def _put(self, keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        random = np.random.default_rng([self._files, self.megabytes])
        values = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(_VALUE), len(keys), [None, pa.py_buffer(random.bytes(len(keys) * _VALUE))]
        )
        hidden = self.base / "input" / f".{self._files}"
        pq.write_table(pa.table({"key": keys, "value": values.cast(pa.binary())}), hidden, compression="NONE")
        hidden.rename(self.base / "input" / f"{self._files:06d}.parquet")
        self._files += 1

    def cut(self, synchronous: bool) -> float:
        """Go on from a copy of the built root and return (batch at the cut ÷ ordinary batch).

        A batch lasts from its call of the sink to that of the next: what the next waits for is part of it.
        """
        self._samples += 1
        root = self.base / f"sample-{self._samples}"
        shutil.copytree(self.base / "root", root)
        with self.running(root, synchronous) as run:
            self.change(_SETTLE + _BEFORE + _AFTER)
            wait(lambda: len(self.calls) >= _SETTLE + _BEFORE)
            taken = self.manifest(root, run.checkpoint())
            run.query(_STAGE).processAllAvailable()
        shutil.rmtree(root, ignore_errors=True)  # Spark may still write a snapshot of the state
        lasted = {batch: after - at for (batch, at), (_, after) in pairwise(self.calls)}
        (stage,) = taken.stages
        ordinary = [s for batch, s in list(lasted.items())[_SETTLE:] if batch < stage.cut_batch]
        return lasted[stage.cut_batch] / statistics.median(ordinary)

    def manifest(self, root: Path, checkpoint: CheckpointId) -> Manifest:
        """Return the manifest of a completed checkpoint."""
        return Checkpoints.open(Root(str(root)), _JOB).load(checkpoint)


def figures(spark: SparkSession, base: Path, runs: int, large_mb: int, console: Console) -> Iterator[Figure]:
    """Compare the batch at the cut between small and large state, copied beside processing and within it."""
    sizes = {"10mb": BigState(spark, base / "small", 10), "1gb": BigState(spark, base / "large", large_mb)}
    for state in sizes.values():
        state.build()
    found: dict[tuple[str, bool], list[float]] = {}
    for turn in range(-1, runs):
        for synchronous in (False, True):
            for size, state in sizes.items():
                share = state.cut(synchronous)
                console.print(f"{size}{', synchronous' if synchronous else ''}: cut ÷ ordinary {share:.2f}")
                if turn >= 0:
                    found.setdefault((size, synchronous), []).append(share)
    for synchronous in (False, True):
        prefix = "sync_" if synchronous else ""
        large, small = found["1gb", synchronous], found["10mb", synchronous]
        yield figure(f"{prefix}cut_batch_1gb", large)
        yield figure(f"{prefix}cut_batch_10mb", small)
        yield figure(f"{prefix}cut_batch_1gb_vs_10mb", ratios(large, small))
    yield from _copies(sizes["1gb"], runs, console)


def _copies(state: BigState, runs: int, console: Console) -> Iterator[Figure]:
    """Measure what a checkpoint copies when 1 % of the keys have changed, and a restore of everything."""
    root, fractions = state.base / "root", []
    with state.running(root) as run:
        run.checkpoint()
        for _ in range(runs):
            state.change(1, state.keys // 100)
            run.query(_STAGE).processAllAvailable()
            taken = state.manifest(root, run.checkpoint())
            fractions.append(taken.size_new / taken.size_full)
            console.print(f"copied {taken.size_new:,} of {taken.size_full:,} bytes")
    yield figure("incremental_bytes_fraction", fractions)
    files = [file.path for stage in taken.stages for file in stage.files]
    restores, plain = [], []
    for turn in range(-1, runs):
        native = root / "native" / str(turn + 2) / _STAGE
        copied = _timed_copy(native, files, state.base / "copied")
        began = time.monotonic()
        spark_abs.open(str(root)).restore(to="latest")
        restored = time.monotonic() - began
        shutil.rmtree(native, ignore_errors=True)
        console.print(f"restore {restored:.2f} s, plain copy {copied:.2f} s")
        if turn >= 0:
            restores.append(restored)
            plain.append(copied)
    yield figure("restore_1gb_seconds", restores, "s")
    yield figure("restore_1gb_vs_copy", ratios(restores, plain))


def _timed_copy(source: Path, files: list[str], target: Path) -> float:
    began = time.monotonic()
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)
    took = time.monotonic() - began
    shutil.rmtree(target)
    return took
