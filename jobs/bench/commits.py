"""The manifest's commit, at the start of a history and after ten thousand epochs. No Spark."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from bench.figures import Figure, figure
from spark_abs.checkpointing.cleaner import TRIM_EVERY
from spark_abs.manifest import Location, Manifest, StageSnapshot, StoredFile
from spark_abs.manifests.manifest_table import PATH, Checkpoints
from spark_abs.model import AttemptId, BatchId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.snapshots.tidy import KEPT_COMMITS
from spark_abs.store.root import Root
from spark_abs.store.table import Table

EPOCHS = 10_000
_RETAINED, _SAMPLES = 3, 100
_STAGES, _FILES = 4, 50
_JOB, _RUN = "bench", RunId(1)


def _manifest(number: int) -> Manifest:
    """Return a manifest as large as that of a job with a few stateful stages."""
    pack = f"pack-1-{number:032x}.parquet"
    files = tuple(
        StoredFile(f"state/0/{n % 2}/{number + n}.changelog", 10_000, f"{n:064x}", Location(pack, n, 1))
        for n in range(_FILES)
    )
    stages = tuple(
        StageSnapshot(StageId(f"stage-{n}"), BatchId(number), offsets="v1\n{}\n{}", files=files)
        for n in range(_STAGES)
    )
    return Manifest(
        CheckpointId(number), AttemptId(1), _RUN, _JOB, CheckpointKind.CHECKPOINT, None, 0, 0, 0, (), stages
    )


def figures(base: Path, console: Console, epochs: int = EPOCHS) -> Iterator[Figure]:
    """Complete checkpoints one after the other, retiring old ones as a job does; time the completions."""
    root = Root(str(base / "commits"))
    kept = Checkpoints.open(root, _JOB)
    kept.fence(_RUN)
    samples = []
    for number in range(1, epochs + _SAMPLES + 1):
        manifest = _manifest(number)
        began = time.perf_counter()
        kept.complete(manifest)
        samples.append((time.perf_counter() - began) * 1000)
        if number > _RETAINED:
            Checkpoints.open(root, _JOB).retire([CheckpointId(number - _RETAINED)], _RUN)
        if number % TRIM_EVERY == 0:
            Table.open(root.place(PATH)).trim_log(KEPT_COMMITS)
        if number % 1000 == 0:
            console.print(f"epoch {number}: {statistics.median(samples[-_SAMPLES:]):.1f} ms")
    shutil.rmtree(root.uri)
    first, last = samples[:_SAMPLES], samples[-_SAMPLES:]
    yield figure("commit_ms_start", first, "ms")
    yield figure("commit_ms_after_10k_epochs", last, "ms")
