"""Giving every claimed id an outcome."""

from __future__ import annotations

from spark_abs.errors import AbortReason
from spark_abs.manifests.checkpoints import Checkpoints
from spark_abs.model import CheckpointId, RunId
from spark_abs.protocol.control import Aborted, ControlState, settle
from spark_abs.store.control import Control


def abort_open(control: Control, checkpoints: Checkpoints, run: RunId) -> ControlState:
    """Abort every id that an older run claimed and left without an outcome; repeatable.

    An id whose manifest was committed before the run died is complete: only `control/` did not say so.
    `run` must have fenced `checkpoints/`, so that nobody decides them otherwise meanwhile.
    """
    state = control.state
    for number in range(checkpoints.decided() + 1, state.last_claimed + 1):
        checkpoints.abort(CheckpointId(number), run)
    complete = {s.id for s in checkpoints.summaries()}
    open_ids = tuple(c.barrier.id for c in state.claims)
    aborted = tuple(
        Aborted(i, AbortReason.RUN_ENDED, f"closed by run {run}") for i in open_ids if i not in complete
    )
    completed = tuple(i for i in open_ids if i in complete)
    return control.update(lambda s: settle(s, aborted, completed))
