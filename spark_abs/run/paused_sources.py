"""The paused sources of a run: they begin no batch, while barriers and all other stages go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spark_abs.errors import Refused, UsageError
from spark_abs.model import StageId
from spark_abs.plan.graph import JobGraph
from spark_abs.protocol.control import ControlState


class PausedSources:
    """Which sources hold their batches. The coordinator's thread changes it, any thread reads."""

    def __init__(self, graph: JobGraph, bounded: bool, paused: Iterable[StageId]) -> None:
        """Take the stages, whether the run ends with its input, and the sources paused before it began."""
        self._sources = tuple(stage.name for stage in graph.stages if not stage.inputs)
        self._mixed = tuple(stage.name for stage in graph.stages if stage.inputs and stage.has_native)
        self._bounded = bounded
        self._paused = frozenset(paused)

    def holds(self, stage: StageId) -> bool:
        """Say whether a source begins no batch now."""
        return stage in self._paused

    def hold(self, paused: frozenset[StageId]) -> None:
        """Take the sources that are paused from now on."""
        self._paused = paused

    def named(self, stages: Sequence[StageId]) -> tuple[StageId, ...]:
        """Return the sources that a pause names, all sources if it names none.

        Raises:
            UsageError: a name is that of no source, or a source cannot be paused.
        """
        if self._bounded:
            raise UsageError("a bounded run ends with its input and cannot be paused: stop it")
        known = ", ".join(self._sources) or "none"
        for stage in stages or self._mixed:
            if stage in self._mixed:
                raise UsageError(
                    f"stage {stage!r} reads a native source beside its channels, and cannot hold one without "
                    f"the other: name the sources to pause; those that can be are: {known}"
                )
            if stage not in self._sources:
                raise UsageError(f"{stage!r} is no source of the job; its sources are: {known}")
        return tuple(dict.fromkeys(stages)) or self._sources


def refuse_paused(state: ControlState, root: str) -> None:
    """Refuse a run that ends with its input while sources are paused.

    Raises:
        Refused: a source is paused, so that the run would not end.
    """
    if state.paused:
        each = ", ".join(f"{one.stage} (by {one.by})" for one in state.paused)
        raise Refused(
            f"sources are paused: {each}, and a run with available_now would not end; let them read again "
            f"with `spark-abs resume {root}`, then start the job"
        )
