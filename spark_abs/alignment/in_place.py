"""Barriers that a stage takes where it stands: pure, from its positions and the logs of its inputs (P4).

A stage whose inputs have nothing but barrier n before them is at its cut: state and outputs hold all rows
from before n and none from after it, whatever comes behind n. It passes n on without a batch. Its positions
stay before the barrier, so that this is as durable as they are: a log does not change, and a gate that is
asked again, or that a restore sets back to this cut, reads the barrier as one that is settled. A batch that
is planned meanwhile reads rows from after n only, and comes after n in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spark_abs.alignment.align import is_bare
from spark_abs.alignment.loops import forward
from spark_abs.alignment.marker import may_take
from spark_abs.model import Barrier, CheckpointId, CheckpointMode, Entry, Position, RunId

Unread = Callable[[Position], Iterable[Entry]]
"""Returns the valid entries after a position, ascending; read only as far as they are needed."""


def is_at_cut(barrier: Barrier, positions: Sequence[Position], unread: Unread, run: RunId) -> bool:
    """Say whether a stage is at its cut of a barrier where it stands.

    So it is if each open input is at the barrier, or has nothing before it but older barriers. An unaligned
    barrier needs no such look, see `overtaking`. A stage with a feedback edge takes its barriers
    with batches: the rows that go round are read at its cut.

    Args:
        barrier: the oldest barrier without an outcome that the stage has neither taken nor passed on.
        positions: gate positions at the end of the stage's last batch, after which none is planned.
        unread: the logs of its inputs.
        run: the current run, for which inputs are open or closed.
    """
    if barrier.mode is CheckpointMode.UNALIGNED or len(forward(positions)) < len(positions):
        return False
    still_open = [position for position in positions if not position.is_closed(run)]
    return (
        bool(still_open)
        and may_take(barrier.id, positions)
        and all(p.epoch == barrier.id or _is_next(barrier.id, unread(p)) for p in still_open)
    )


def _is_next(checkpoint: CheckpointId, entries: Iterable[Entry]) -> bool:
    """Say whether a barrier comes next in a log, older ones left out, and without rows."""
    for entry in entries:
        if entry.silent:
            continue
        if not is_bare(entry) or entry.barrier is None:
            return False
        if entry.barrier.id >= checkpoint:
            return entry.barrier.id == checkpoint
    return False
