"""What the commits of a batch that fails have fixed, and the way out for somebody who wants other rows."""

from __future__ import annotations

import logging

from deltalake.exceptions import DeltaError

from spark_abs.errors import AbsError
from spark_abs.manifests.checkpoints import Checkpoints
from spark_abs.model import BatchId
from spark_abs.run_context import RunContext
from spark_abs.stages.outputs import Outputs

log = logging.getLogger(__name__)


def fixed_rows(ctx: RunContext, outputs: Outputs, batch: BatchId) -> str:
    """Say after an error which outputs hold the batch that has failed, and what follows; empty if none does.

    Without such an output the batch is evaluated anew, with the code of the next start.
    """
    try:
        held = outputs.holding(batch)
        back = bool(held) and bool(Checkpoints.open(ctx.root, ctx.job).summaries())
    except (AbsError, DeltaError, OSError) as error:
        log.warning("it could not be read which outputs hold batch %s: %s", batch, error)
        return ""
    return said_of(batch, held, back)


def said_of(batch: BatchId, held: tuple[str, ...], back: bool) -> str:
    """Say which outputs hold a batch; `back` says whether there is a checkpoint to go back to."""
    if not held:
        return ""
    way = (
        "start with restart='checkpoint', which goes back to before it"
        if back
        else "start over on a new root: no checkpoint was completed that one could go back to"
    )
    return (
        f"; the rows of batch {batch} are fixed: {', '.join(held)} {'has' if len(held) == 1 else 'have'} "
        f"committed them. Every start repeats the batch with these rows, also with other code in the stage; "
        f"if the rows are what is wrong, {way}"
    )
