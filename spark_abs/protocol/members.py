"""Queries that share a root and are gone for good: checkpoints carry no part of them any more."""

from __future__ import annotations

from dataclasses import replace

from spark_abs.model import StageId
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.forgotten import Forgotten

WRAPPED_JOB = "queries"
"""The job name of a root that wrapped queries share."""


def forget(state: ControlState, stage: StageId, now_ms: int) -> ControlState:
    """Record that a query is gone: from now on no checkpoint of the attempt needs it."""
    gone = Forgotten(stage, state.attempt.id, state.last_claimed, now_ms)
    return replace(state, forgotten=(*_others(state, stage), gone))


def remember(state: ControlState, stage: StageId) -> ControlState:
    """Record that a query has come, whatever was said of it before."""
    return replace(state, forgotten=_others(state, stage))


def forgotten(state: ControlState) -> frozenset[StageId]:
    """Return the queries that checkpoints of the newest attempt do without.

    One that was forgotten in an earlier attempt has come back if the checkpoint has it that was restored.
    """
    return frozenset(f.stage for f in state.forgotten if f.attempt == state.attempt.id)


def _others(state: ControlState, stage: StageId) -> tuple[Forgotten, ...]:
    return tuple(f for f in state.forgotten if f.stage != stage)
