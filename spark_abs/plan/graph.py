"""The job graph as values, and every check that needs no running query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import get_args

from spark_abs.alignment.loops import Loop, find_loops
from spark_abs.errors import GraphError
from spark_abs.model import MAIN_OUTPUT, ChannelId, OutputMode, StageId, channel_id, checked_name, producer
from spark_abs.spark.plan_facts import PlanFacts, Watermark

NOT_REPLAYABLE = frozenset(("socket", "memory"))
"""Native sources that cannot repeat their rows after a crash."""


@dataclass(frozen=True, slots=True)
class StageDecl:
    """A stage as declared. A source is a stage without channel inputs."""

    name: StageId
    inputs: tuple[ChannelId, ...]
    """The channels that the stage reads, in order; a channel that is used twice is listed twice."""
    outputs: tuple[str, ...] = (MAIN_OUTPUT,)
    output_mode: OutputMode = "append"
    has_native: bool = False
    """Whether the stage also reads native streaming frames."""
    feedback: tuple[ChannelId, ...] = ()
    """The inputs that close a loop."""

    @property
    def forward(self) -> tuple[ChannelId, ...]:
        """Its other channels."""
        return tuple(channel for channel in self.inputs if channel not in self.feedback)


@dataclass(frozen=True, slots=True)
class SinkDecl:
    """A sink as declared: it writes one output of one stage."""

    name: str
    stage: StageId
    output: str
    table: str | None
    """None for a function sink and for a sink outside."""
    outside: bool = False
    """Whether the sink reads its rows from the channel of the output."""
    key: tuple[str, ...] = ()
    """Key columns of the merge into the table."""
    epoch_table: str | None = None
    """The Delta table that is written after each checkpoint, by a sink outside."""
    table_name: str = ""
    """The name of the Delta table in a catalog; empty if the table was declared by path."""

    @property
    def written(self) -> str | None:
        """The Delta table of the sink, written with each batch or after each checkpoint.

        None for other sinks.
        """
        return self.table or self.epoch_table


@dataclass(frozen=True, slots=True)
class JobGraph:
    """Stages joined by channels, and sinks."""

    stages: tuple[StageDecl, ...]
    sinks: tuple[SinkDecl, ...]

    def __post_init__(self) -> None:
        """Check names, ends and cycles.

        Raises:
            GraphError: the message names the stage or sink and what to do.
        """
        if not self.stages:
            raise GraphError("the job has no stages")
        _unique("stage", [s.name for s in self.stages])
        _unique("sink", [s.name for s in self.sinks])
        for stage in self.stages:
            _check_stage(stage)
        known = {channel_id(s.name, o) for s in self.stages for o in s.outputs}
        for stage in self.stages:
            for channel in stage.inputs:
                if channel not in known:
                    raise GraphError(f"stage {stage.name!r} reads {channel!r}, which no stage writes")
        for sink in self.sinks:
            if channel_id(sink.stage, sink.output) not in known:
                raise GraphError(
                    f"sink {sink.name!r} writes {sink.stage}.{sink.output}, but no stage has this output"
                )
        self._check_complete()
        self.order()
        self._check_loops()

    def order(self) -> tuple[StageDecl, ...]:
        """Return the stages, producers first, feedback edges left out.

        Raises:
            GraphError: the stages form a cycle without a feedback edge.
        """
        by_name = {s.name: s for s in self.stages}
        needs = {s.name: {producer(c) for c in s.forward} for s in self.stages}
        try:
            return tuple(by_name[name] for name in TopologicalSorter(needs).static_order())
        except CycleError as error:
            raise GraphError(
                f"stages form a cycle: {' -> '.join(error.args[1])}; "
                "declare its feedback edge with job.feedback()"
            ) from None

    def stages_after(self, name: StageId) -> int:
        """Return the number of stages on the longest path after a stage, without feedback edges."""
        after: dict[StageId, int] = {}
        for stage in reversed(self.order()):
            readers = [s.name for s in self.stages if stage.name in map(producer, s.forward)]
            after[stage.name] = max((after[reader] + 1 for reader in readers), default=0)
        return after[name]

    def _check_complete(self) -> None:
        for stage in self.stages:
            if stage.output_mode != "complete":
                continue
            if channels := self.consumed(stage.name):
                raise GraphError(
                    f"stage {stage.name!r} has output mode 'complete', and a stage or a sink outside reads "
                    f"its output {channels[0]!r}: every batch would write all rows to the channel again; "
                    "use 'update' and a Delta table with a key, or write all rows to a table with "
                    "visible='batch'"
                )
            for sink in self.sinks_of(stage.name):
                if sink.key:
                    raise GraphError(
                        f"sink {sink.name!r} has a key, and stage {stage.name!r} has output mode 'complete', "
                        "which replaces all rows with every batch: leave the key out, or use 'update'"
                    )

    def loops(self) -> tuple[Loop, ...]:
        """Return the loops that feedback edges close."""
        return find_loops((producer(c), c, s.name) for s in self.stages for c in s.inputs)

    def _check_loops(self) -> None:
        around = {stage: loop for loop in self.loops() for stage in loop.stages}
        for stage in self.stages:
            for channel in stage.feedback:
                loop = around.get(stage.name)
                if loop is None or producer(channel) not in loop.stages:
                    raise GraphError(
                        f"stage {stage.name!r} reads {channel!r} as feedback, but {channel!r} does not "
                        "depend on that stage, so there is no loop: give the output itself as an input"
                    )
            if stage.name in around and stage.has_native:
                raise GraphError(
                    f"stage {stage.name!r} is part of a loop and reads a native stream: declare the stream "
                    "as a separate source, so that the loop can tell when its input has ended"
                )

    def consumed(self, stage: StageId) -> tuple[str, ...]:
        """Return the outputs of a stage that are channels: other stages or sinks outside read them.

        In a fixed order.
        """
        read = {c for s in self.stages for c in s.inputs}
        read |= {channel_id(s.stage, s.output) for s in self.sinks if s.outside}
        return tuple(sorted(o for o in self.stage(stage).outputs if channel_id(stage, o) in read))

    def stage(self, name: StageId) -> StageDecl:
        """Return a stage."""
        (declared,) = [s for s in self.stages if s.name == name]
        return declared

    def sinks_of(self, stage: StageId) -> tuple[SinkDecl, ...]:
        """Return the sinks that a stage writes, in a fixed order."""
        return tuple(sorted((s for s in self.sinks if s.stage == stage), key=lambda s: s.name))


def _unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        checked_name(name, what)
        if names.count(name) > 1:
            raise GraphError(
                f"{what} {name!r} is declared twice: a name identifies one {what}, choose a different name"
            )


def _check_stage(stage: StageDecl) -> None:
    for output in stage.outputs:
        checked_name(output, f"output of stage {stage.name!r}")
    if stage.output_mode not in get_args(OutputMode):
        known = ", ".join(get_args(OutputMode))
        raise GraphError(f"stage {stage.name!r}: output mode {stage.output_mode!r} is not one of {known}")
    if not stage.forward and not stage.has_native:
        what = "nothing but feedback to read" if stage.inputs else "no streaming input"
        raise GraphError(f"stage {stage.name!r} has {what}")


def check_plans(graph: JobGraph, plans: Mapping[StageId, PlanFacts]) -> None:
    """Check with the analysed plans: sources can be replayed, inputs are used, static tables cannot change.

    Raises:
        GraphError: the message has the stage and the cause.
    """
    for stage in graph.stages:
        facts = plans[stage.name]
        if not facts.streaming:
            raise GraphError(f"stage {stage.name!r}: its function returned a frame that is not streaming")
        for source in facts.sources:
            if source.lower() in NOT_REPLAYABLE:
                raise GraphError(
                    f"stage {stage.name!r} reads from {source!r}, which cannot be replayed: exactly once "
                    "needs a source that gives the same rows again (files, Delta, Kafka, rate)"
                )
        for table in facts.moving_tables:
            raise GraphError(
                f"stage {stage.name!r} reads the Delta table {table}, which could change between a batch and "
                "its repeat: give the table itself as an input, and filter it in the stage's function, or "
                "read it with the option versionAsOf"
            )
        for channel in stage.inputs:
            if channel not in facts.channels:
                raise GraphError(
                    f"stage {stage.name!r} has the input {channel!r}, but its plan does not read this "
                    "input: remove it"
                )


def watermark_findings(graph: JobGraph, plans: Mapping[StageId, PlanFacts]) -> tuple[str, ...]:
    """Find watermark delays that are shorter than the lateness of rows from a stage before.

    A row leaves a stage at most as late as the stage's watermark allows, unless an operator (outer join,
    window) retains it until the watermark has passed. The plan does not have the extra time of such an
    operator as a number, so the check uses a lower bound of the delay that is needed.
    """
    lateness: dict[StageId, tuple[int, bool]] = {}
    findings: list[str] = []
    for stage in graph.order():
        facts = plans[stage.name]
        for watermark in facts.watermarks:
            findings += _goes_round(stage, watermark)
            findings += _too_short(stage, watermark, lateness)
        own = [w.delay_ms for w in facts.watermarks]
        upstream = [lateness[producer(c)] for c in stage.forward]
        late = max(own) if own else max((ms for ms, _ in upstream), default=0)
        held = facts.holds_rows or (not own and any(h for _, h in upstream))
        lateness[stage.name] = (late, held)
    return tuple(findings)


def _goes_round(stage: StageDecl, watermark: Watermark) -> Sequence[str]:
    return [
        f"stage {stage.name!r}: a watermark on {watermark.column!r} of the feedback {channel!r}: rows get "
        "later with every round, and without rows in the loop the watermark of the whole stage stops; put "
        "the watermark after the loop, or set spark.abs.graph.watermarkCheck=warn"
        for channel in watermark.channels
        if channel in stage.feedback
    ]


def _too_short(
    stage: StageDecl, watermark: Watermark, lateness: Mapping[StageId, tuple[int, bool]]
) -> Sequence[str]:
    short = []
    for channel in watermark.channels:
        if channel in stage.feedback:
            continue
        late, held = lateness[producer(channel)]
        if watermark.delay_ms < late or (held and watermark.delay_ms == late):
            more = " and more" if held else ""
            short.append(
                f"stage {stage.name!r}: a watermark delay of {watermark.delay_ms} ms on {watermark.column!r} "
                f"is too short: {producer(channel)!r} may send rows {late} ms late{more}, which Spark would "
                "drop silently; use a longer delay (that of the stage before plus the time bound of "
                "its join or window), or set spark.abs.graph.watermarkCheck=warn"
            )
    return short
