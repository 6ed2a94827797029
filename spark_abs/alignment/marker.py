"""The marker that a micro-batch passes on, decided from its start and end positions (P4, P7-P10, P16)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_abs.alignment.loops import forward
from spark_abs.model import NO_EPOCH, Barrier, CheckpointId, CheckpointMode, Position, RunId


@dataclass(frozen=True, slots=True)
class Cut:
    """The batch is the stage's cut of this barrier.

    In modes `aligned` and `unaligned`, state and outputs then hold only rows from before the barrier. In
    modes `aligned` and `at_least_once` they hold all of these rows.
    """

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The stage passed this id, and perhaps lower ones, without a cut: outputs get a cancel marker."""

    id: CheckpointId


@dataclass(frozen=True, slots=True)
class Nothing:
    """No marker belongs to the batch; an unaligned barrier may still be taken with it, see `overtaking`."""


@dataclass(frozen=True, slots=True)
class Free:
    """No channel input is open: like a source, the stage takes barriers at the end of any batch."""


Emission = Cut | Cancelled | Nothing | Free


def emission(before: Sequence[Position], after: Sequence[Position], run: RunId) -> Emission:
    """Return the marker that the outputs get at the end of a batch.

    Two events make a marker. A batch without new input is no cut, and closing an input after a cut does not
    repeat the cut.

    - An unaligned barrier reaches the first input. That batch is the latest possible cut: no input has been
      read past the barrier yet, and the next batch may do that (P16).
    - The least epoch over the open inputs rises. This is a cut if every open input is at that barrier and no
      input, open or closed, was read past it (P4); for an at-least-once barrier the positions of the others
      do not matter (P7). An unaligned barrier that reaches the last input makes no marker.

    Feedback edges do not count, except that an unaligned barrier may arrive on one first: the stages between
    take it without waiting for the head (P17).

    The answer depends neither on outcomes nor on earlier cuts. The writer of the marker replaces a barrier
    that is known to be aborted by a cancel marker (P9), and leaves out an id that it has already written.

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
    """Say whether no input has been read past a barrier: a cut here is exact.

    Entries between a position and the barrier are then in flight: part of the checkpoint (P16).
    """
    return all(p.epoch < checkpoint or (p.epoch == checkpoint and p.at_barrier) for p in positions)


def overtaking(barriers: Iterable[Barrier], positions: Sequence[Position]) -> Barrier | None:
    """Return the barrier that a stage with open inputs takes ahead of its unread rows (P16).

    Barriers are taken in the order of their ids: the oldest that can still be taken, if it is unaligned. An
    aligned one delays the newer ones until it is cut or settled.

    Args:
        barriers: barriers without an outcome that the stage has neither taken nor passed on.
        positions: gate positions at the end of the newest batch that any output has.
    """
    newest = max((p.epoch for p in positions), default=NO_EPOCH)
    ahead = [b for b in barriers if b.id > newest or may_take(b.id, positions)]
    oldest = min(ahead, key=lambda b: b.id, default=None)
    return oldest if oldest is not None and oldest.mode is CheckpointMode.UNALIGNED else None


def _least_epoch(positions: Sequence[Position], run: RunId) -> CheckpointId:
    return min((p.epoch for p in positions if not p.is_closed(run)), default=NO_EPOCH)


def _newest_unaligned(positions: Sequence[Position]) -> CheckpointId:
    return max((p.epoch for p in positions if p.mode is CheckpointMode.UNALIGNED), default=NO_EPOCH)
