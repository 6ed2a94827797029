"""Turn declarations into frames: open the gates, call the users' functions, learn schemas and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from spark_abs.channels.schema import plain_schema
from spark_abs.errors import AbsError, GraphError
from spark_abs.model import MAIN_OUTPUT, PROVIDERS, ChannelId, StageId, channel_id
from spark_abs.plan.columns import unread_columns, used_columns
from spark_abs.plan.fingerprint import kafka_sources, kept_by_place, operator_shapes, source_shapes
from spark_abs.plan.graph import JobGraph, check_plans, watermark_findings
from spark_abs.plan.lookups import OpenedLookup
from spark_abs.plan.specs import Feedback, Input, JobSpec, Lookup, Output, StageSpec, TrackedSource
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.spark.plans import DRAFT, as_active, optimized, plan_facts, refusal
from spark_abs.state.declared import NOTHING, Before, Declared, gathering

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

OpenGate = Callable[[StageId, ChannelId, "StructType"], "DataFrame"]


@dataclass(frozen=True, slots=True)
class Frames:
    """The frame of every stage, and the schema of every output."""

    stages: Mapping[StageId, DataFrame]
    schemas: Mapping[ChannelId, StructType]
    declared: Mapping[StageId, Declared]
    """The stateful functions of every stage."""
    streams: Mapping[StageId, DataFrame] = field(default_factory=dict)
    """For a stage with lookups: the one stream that it reads.

    The stage's function is applied to each batch.
    """
    lookups: Mapping[str, OpenedLookup] = field(default_factory=dict)
    """By name."""


def build_frames(
    job: JobSpec,
    graph: JobGraph,
    *,
    open_gate: OpenGate,
    before: Callable[[StageId], Before] = lambda _: NOTHING,
    checked: Mapping[StageId, Declared] = MappingProxyType({}),
    lookups: Mapping[str, OpenedLookup] = MappingProxyType({}),
    tracking: Callable[[StageId], str] = lambda _: "",
) -> Frames:
    """Call every stage's function on the frames of its inputs, producers first. No query is started.

    Args:
        job: the declarations.
        graph: the checked graph.
        open_gate: makes the frame of a channel.
        before: returns the facts of a stage's last finished batch, see `Declared.before`.
        checked: the stateful functions of each stage, after a start has checked that they can continue.
        lookups: the lookups of all stages, by name.
        tracking: returns the directory where Delta tracks the schemas of a stage's sources.

    Raises:
        GraphError: a function failed or did not return a frame; the message names the stage.
    """
    stages: dict[StageId, DataFrame] = {}
    schemas: dict[ChannelId, StructType] = {}
    declared: dict[StageId, Declared] = {}
    streams: dict[StageId, DataFrame] = {}
    settings = job.settings
    with as_active(job.spark):
        for decl in graph.order():
            spec = job.stages[decl.name]
            inputs = [
                _input(spec, i, schemas=schemas, open_gate=open_gate, lookups=lookups, tracking=tracking)
                for i in spec.inputs
            ]
            if spec.lookups:
                streams[spec.name] = next(frame for frame in inputs if frame.isStreaming)
            provider = None if spec.state_provider is None else PROVIDERS[spec.state_provider]
            known = checked.get(spec.name)
            evolved = {f.uid: f for f in known.functions} if known is not None else {}
            mine = Declared(spec.name, settings, provider, before(spec.name), evolved)
            with gathering(mine) as declared[spec.name]:
                frame = _called(f"stage {spec.name!r}: its function", partial(spec.function, *inputs))
            stages[spec.name] = frame
            schemas[channel_id(spec.name, MAIN_OUTPUT)] = plain_schema(frame.schema)
            for output, schema in _further(job, spec, frame).items():
                schemas[channel_id(spec.name, output)] = schema
    for feedback in job.feedbacks:
        check_feedback(feedback, schemas[feedback.channel])
    return Frames(stages, schemas, declared, streams, lookups)


def _input(
    spec: StageSpec,
    given: Input,
    *,
    schemas: Mapping[ChannelId, StructType],
    open_gate: OpenGate,
    lookups: Mapping[str, OpenedLookup],
    tracking: Callable[[StageId], str],
) -> DataFrame:
    match given:
        case Lookup():
            return lookups[given.name].frame
        case TrackedSource():
            return _opened(spec.name, given, tracking(spec.name))
        case Output():
            return open_gate(spec.name, given.channel, schemas[given.channel])
        case Feedback():
            return open_gate(spec.name, given.channel, plain_schema(given.schema))
        case _:
            return given


def _opened(stage: StageId, source: TrackedSource, location: str) -> DataFrame:
    what = f"stage {stage!r}: its source"
    frame = _called(what, partial(source.open, location))
    if not frame.isStreaming:
        raise GraphError(f"{what} is not a stream: read it with spark.readStream")
    return frame


def check_feedback(feedback: Feedback, written: StructType) -> None:
    """Refuse a feedback edge whose schema differs from its declaration; nullability is not compared.

    Raises:
        GraphError: the schemas differ; the message shows both.
    """
    declared = {field.name: field.dataType.simpleString() for field in plain_schema(feedback.schema)}
    actual = {field.name: field.dataType.simpleString() for field in written}
    if declared != actual:
        names = sorted({*declared.items()} ^ {*actual.items()})
        differing = ", ".join(dict.fromkeys(name for name, _ in names))
        raise GraphError(
            f"feedback {feedback.name!r} was declared as {_shown(declared)}, and its channel "
            f"{feedback.channel!r} has {_shown(actual)}: they differ in {differing}"
        )


def _shown(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def draft_gate(spark: SparkSession, channel: ChannelId, schema: StructType) -> DataFrame:
    """Return a streaming frame that is analysed like the gate of a channel and never started.

    Analysing a gate costs a Python process. A draft costs none and needs no run.
    """
    blank = spark.readStream.format("rate").option(DRAFT, channel).load()
    return blank.select(*unread_columns(channel, schema, "value"))


def check_frames(graph: JobGraph, frames: Frames) -> tuple[Mapping[StageId, PlanFacts], tuple[str, ...]]:
    """Check the analysed plans; returns their facts and the doubtful watermarks.

    Raises:
        GraphError: a plan cannot be part of a job.
    """
    plans = {name: _facts(frame, bool(graph.stage(name).inputs)) for name, frame in frames.stages.items()}
    for name in frames.streams:
        plans[name] = _with_lookups(name, plans[name], frames)
    check_plans(graph, plans)
    refuse_unsupported(graph, frames)
    for name, facts in plans.items():
        frames.declared[name].place(facts.functions)
    return plans, watermark_findings(graph, plans)


def refuse_unsupported(graph: JobGraph, frames: Frames) -> None:
    """Check every stage with Spark's own check of streaming plans.

    Raises:
        GraphError: Spark refuses stages; the message names each with Spark's error.
    """
    refused = []
    for decl in graph.order():
        frame = frames.stages[decl.name]
        with as_active(frame.sparkSession):
            said = refusal(frame, decl.output_mode)
        if said is not None:
            refused.append(f"stage {decl.name!r} cannot run in output mode {decl.output_mode!r}: {said}")
    if refused:
        raise GraphError(
            "\n".join([*refused, "change the stage's function, or choose another mode with output_mode="])
        )


def _facts(frame: DataFrame, has_inputs: bool) -> PlanFacts:
    facts = plan_facts(frame)
    plan = optimized(frame) if has_inputs or facts.keeps_state else None
    return replace(
        facts,
        streams=source_shapes(frame),
        operators=operator_shapes(frame),
        by_place=kept_by_place(plan) if facts.keeps_state else (),
        kafka=kafka_sources(frame),
        columns=used_columns(plan) if has_inputs else {},
    )


def _with_lookups(stage: StageId, facts: PlanFacts, frames: Frames) -> PlanFacts:
    """Check that the function of a stage with lookups can be applied to single batches.

    Raises:
        GraphError: the function needs more than one batch at a time.
    """
    tables = {
        opened.path: name for name, opened in frames.lookups.items() if opened.path in facts.static_tables
    }
    said = f"stage {stage!r} reads lookup {', '.join(sorted(tables.values())) or 'tables'}"
    if facts.keeps_state:
        raise GraphError(
            f"{said} and has state: each batch may read a different version of a lookup, and Spark's state "
            "does not record the version; join in a stage without state, and put the stateful operator "
            "into a stage before or after it"
        )
    if len(facts.watermarks) > len(plan_facts(frames.streams[stage]).watermarks):
        raise GraphError(
            f"{said} and has a watermark, which only a stage with state uses: declare the watermark in the "
            "stage with state"
        )
    static = {path: version for path, version in facts.static_tables.items() if path not in tables}
    return replace(facts, static_tables=static, lookup_tables=tuple(tables))


def _further(job: JobSpec, spec: StageSpec, frame: DataFrame) -> dict[str, StructType]:
    """Learn the schemas of further outputs by calling their functions on an empty batch."""
    if not spec.outputs:
        return {}
    empty = job.spark.createDataFrame([], frame.schema)
    return {
        name: plain_schema(
            _called(f"output {name!r} of stage {spec.name!r}", partial(function, empty)).schema
        )
        for name, function in spec.outputs.items()
    }


def _called(what: str, call: Callable[[], DataFrame]) -> DataFrame:
    try:
        frame = call()
    except AbsError:
        raise
    except Exception as error:
        raise GraphError(f"{what} failed: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if not hasattr(frame, "isStreaming"):
        raise GraphError(f"{what} returned {type(frame).__name__}, not a DataFrame")
    return frame
