"""Create a source's frame again when its stage is restarted, since the columns may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard, cast

from spark_abs.errors import Refused
from spark_abs.model import ChannelId, StageId, channel_id
from spark_abs.plan.frames import build_frames, check_frames
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.specs import Input, JobSpec, StageSpec, TrackedSource
from spark_abs.protocol.state_compatibility import moved, operators_fit
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.spark.plans import is_delta_stream, read_anew

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Renewal:
    """Creates the frame of one stage again."""

    job: JobSpec
    graph: JobGraph
    stage: StageId
    plan: PlanFacts
    """The facts of the plan at the start of the run."""
    schemas: Mapping[ChannelId, StructType]
    """The schemas of the outputs at the start of the run."""
    tracking: str
    """Where Delta tracks the schemas of its sources."""

    @property
    def possible(self) -> bool:
        """Whether the frame can be created again.

        True for a stage without stateful functions that reads only native streams, if a function opens one of
        them or if it reads only a Delta table.
        """
        inputs = self.job.stages[self.stage].inputs
        known = (isinstance(given, TrackedSource) or hasattr(given, "isStreaming") for given in inputs)
        if any(self.plan.functions) or not all(known):
            return False
        return any(isinstance(given, TrackedSource) or _is_read_anew(given) for given in inputs)

    def __call__(self) -> DataFrame | None:
        """Return the frame that a start would create now; None if the frame cannot be created again.

        Raises:
            Refused: the new frame changes the stage, and only a start can adapt the rest of the job.
            GraphError: the function of the stage failed, or its plan cannot be part of a job.
        """
        if not self.possible:
            return None
        alone = replace(
            self.job, stages={self.stage: _renewed(self.job.stages[self.stage])}, feedbacks=(), sinks=()
        )
        graph = JobGraph((self.graph.stage(self.stage),), ())
        frames = build_frames(alone, graph, open_gate=_no_gate, tracking=lambda _: self.tracking)
        plans, _ = check_frames(graph, frames)
        for output in self.graph.stage(self.stage).outputs:
            channel = channel_id(self.stage, output)
            changed = _changes(self.schemas[channel], frames.schemas[channel])
            if changed:
                raise self._refused(f"its output {output!r} has changed: {', '.join(changed)}")
        now, then = plans[self.stage], self.plan
        same_state = operators_fit(then.operators, now.operators) and not moved(then.by_place, now.by_place)
        if now.streams != then.streams or not same_state:
            raise self._refused("its plan has different sources or different state")
        return frames.stages[self.stage]

    def _refused(self, why: str) -> Refused:
        return Refused(
            f"stage {self.stage!r} cannot be restarted with the present source: {why}. Start the job "
            "again: the start updates channels, tables and following stages, or says why it cannot"
        )


def _renewed(spec: StageSpec) -> StageSpec:
    return replace(spec, inputs=tuple(read_anew(i) if _is_read_anew(i) else i for i in spec.inputs))


def _is_read_anew(given: Input) -> TypeGuard[DataFrame]:
    return bool(getattr(given, "isStreaming", False)) and is_delta_stream(cast("DataFrame", given))


def _no_gate(stage: StageId, channel: ChannelId, _: StructType) -> DataFrame:
    raise AssertionError(f"stage {stage!r} reads {channel!r}")


def _changes(before: StructType, now: StructType) -> list[str]:
    """Return the columns that are new, are gone, or have a different type."""
    old = {field.name: field.dataType.simpleString() for field in before}
    new = {field.name: field.dataType.simpleString() for field in now}
    found = [f"{name} {kind} is new" for name, kind in new.items() if name not in old]
    found += [f"{name} is gone" for name in old if name not in new]
    found += [f"{n} was {old[n]} and is {new[n]}" for n in old if n in new and old[n] != new[n]]
    return found
