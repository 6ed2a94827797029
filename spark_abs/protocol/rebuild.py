"""The batches that a stage repeats after the loss of its native checkpoint, unnoticed by others (P18).

Its state comes from the newest checkpoint. From there to its last output it has to do exactly what it did:
each batch under its old number, reading what that batch read. Then every row it writes is there already, is
recognised by its transaction id and dropped, and after the last output it goes on by itself.
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
    """A batch that is run again as it was planned."""

    batch: BatchId
    plan: P


@dataclass(frozen=True, slots=True)
class LostStage:
    """The known facts of a stage without a native checkpoint."""

    cut: BatchId
    """The batch after which the checkpoint has its state, `NO_BATCH` to begin with nothing."""
    written: BatchId
    """The newest batch that any of its outputs holds."""
    has_native_inputs: bool = False
    """Whether it reads sources of its own, beside channels or instead of them."""
    calls_functions: bool = False
    """Whether one of its sinks is a function, which may have seen a batch that no output holds."""


def repeats(lost: LostStage, plans: Mapping[BatchId, P]) -> tuple[Repeat[P], ...]:
    """Return the batches after the cut that the stage repeats, in order; none if no output is past it.

    Args:
        lost: the stage.
        plans: what its outputs say of the batches that they hold.

    Raises:
        Refused: it cannot be exact, and why.
    """
    if lost.calls_functions:
        raise Refused(
            "one of its sinks is a function: what that has seen of a batch under way is not recorded"
        )
    if lost.cut == NO_BATCH and lost.has_native_inputs and lost.written != NO_BATCH:
        raise Refused(
            "no checkpoint records where its native sources started, so it could read other rows than before"
        )
    found = []
    for number in range(lost.cut + 1, lost.written + 1):
        batch = BatchId(number)
        if batch not in plans:
            raise Refused(f"its outputs do not say what batch {batch} has read")
        found.append(Repeat(batch, plans[batch]))
    return tuple(found)
