"""A job in a notebook: its run, its newest checkpoints and its stages, as its root has them now."""

from __future__ import annotations

from itertools import islice

from spark_abs.errors import AbsError
from spark_abs.markup import paragraph, table
from spark_abs.model import NO_BATCH, BatchId
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows
from spark_abs.observe.status import StageStatus, job_status, lease_timeout_ms
from spark_abs.observe.tally import Tally
from spark_abs.report.redaction import redacted
from spark_abs.store.root import Root

SHOWN = 10
_CHECKPOINTS = ("checkpoint", "kind", "name", "attempt", "ms", "bytes", "new bytes", "")
_STAGES = ("stage", "finished batch", "begun", "newest checkpoint", "restarts", "")


def root_face(root: Root, now_ms: int, tally: Tally | None = None) -> str:
    """Return a root as HTML; a root that cannot be read is a sentence: a notebook shows it and goes on.

    With a tally as `job_status`.
    """
    try:
        status = job_status(root, now_ms, lease_timeout_ms(), tally)
        rows = checkpoint_rows(root, now_ms)
    except (AbsError, OSError) as error:
        return paragraph(redacted(f"{root.uri}: {error}"))
    run = status.run
    how = "never started" if run is None else f"run {run.id} {run.ended or 'was killed'}"
    if status.alive is not None:
        how = f"run {status.alive.run} is at work"
    newest = list(islice(reversed(rows), SHOWN))
    return "".join(
        (
            paragraph(f"Job {status.job}, attempt {status.attempt}: {redacted(how)}", strong=True),
            table(_STAGES, map(_stage, status.stages)) if status.stages else "",
            table(_CHECKPOINTS, map(_checkpoint, newest))
            if newest
            else paragraph("No checkpoint is complete."),
            paragraph(f"{len(rows)} checkpoints at {redacted(root.uri)}"),
        )
    )


def _checkpoint(row: CheckpointRow) -> tuple[object, ...]:
    mark = "damaged" if row.damage else "abandoned" if row.abandoned else "edited" if row.edited else ""
    return row.id, row.kind, row.name, row.attempt, row.duration_ms, row.size_full, row.size_new, mark


def _stage(stage: StageStatus) -> tuple[object, ...]:
    begun = None if stage.planned == stage.finished else _batch(stage.planned)
    why = stage.failing.cause if stage.failing is not None else stage.waiting
    return stage.stage, _batch(stage.finished), begun, stage.checkpoint, stage.restarts, redacted(why)


def _batch(batch: BatchId | None) -> int | None:
    return None if batch == NO_BATCH else batch
