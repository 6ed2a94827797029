"""Take the snapshot of a stage: capture the cut, copy it, hand back the handles."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.manifest import OperatorState, StoredFile
from spark_abs.model import BatchId, CheckpointId, Position, positions_of
from spark_abs.snapshots.capture import ATTEMPTS, Captured, CaptureIncomplete, capture
from spark_abs.snapshots.state_storage import StaleCapture, StateStorage
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class StageCopy:
    """The part of a `StageSnapshot` that comes out of the native checkpoint."""

    cut_batch: BatchId
    offsets: str
    """The text of `offsets/<cut_batch>`; empty for a stage that has run no batch."""
    watermark_ms: int | None
    """The watermark under which the cut's batch ran: what it closes has been emitted. None for none."""
    positions: tuple[Position, ...]
    operators: tuple[OperatorState, ...]
    shuffle_partitions: int
    provider: str
    files: tuple[StoredFile, ...]
    size_new: int


def snapshot_stage(kept: StateStorage, checkpoint: CheckpointId, native: Place, batch: BatchId) -> StageCopy:
    """Copy everything from which a stage starts again after `batch` (P11).

    Runs beside the query, in any thread, several at a time for different stages.
    The copy is pinned in `state/` until `kept.unpin(checkpoint)`, also when this raises.

    Args:
        kept: the run's handle on `state/`.
        checkpoint: the checkpoint that this belongs to.
        native: the stage's native checkpoint directory.
        batch: the cut, a batch whose `commits/<batch>` exists; `NO_BATCH` for a stage that ran none.

    Raises:
        CaptureIncomplete: files of the cut are not there (purged, not yet uploaded): decline.
        Refused: a format, provider or codec that is not known: decline.
        DamageError: a file is not what Spark writes: decline.
        Fenced: a newer run owns the root: stop.
        CommitStateUnknown: the store did not say whether the copy is in: decline.
    """
    stale: StaleCapture | None = None
    for _ in range(ATTEMPTS):
        captured = capture(native.fs, native.path, batch, kept.copied(native.path))
        try:
            stored = kept.store(checkpoint, native.fs, native.path, captured.files)
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
