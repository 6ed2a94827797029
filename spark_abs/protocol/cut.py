"""Which marker a micro-batch of a stage passes on, from the positions at its two ends (P4, P8, P9, P10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_abs.model import NO_EPOCH, CheckpointId, Position, RunId
from spark_abs.protocol.loops import forward


@dataclass(frozen=True, slots=True)
class Cut:
    """The batch is the stage's cut of this barrier: state and outputs hold what is before it, no more."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The stage went past this id, and perhaps lower ones, without a cut: outputs get a cancel marker."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Nothing:
    """No marker belongs to the batch."""


@dataclass(frozen=True, slots=True)
class Free:
    """No channel input is open: the stage takes barriers like a source, at the end of any batch."""


Emission = Cut | Cancelled | Nothing | Free


def emission(before: Sequence[Position], after: Sequence[Position], run: RunId) -> Emission:
    """Say what the outputs get at the end of a batch.

    The id in question is the least epoch over the open inputs, and only a batch in which it rises says
    anything: a batch without new input is no cut, and an input that closes after a cut does not repeat it.
    The rise is a cut if every open input stands at that very barrier and none, open or closed, is past it.

    Ways back count for nothing (P17).

    The answer does not depend on outcomes. Who writes the marker puts a cancel marker in the place of a
    barrier that is known to be aborted (P9), and nothing in the place of an id that it has already written.

    Args:
        before: gate positions at the end of the batch before; for batch 0 the start positions.
        after: gate positions at the end of this batch. Both are multisets.
        run: the current run, for which inputs are open or closed.
    """
    before, after = forward(before), forward(after)
    still_open = [position for position in after if not position.is_closed(run)]
    if not still_open:
        return Free()
    reached = _least_epoch(after, run)
    if reached <= _least_epoch(before, run):
        return Nothing()
    aligned = all(position.at_barrier and position.epoch == reached for position in still_open)
    if aligned and all(position.epoch <= reached for position in after):
        return Cut(reached)
    return Cancelled(reached)


def _least_epoch(positions: Sequence[Position], run: RunId) -> CheckpointId:
    return min((p.epoch for p in positions if not p.is_closed(run)), default=NO_EPOCH)
