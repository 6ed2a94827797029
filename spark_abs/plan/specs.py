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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

StageFunction = Callable[..., "DataFrame"]
OutputFunction = Callable[["DataFrame"], "DataFrame"]
BatchFunction = Callable[["DataFrame", int], None]
Existing = Literal["append", "take_over"]
Restart = Literal["native", "checkpoint"]


class NamedJob(Protocol):
    """A job as its outputs know it: by its identity, and by its name for messages."""

    @property
    def name(self) -> str:
        """The job's name."""


@dataclass(frozen=True, slots=True, repr=False)
class Output:
    """An output of a stage, as an input of another or of a sink."""

    job: NamedJob
    stage: StageId
    name: str

    def __repr__(self) -> str:
        return f"Output({self.channel!r} of job {self.job.name!r})"

    @property
    def channel(self) -> ChannelId:
        """The channel that carries it if another stage reads it."""
        return channel_id(self.stage, self.name)


@dataclass(frozen=True, slots=True, repr=False)
class Stage(Output):
    """A declared stage: itself its main output; `stage["late"]` is another one."""

    outputs: tuple[str, ...] = (MAIN_OUTPUT,)

    def __repr__(self) -> str:
        return f"Stage({self.stage!r} of job {self.job.name!r}, outputs {', '.join(self.outputs)})"

    def __getitem__(self, output: str) -> Output:
        """Return an output by name."""
        if output not in self.outputs:
            raise GraphError(
                f"stage {self.stage!r} has no output {output!r}: it has {', '.join(self.outputs)}"
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
        """Say which output goes round: of the stage that reads it, or of one after that.

        Raises:
            GraphError: it is closed already, or this is no output of the same job.
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
        """The channel that goes round.

        Raises:
            GraphError: it is not closed.
        """
        if self.source is None:
            raise GraphError(
                f"feedback {self.name!r} is not closed: give its close() the output that it reads"
            )
        return self.source.channel


@dataclass(frozen=True, slots=True, repr=False)
class Lookup:
    """A Delta table that a stage joins its rows with, as an input of stages; see `Job.lookup`."""

    job: NamedJob
    name: str
    table: str
    """Where it is."""
    max_age_ms: int | None
    """For how long batches may go on with a version, 0: each looks anew; None: for ever."""

    def __repr__(self) -> str:
        return f"Lookup({self.name!r} of job {self.job.name!r})"


@dataclass(frozen=True, slots=True)
class TrackedSource:
    """A native stream that is made for each start, with the place where Delta tracks its schema."""

    open: Callable[[str], DataFrame]


Input = Union[Output, Feedback, Lookup, TrackedSource, "DataFrame"]
"""What a stage reads."""
Given = Union[Output, Feedback, Lookup, "DataFrame", Callable[[str], "DataFrame"]]
"""As what a user gives it."""


def is_stream(given: Input) -> bool:
    """Say whether an input is a stream: neither a lookup nor a static frame."""
    if isinstance(given, (Output, Feedback, TrackedSource)):
        return True
    return not isinstance(given, Lookup) and given.isStreaming


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Everything that was given for one stage."""

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
    """The checkpoint of a native query that the stage takes the place of."""
    pinned: tuple[PinnedTable, ...] = ()
    """Static tables that stay at the version that they had when the stage was declared."""

    def __post_init__(self) -> None:
        """Refuse functions that are none.

        Raises:
            UsageError: names what was given.
        """
        _require_callable(f"stage {self.name!r}: function", self.function)
        for name, output in self.outputs.items():
            _require_callable(f"stage {self.name!r}: output {name!r}", output)

    @property
    def lookups(self) -> tuple[Lookup, ...]:
        """Its lookups, in order."""
        return tuple(i for i in self.inputs if isinstance(i, Lookup))

    def frame(self, stream: DataFrame, lookups: Mapping[str, DataFrame]) -> DataFrame:
        """Call the function of a stage with lookups, which has one stream.

        Args:
            stream: the stream, or a batch of it.
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
        """Return the stage as the graph knows it."""
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
    """Everything that was given for one sink."""

    name: str
    source: Output
    table: str | None
    function: BatchFunction | None
    existing: Existing | None = None
    outside: TwoPhaseSink | None = None
    kind: str = OWN
    """Of a sink outside."""
    settings: str = ""
    """Of a sink outside, as JSON, what makes it again; empty for one of the user's own."""
    delta: Delta | None = None
    """Of a Delta table."""
    target: TableTarget | None = None
    """Of a Delta table: where what was declared led to."""

    @property
    def epoch_table(self) -> str | None:
        """Where a Delta table is whose rows are visible after each checkpoint; None for any other sink."""
        return self.target.uri if self.target is not None and self.outside is not None else None

    @property
    def table_name(self) -> str:
        """The name of a Delta table in its catalog; empty if it was declared by its path."""
        return self.target.said if self.target is not None else ""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which rows are merged into the table."""
        return tuple(self.delta.key) if self.delta is not None else ()

    @property
    def changes(self) -> ChangeOptions:
        """How changes of one key are applied."""
        return self.delta.changes if self.delta is not None else LAST_WINS

    def decl(self) -> SinkDecl:
        """Return the sink as the graph knows it."""
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
    """Everything that was declared of a job, as it was when the job was started, checked or explained."""

    name: str
    root: Root
    spark: SparkSession
    settings: Settings
    """As they were then, each from where it was given last."""
    failpoint: Failpoint
    stages: Mapping[StageId, StageSpec]
    feedbacks: tuple[Feedback, ...]
    sinks: tuple[SinkSpec, ...]

    def graph(self) -> JobGraph:
        """Return the graph, checked.

        Raises:
            GraphError: it cannot run.
        """
        read = {id(i) for s in self.stages.values() for i in s.inputs}
        for feedback in self.feedbacks:
            if id(feedback) not in read:
                raise GraphError(
                    f"feedback {feedback.name!r} is the input of no stage: give it to a stage as an input"
                )
        return JobGraph(tuple(s.decl() for s in self.stages.values()), tuple(s.decl() for s in self.sinks))


def listed_inputs(stage: str, inputs: object) -> Sequence[Given]:
    """Return the inputs of a stage, which are given as a list.

    Raises:
        GraphError: they are not: a single input was given as it is, for example.
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
        GraphError: it is an input of another kind, a static frame, or none at all.
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
            f"source {source!r} has a static frame, and a source needs a stream: read it with "
            "spark.readStream, or give it to a stage beside a stream, job.stage(NAME, [stream, frame], …)"
        )


def require_one_kind(sink: str, **kinds: object) -> None:
    """Require that a sink is of one kind; `kinds` has what was given for each, None for nothing.

    Raises:
        UsageError: it is of none, or of several, or is no such thing.
    """
    *others, last = (f"{kind}=" for kind in kinds)
    given = [f"{kind}=" for kind, value in kinds.items() if value is not None]
    if not given:
        raise UsageError(f"sink {sink!r} needs one of {', '.join(others)} and {last}")
    if len(given) > 1:
        raise UsageError(
            f"sink {sink!r} has {' and '.join(given)}, and a sink writes to one place: declare a sink for "
            "each, with a name of its own"
        )
    own, function = kinds.get("two_phase"), kinds.get("foreach_batch")
    if function is not None:
        _require_callable(f"sink {sink!r}: foreach_batch=", function)
    if own is not None and not isinstance(own, TwoPhaseSink):
        raise UsageError(f"sink {sink!r}: two_phase= takes a spark_abs.TwoPhaseSink, not {own!r}")


def _require_callable(argument: str, given: object) -> None:
    """Refuse a function that could not be called in the first batch.

    Raises:
        UsageError: it cannot be called.
    """
    if not callable(given):
        raise UsageError(f"{argument} takes a function, not {given!r}")


def query_name(job: str, stage: StageId) -> str:
    """Return the name of a stage's query, which is unique in its session."""
    return f"{job}/{stage}"
