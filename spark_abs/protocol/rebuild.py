"""The batches that a stage repeats after the loss of its native checkpoint, without effects on others (P18).

The stage gets its state from the newest checkpoint. From there to its last output it repeats each batch with
the old number and the old input. The outputs already have these rows, recognise the transaction ids and drop
the repeats. After the last output the stage runs normally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from spark_abs.errors import Refused
from spark_abs.model import NO_BATCH, BatchId

P = TypeVar("P")
"""The planned input of a batch: the text of `offsets/<batch>`."""


@dataclass(frozen=True, slots=True)
class Repeat(Generic[P]):
    """A batch that is repeated with its old plan."""

    batch: BatchId
    plan: P


@dataclass(frozen=True, slots=True)
class LostStage:
    """The known facts of a stage without a native checkpoint."""

    cut: BatchId
    """The batch of the checkpoint's cut; `NO_BATCH` to begin without state."""
    written: BatchId
    """The newest batch that any output of the stage holds."""
    has_native_inputs: bool = False
    """Whether the stage reads native sources, with or without channels."""
    calls_functions: bool = False
    """Whether a sink of the stage is a function: it may have been called for a batch that no output holds."""


def repeats(lost: LostStage, plans: Mapping[BatchId, P]) -> tuple[Repeat[P], ...]:
    """Return the batches after the cut that the stage repeats, in order; empty if no output is past the cut.

    Args:
        lost: the stage.
        plans: the plans of batches that the stage's outputs record.

    Raises:
        Refused: the repeat would not be exact; the message says why.
    """
    if lost.calls_functions:
        raise Refused(
            "a sink of the stage is a function, and no record says whether it was called for the unfinished "
            "batch"
        )
    if lost.cut == NO_BATCH and lost.has_native_inputs and lost.written != NO_BATCH:
        raise Refused(
            "no checkpoint records where its native sources started, so it could read other rows than before"
        )
    repeated = []
    for number in range(lost.cut + 1, lost.written + 1):
        batch = BatchId(number)
        if batch not in plans:
            raise Refused(f"its outputs do not record the input of batch {batch}")
        repeated.append(Repeat(batch, plans[batch]))
    return tuple(repeated)
