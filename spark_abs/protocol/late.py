"""For which stages an open checkpoint waits, and which of them are late by themselves (P20)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_abs.model import StageId


def late_by_themselves(
    without_cut: Mapping[StageId, Collection[StageId]], copying: Collection[StageId] = ()
) -> frozenset[StageId]:
    """Return the stages that hold a checkpoint up.

    A stage waits for another one if that stage has not passed the barrier on. The others have the barrier in
    front of them, or take it like a source.

    Args:
        without_cut: the stages that have not made their cut, with the stages from which each reads; feedback
            edges are left out, so there is no circle.
        copying: the stages whose cut is being copied.
    """
    return frozenset(copying) | {
        stage for stage, producers in without_cut.items() if not without_cut.keys() & set(producers) - {stage}
    }
