"""Take the snapshot of a stage: capture the cut, copy it, return the stored files."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.manifest import OperatorState, StoredFile
from spark_abs.model import BatchId, CheckpointId, Position, positions_of
from spark_abs.snapshots.capture import ATTEMPTS, Captured, CaptureIncomplete, capture
from spark_abs.snapshots.state_storage import StaleCapture, StateStorage
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class StageCopy:
    """The part of a `StageSnapshot` that comes from the native checkpoint."""

    cut_batch: BatchId
    offsets: str
    """The text of `offsets/<cut_batch>`; empty for a stage that has run no batch."""
    watermark_ms: int | None
    """The watermark of the cut's batch: all windows that it closes have been emitted.

    None without a watermark.
    """
    positions: tuple[Position, ...]
    operators: tuple[OperatorState, ...]
    shuffle_partitions: int
    provider: str
    files: tuple[StoredFile, ...]
    size_new: int


def snapshot_stage(
    state_storage: StateStorage,
    checkpoint: CheckpointId,
    native: Place,
    batch: BatchId,
    *,
    later_logs: bool = False,
) -> StageCopy:
    """Copy all files that a stage needs to start again after `batch` (P11).

    Safe while the query runs, in any thread, and for several stages at a time. The copy is pinned in `state/`
    until `state_storage.unpin(checkpoint)`, also after an error.

    Args:
        state_storage: the run's handle on `state/`.
        checkpoint: the checkpoint that this belongs to.
        native: the stage's native checkpoint directory.
        batch: the cut, a batch whose `commits/<batch>` exists; `NO_BATCH` for a stage without batches.
        later_logs: as of `capture`.

    Raises:
        CaptureIncomplete: files of the cut are missing (purged, not yet uploaded): decline.
        Refused: a format, provider or codec that is not known: decline.
        DamageError: a file does not have Spark's format: decline.
        Fenced: a newer run owns the root: stop.
        CommitStateUnknown: it is unknown whether the copy was committed: decline.
    """
    stale: StaleCapture | None = None
    for _ in range(ATTEMPTS):
        copied = state_storage.copied(native.path)
        captured = capture(native.fs, native.path, batch, copied, later_logs=later_logs)
        try:
            stored = state_storage.store(checkpoint, native.fs, native.path, captured.files)
        except StaleCapture as error:
            stale = error
            continue
        return _copy_of(captured, stored.files, stored.size_new)
    raise CaptureIncomplete(f"cut of batch {batch} in {native}: {stale}") from stale


def _copy_of(captured: Captured, files: tuple[StoredFile, ...], size_new: int) -> StageCopy:
    offsets = captured.offsets
    return StageCopy(
        cut_batch=captured.batch,
        offsets=captured.offsets_text,
        watermark_ms=(offsets.watermark_ms or None) if offsets else None,
        positions=positions_of(offsets.lines) if offsets else (),
        operators=captured.operators,
        shuffle_partitions=captured.shuffle_partitions,
        provider=captured.provider,
        files=files,
        size_new=size_new,
    )
