"""How far a query is, as its checkpoint directory shows it."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.errors import AbsError
from spark_abs.model import NO_BATCH, BatchId
from spark_abs.snapshots.capture import newest_batch, newest_file
from spark_abs.snapshots.layout import OffsetFile, parse_offsets
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """The newest batches in Spark's logs of a query; None where nothing is stored."""

    finished: BatchId | None = None
    """`NO_BATCH` before the first."""
    planned: BatchId | None = None
    finished_ms: int | None = None
    """When the end of `finished` was recorded, by the clock of the store."""
    planned_ms: int | None = None
    """When `planned` was planned, by the clock of its driver."""
    watermark_ms: int | None = None
    """Of `planned`; None without a watermark."""


def stored_batches(native: Place) -> StoredBatches:
    """Read how far a query is; nothing is known if its checkpoint directory does not exist here.

    Raises:
        OSError: the store cannot be read now.
    """
    if not native.exists():
        return StoredBatches()
    end, planned = newest_file(native, "commits"), newest_batch(native, "offsets")
    plan = _plan(native, planned)
    return StoredBatches(
        NO_BATCH if end is None else BatchId(int(end.base_name)),
        planned,
        finished_ms=None if end is None or end.mtime_ns is None else int(end.mtime_ns) // 1_000_000,
        planned_ms=None if plan is None else plan.timestamp_ms or None,
        watermark_ms=None if plan is None else plan.watermark_ms or None,
    )


def _plan(native: Place, batch: BatchId) -> OffsetFile | None:
    """Return the plan of a batch; None if Spark has deleted it meanwhile, or it cannot be understood."""
    try:
        text = None if batch == NO_BATCH else native.read_text(f"offsets/{batch}")
        return None if text is None else parse_offsets(text)
    except AbsError:
        return None
