"""Which marker a micro-batch of a stage passes on, from the positions at its ends (P4, P7 to P10, P16)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_abs.alignment.loops import forward
from spark_abs.model import NO_EPOCH, Barrier, CheckpointId, CheckpointMode, Position, RunId


@dataclass(frozen=True, slots=True)
class Cut:
    """The batch is the stage's cut of this barrier.

    State and outputs hold what is before it; if it is aligned all of that, and if it is not at-least-once
    nothing else.
    """

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The stage went past this id, and perhaps lower ones, without a cut: outputs get a cancel marker."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Nothing:
    """No marker belongs to the batch; an unaligned barrier may still be taken with it, see `overtaking`."""


@dataclass(frozen=True, slots=True)
class Free:
    """No channel input is open: the stage takes barriers like a source, at the end of any batch."""


Emission = Cut | Cancelled | Nothing | Free


def emission(before: Sequence[Position], after: Sequence[Position], run: RunId) -> Emission:
    """Return the marker that the outputs get at the end of a batch.

    Two rises say something; a batch without new input is no cut, and an input that closes after a cut does
    not repeat it.

    - The first sight of an unaligned barrier is its cut, at the latest: nothing after it has been read yet
      on any input, and from the next batch on something may be (P16).
    - The least epoch over the open inputs rises. That is a cut if every open input stands at that very
      barrier and none, open or closed, has gone on from it (P4); of an at-least-once barrier it is one
      wherever the others stand (P7). That an unaligned one has come on the last input says nothing new.

    Feedback edges do not count. An unaligned barrier, though, may come round before it has come any other
    way: stages on the way take it without waiting for the head (P17).

    The answer depends neither on outcomes nor on what was taken before. Who writes the marker puts a cancel
    marker in the place of a barrier that is known to be aborted (P9), and nothing in the place of an id that
    it has already written.

    Args:
        before: gate positions at the end of the batch before; for batch 0 the start positions.
        after: gate positions at the end of this batch. Both are multisets.
        run: the current run, for which inputs are open or closed.
    """
    seen = _newest_unaligned(after)
    first_sight = seen > _newest_unaligned(before) and may_take(seen, after)
    before, after = forward(before), forward(after)
    still_open = [position for position in after if not position.is_closed(run)]
    if not still_open:
        return Free()
    if first_sight:
        return Cut(seen)
    reached = _least_epoch(after, run)
    if reached <= _least_epoch(before, run):
        return Nothing()
    aligned = all(position.at_barrier and position.epoch == reached for position in still_open)
    if aligned and may_take(reached, after):
        return Cut(reached)
    modes = {position.mode for position in after if position.epoch == reached}
    if CheckpointMode.AT_LEAST_ONCE in modes:
        return Cut(reached)
    return Nothing() if CheckpointMode.UNALIGNED in modes else Cancelled(reached)


def may_take(checkpoint: CheckpointId, positions: Sequence[Position]) -> bool:
    """Say whether nothing after a barrier has been read on any input: a cut here is exact.

    Entries between a position and the barrier are then in flight: part of the checkpoint (P16).
    """
    return all(p.epoch < checkpoint or (p.epoch == checkpoint and p.at_barrier) for p in positions)


def overtaking(barriers: Iterable[Barrier], positions: Sequence[Position]) -> Barrier | None:
    """Return the barrier that a stage with open inputs takes ahead of its unread rows (P16).

    Ids are taken in order: the oldest that can still be taken, if it is unaligned. One that is aligned holds
    the newer ones back until it is cut or settled.

    Args:
        barriers: those without an outcome that the stage has neither taken nor passed on.
        positions: gate positions at the end of a batch that no output has gone beyond.
    """
    newest = max((p.epoch for p in positions), default=NO_EPOCH)
    ahead = [b for b in barriers if b.id > newest or may_take(b.id, positions)]
    oldest = min(ahead, key=lambda b: b.id, default=None)
    return oldest if oldest is not None and oldest.mode is CheckpointMode.UNALIGNED else None


def _least_epoch(positions: Sequence[Position], run: RunId) -> CheckpointId:
    return min((p.epoch for p in positions if not p.is_closed(run)), default=NO_EPOCH)


def _newest_unaligned(positions: Sequence[Position]) -> CheckpointId:
    return max((p.epoch for p in positions if p.mode is CheckpointMode.UNALIGNED), default=NO_EPOCH)
