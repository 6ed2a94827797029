"""Checkpoints that become unaligned after they were claimed, as `control/` has it (P16)."""

from __future__ import annotations

from dataclasses import replace

from spark_abs.model import CheckpointId, CheckpointMode, RunId
from spark_abs.protocol.control import ControlState, require_current


def overtake(state: ControlState, run: RunId, checkpoint: CheckpointId) -> ControlState:
    """Make a claimed checkpoint unaligned (P16); repeatable, and nothing if it has an outcome already."""
    require_current(state, run)
    return replace(
        state,
        claims=tuple(
            replace(c, barrier=replace(c.barrier, mode=CheckpointMode.UNALIGNED))
            if c.barrier.id == checkpoint
            else c
            for c in state.claims
        ),
    )


def overtaken(before: ControlState | None, after: ControlState) -> tuple[CheckpointId, ...]:
    """Return the ids that have become unaligned since they were claimed, between two states."""
    aligned = CheckpointMode.ALIGNED
    were = {c.barrier.id for c in before.claims if c.barrier.mode is aligned} if before else set()
    return tuple(c.barrier.id for c in after.claims if c.barrier.id in were and c.barrier.mode is not aligned)
