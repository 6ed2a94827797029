"""A user's declarations as values: the job, its stages and their outputs, feedback edges, sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Union

from spark_abs.catalog.target import TableTarget
from spark_abs.errors import GraphError, UsageError
from spark_abs.model import MAIN_OUTPUT, ChannelId, OutputMode, ProviderName, StageId, channel_id
from spark_abs.plan.graph import JobGraph, SinkDecl, StageDecl
from spark_abs.protocol.change_data import LAST_WINS, ChangeOptions
from spark_abs.protocol.changes import Begin
from spark_abs.settings import Settings
from spark_abs.sinks.delta.options import Delta
from spark_abs.sinks.registry import OWN
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.spark.plans import PinnedTable
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import location_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

StageFunction = Callable[..., "DataFrame"]
OutputFunction = Callable[["DataFrame"], "DataFrame"]
BatchFunction = Callable[["DataFrame", int], None]
Existing = Literal["append", "take_over"]
Restart = Literal["native", "checkpoint"]


class NamedJob(Protocol):
    """The job of an output: its identity, and its name for messages."""

    @property
    def name(self) -> str:
        """The job's name."""


@dataclass(frozen=True, slots=True, repr=False)
class Output:
    """An output of a stage, as an input of a stage or a sink."""

    job: NamedJob
    stage: StageId
    name: str

    def __repr__(self) -> str:
        return f"Output({self.channel!r} of job {self.job.name!r})"

    @property
    def channel(self) -> ChannelId:
        """The channel that carries the output if another stage reads it."""
        return channel_id(self.stage, self.name)


@dataclass(frozen=True, slots=True, repr=False)
class Stage(Output):
    """A declared stage, which is also its main output; `stage["late"]` is its output `late`."""

    outputs: tuple[str, ...] = (MAIN_OUTPUT,)

    def __repr__(self) -> str:
        return f"Stage({self.stage!r} of job {self.job.name!r}, outputs {', '.join(self.outputs)})"

    def __getitem__(self, output: str) -> Output:
        """Return an output by name."""
        if output not in self.outputs:
            raise GraphError(
                f"stage {self.stage!r} has no output {output!r}: its outputs are {', '.join(self.outputs)}"
            )
        return Output(self.job, self.stage, output)


@dataclass(eq=False, slots=True, repr=False)
class Feedback:
    """The feedback edge of a loop, as an input of the stage at its head; see `Job.feedback`."""

    job: NamedJob
    name: str
    schema: StructType
    source: Output | None = None

    def __repr__(self) -> str:
        closed = "not closed" if self.source is None else f"closed by {self.source.channel!r}"
        return f"Feedback({self.name!r} of job {self.job.name!r}, {closed})"

    def close(self, source: Output) -> None:
        """Close the loop with an output of the stage that reads the feedback, or of a later stage.

        Raises:
            GraphError: the feedback is closed already, or the output belongs to another job.
        """
        if self.source is not None:
            raise GraphError(
                f"feedback {self.name!r} is already closed by {self.source.channel!r}: union the frames, or "
                "declare a second feedback edge"
            )
        if not isinstance(source, Output) or source.job is not self.job:
            raise GraphError(f"feedback {self.name!r} must be closed by an output of a stage of this job")
        self.source = source

    @property
    def channel(self) -> ChannelId:
        """The channel of the feedback.

        Raises:
            GraphError: the feedback is not closed.
        """
        if self.source is None:
            raise GraphError(
                f"feedback {self.name!r} is not closed: call its close() with the output that the feedback "
                "reads"
            )
        return self.source.channel


@dataclass(frozen=True, slots=True, repr=False)
class Lookup:
    """A Delta table with which stages join their rows; an input of stages, see `Job.lookup`."""

    job: NamedJob
    name: str
    table: str
    """Where it is."""
    max_age_ms: int | None
    """For how long batches may use a version. 0: each batch reads the newest one; None: for ever."""

    def __repr__(self) -> str:
        return f"Lookup({self.name!r} of job {self.job.name!r})"


@dataclass(frozen=True, slots=True)
class TrackedSource:
    """A native stream that each start creates anew, with the directory where Delta tracks its schema."""

    open: Callable[[str], DataFrame]


Input = Union[Output, Feedback, Lookup, TrackedSource, "DataFrame"]
"""An input of a stage."""
Given = Union[Output, Feedback, Lookup, "DataFrame", Callable[[str], "DataFrame"]]
"""An input as users declare it."""


def is_stream(given: Input) -> bool:
    """Say whether an input is a stream, neither a lookup nor a static frame."""
    if isinstance(given, (Output, Feedback, TrackedSource)):
        return True
    return not isinstance(given, Lookup) and given.isStreaming


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The declaration of one stage."""

    name: StageId
    inputs: tuple[Input, ...]
    function: StageFunction
    outputs: Mapping[str, OutputFunction]
    output_mode: OutputMode
    trigger: str | None
    shuffle_partitions: int | None
    state_provider: ProviderName | None
    begin: Begin = "cut"
    adopt: str | None = None
    """The checkpoint of the native query that the stage adopts."""
    pinned: tuple[PinnedTable, ...] = ()
    """Static tables, pinned to their version when the stage was declared."""

    def __post_init__(self) -> None:
        """Refuse functions that cannot be called.

        Raises:
            UsageError: the message names the given value.
        """
        _require_callable(f"stage {self.name!r}: function", self.function)
        for name, output in self.outputs.items():
            _require_callable(f"stage {self.name!r}: output {name!r}", output)

    @property
    def lookups(self) -> tuple[Lookup, ...]:
        """Its lookups, in order."""
        return tuple(i for i in self.inputs if isinstance(i, Lookup))

    def frame(self, stream: DataFrame, lookups: Mapping[str, DataFrame]) -> DataFrame:
        """Call the function of a stage with lookups and one stream.

        Args:
            stream: the stream, or one of its batches.
            lookups: by name.
        """
        return self.function(*(self._given(i, stream, lookups) for i in self.inputs))

    @staticmethod
    def _given(given: Input, stream: DataFrame, lookups: Mapping[str, DataFrame]) -> DataFrame:
        if isinstance(given, Lookup):
            return lookups[given.name]
        if isinstance(given, (Output, Feedback, TrackedSource)) or given.isStreaming:
            return stream
        return given

    @property
    def channels(self) -> tuple[ChannelId, ...]:
        """Channel inputs, in order."""
        return tuple(i.channel for i in self.inputs if isinstance(i, (Output, Feedback)))

    def decl(self) -> StageDecl:
        """Return the stage for the graph."""
        native = any(is_stream(i) and not isinstance(i, (Output, Feedback)) for i in self.inputs)
        feedback = tuple(i.channel for i in self.inputs if isinstance(i, Feedback))
        return StageDecl(
            self.name,
            self.channels,
            outputs=(MAIN_OUTPUT, *self.outputs),
            output_mode=self.output_mode,
            has_native=native,
            feedback=feedback,
        )


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """The declaration of one sink."""

    name: str
    source: Output
    table: str | None
    function: BatchFunction | None
    existing: Existing | None = None
    outside: TwoPhaseSink | None = None
    kind: str = OWN
    """Of a sink outside."""
    settings: str = ""
    """For a sink outside: its configuration as JSON; empty for a sink of the user's own."""
    delta: Delta | None = None
    """Of a Delta table."""
    target: TableTarget | None = None
    """For a Delta table: the place to which the declared path or name led."""

    @property
    def epoch_table(self) -> str | None:
        """The place of a Delta table whose rows become visible after each checkpoint.

        None for other sinks.
        """
        return self.target.uri if self.target is not None and self.outside is not None else None

    @property
    def table_name(self) -> str:
        """The name of a Delta table in its catalog; empty if the table was declared by path."""
        return self.target.said if self.target is not None else ""

    @property
    def key(self) -> tuple[str, ...]:
        """Key columns of the merge into the table."""
        return tuple(self.delta.key) if self.delta is not None else ()

    @property
    def changes(self) -> ChangeOptions:
        """How changes of one key are applied."""
        return self.delta.changes if self.delta is not None else LAST_WINS

    def decl(self) -> SinkDecl:
        """Return the sink for the graph."""
        outside = self.outside is not None
        return SinkDecl(
            self.name,
            self.source.stage,
            output=self.source.name,
            table=self.table,
            outside=outside,
            key=self.key,
            epoch_table=self.epoch_table,
            table_name=self.table_name,
        )


@dataclass(frozen=True, slots=True, eq=False)
class JobSpec:
    """The declaration of a job at the time of its start, check or explanation."""

    name: str
    root: Root
    spark: SparkSession
    settings: Settings
    """The settings at that time, each with the source of its value."""
    failpoint: Failpoint
    stages: Mapping[StageId, StageSpec]
    feedbacks: tuple[Feedback, ...]
    sinks: tuple[SinkSpec, ...]

    @property
    def locations(self) -> tuple[str, ...]:
        """All places that the job names: its root, native checkpoints, tables of sinks and lookups."""
        native_root = self.settings.native_root
        return (
            self.root.uri,
            *((location_of(native_root),) if native_root else ()),
            *(sink.target.uri for sink in self.sinks if sink.target is not None),
            *(lookup.table for spec in self.stages.values() for lookup in spec.lookups),
        )

    def graph(self) -> JobGraph:
        """Return the graph, checked.

        Raises:
            GraphError: the graph cannot run.
        """
        read = {id(i) for s in self.stages.values() for i in s.inputs}
        for feedback in self.feedbacks:
            if id(feedback) not in read:
                raise GraphError(
                    f"feedback {feedback.name!r} is the input of no stage: give it to a stage as an input"
                )
        return JobGraph(tuple(s.decl() for s in self.stages.values()), tuple(s.decl() for s in self.sinks))


def listed_inputs(stage: str, inputs: object) -> Sequence[Given]:
    """Return the inputs of a stage.

    Raises:
        GraphError: the inputs are not a list, for example a single input.
    """
    if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
        return inputs
    said = f"{inputs!r} is not a list"
    if isinstance(inputs, (Output, Feedback)) or hasattr(inputs, "isStreaming"):
        said = "a single input was given without a list"
    raise GraphError(f"stage {stage!r}: inputs must be a list, and {said}: job.stage({stage!r}, [input], …)")


def require_stream(source: str, frame: object) -> None:
    """Require a streaming frame as the frame of a source.

    Raises:
        GraphError: the source is not a streaming frame.
    """
    if isinstance(frame, (Output, Feedback, Lookup)):
        raise GraphError(
            f"source {source!r} takes a native stream, and {frame!r} is an input of a stage: "
            f"job.stage({source!r}, [input], function)"
        )
    if not hasattr(frame, "isStreaming") and not callable(frame):
        raise GraphError(
            f"source {source!r} takes a streaming DataFrame, or a function that returns one, not {frame!r}"
        )
    if not getattr(frame, "isStreaming", True):
        raise GraphError(
            f"source {source!r} has a static frame, but a source needs a stream: read the data with "
            "spark.readStream, or use the frame as a second input of a stage, job.stage(NAME, [stream, "
            "frame], …)"
        )


def require_one_kind(sink: str, **kinds: object) -> None:
    """Require exactly one kind for a sink; `kinds` has the argument of each kind, None if not given.

    Raises:
        UsageError: no kind or several kinds were given, or an argument has the wrong type.
    """
    *others, last = (f"{kind}=" for kind in kinds)
    given = [f"{kind}=" for kind, value in kinds.items() if value is not None]
    if not given:
        raise UsageError(f"sink {sink!r} needs one of {', '.join(others)} and {last}")
    if len(given) > 1:
        raise UsageError(
            f"sink {sink!r} has {' and '.join(given)}, but a sink writes to one place: declare a sink for "
            "each, under different names"
        )
    own, function = kinds.get("two_phase"), kinds.get("foreach_batch")
    if function is not None:
        _require_callable(f"sink {sink!r}: foreach_batch=", function)
    if own is not None and not isinstance(own, TwoPhaseSink):
        raise UsageError(f"sink {sink!r}: two_phase= takes a spark_abs.TwoPhaseSink, not {own!r}")


def _require_callable(argument: str, given: object) -> None:
    """Refuse a function that cannot be called.

    Raises:
        UsageError: the function cannot be called.
    """
    if not callable(given):
        raise UsageError(f"{argument} takes a function, not {given!r}")


def query_name(job: str, stage: StageId) -> str:
    """Return the name of a stage's query, unique in its session."""
    return f"{job}/{stage}"
