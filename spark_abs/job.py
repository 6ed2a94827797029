"""How a user declares a job: sources, stages, sinks. These docstrings are the reference for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack, get_args

from spark_abs.catalog.target import find_again, find_target
from spark_abs.channels.schema import struct_of
from spark_abs.compatibility.explain import Explanation, explain_job
from spark_abs.compatibility.inspection import Checked, check_job, instead_of_start
from spark_abs.errors import GraphError, UsageError
from spark_abs.markup import paragraph, table
from spark_abs.model import MAIN_OUTPUT, OutputMode, ProviderName, StageId, checked_name
from spark_abs.plan.graph import JobGraph
from spark_abs.plan.inputs import declared_lookup, given_inputs, refuse_options
from spark_abs.plan.specs import (
    BatchFunction,
    Existing,
    Feedback,
    Given,
    JobSpec,
    Lookup,
    Output,
    OutputFunction,
    Restart,
    SinkSpec,
    Stage,
    StageFunction,
    StageSpec,
    require_one_kind,
    require_stream,
)
from spark_abs.protocol.changes import Begin, Comparison
from spark_abs.run.run import Run
from spark_abs.run.start import start_job
from spark_abs.settings import Settings
from spark_abs.settings_keywords import JobSettings
from spark_abs.sinks.delta.options import Delta
from spark_abs.sinks.registry import SinkKinds, described, keywords, made_again
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.spark.session import require_classic
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@dataclass(eq=False, repr=False)
class Job:
    """A job: native streaming queries joined by channels, with consistent checkpoints over all of them.

    Args:
        name: the job's name; a root belongs to one job.
        root: the directory for channels, state and checkpoints: a path or `s3://BUCKET/PATH`. The driver and
            all executors must reach it.
        spark: a classic session: that of the notebook or cluster, or one from `spark_abs.spark_session` or
            `spark_abs.configure`. The job never stops it.
        config: settings as read from YAML: areas, and settings below them.
        settings: any setting by its short name, for example `interval="10s"`. These win over settings from
            elsewhere.
    """

    name: str
    root: Root
    spark: SparkSession
    config: Mapping[str, object]
    settings: JobSettings
    failpoint: Failpoint
    """Called at named points of the protocol; tests of failures replace it."""
    stages: dict[StageId, StageSpec] = field(default_factory=dict)
    feedbacks: list[Feedback] = field(default_factory=list)
    sinks: list[SinkSpec] = field(default_factory=list)

    def __init__(
        self,
        name: str,
        *,
        root: str,
        spark: SparkSession,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[JobSettings],
    ) -> None:
        self.name = checked_name(name, "job")
        require_classic(spark, f"job {name!r}")
        self.spark = spark
        self.config = config or {}
        self.settings = settings
        self.root = Root(root, Storage.of(Settings.of_session(spark, self.config, settings)))
        self.failpoint = no_failpoint
        self.stages = {}
        self.feedbacks = []
        self.sinks = []

    def __repr__(self) -> str:
        stages, sinks = ", ".join(self.stages) or "none", ", ".join(s.name for s in self.sinks) or "none"
        return f"Job({self.name!r} at {self.root.uri}, stages {stages}; sinks {sinks})"

    def _repr_html_(self) -> str:
        head = paragraph(f"Job {self.name} at {self.root.uri}, as declared", strong=True)
        return head + table(
            ("stages", "sinks"), [(", ".join(self.stages), ", ".join(s.name for s in self.sinks))]
        )

    def source(
        self,
        name: str,
        frame: DataFrame | Callable[[str], DataFrame],
        *,
        outputs: Mapping[str, OutputFunction] | None = None,
        trigger: str | None = None,
        shuffle_partitions: int | None = None,
        state_provider: ProviderName | None = None,
        output_mode: OutputMode = "append",
        adopt: str | None = None,
    ) -> Stage:
        """Declare a stage that reads one native streaming frame; arguments are those of `stage`.

        If `frame` is a function, it returns the frame. It is called at each start, with a location for
        Delta's option `schemaTrackingLocation`.
        """
        require_stream(name, frame)
        return self.stage(
            name,
            [frame],
            lambda only: only,
            outputs=outputs,
            trigger=trigger,
            shuffle_partitions=shuffle_partitions,
            state_provider=state_provider,
            output_mode=output_mode,
            adopt=adopt,
        )

    def stage(
        self,
        name: str,
        inputs: Sequence[Given],
        function: StageFunction,
        *,
        outputs: Mapping[str, OutputFunction] | None = None,
        output_mode: OutputMode = "append",
        trigger: str | None = None,
        shuffle_partitions: int | None = None,
        state_provider: ProviderName | None = None,
        begin: Begin = "cut",
        adopt: str | None = None,
    ) -> Stage:
        """Declare a stage: one native streaming query.

        Args:
            name: its uid. Keep the name: a stage under a new name begins without state.
            inputs: outputs of other stages, feedback edges, native streaming frames, lookups, static frames.
                A static Delta table is read at its present version for the whole run; a lookup follows its
                table.
            function: takes one frame for each input, in order, and returns the stage's frame.
            outputs: further outputs, each a function of the stage's batch frame. Each is evaluated once a
                batch, for all its consumers; the function may also be called to learn the columns.
            output_mode: `append`, `update` or `complete`. With `complete` each batch has all rows and
                replaces the rows in the tables of its sinks; no other stage can read such a stage.
            trigger: processing-time interval such as `5 seconds`; None: each batch starts when the one before
                ends.
            shuffle_partitions: of this stage; None: the session's `spark.sql.shuffle.partitions`, or one for
                each core if that is not set. The first batch fixes the number.
            state_provider: `rocksdb` or `hdfs`; None: the session's.
            begin: where the stage begins in a channel that existed before the stage did: `cut`, at the
                position of the job at that start, or `earliest`, with the oldest rows that the channel still
                has.
            adopt: the checkpoint of a stopped native query that wrote the stage's frame to the Delta table of
                a sink of the stage. The stage resumes where the query stopped, with its state. From then on
                the query cannot write to the table. If an input is another stage, the query has read the
                table of that stage's sink to its end, and the other stage adopts the query that wrote it.

        Raises:
            GraphError: the stage cannot be part of a job; the message says why.
        """
        stage_id = StageId(checked_name(name, "stage"))
        if stage_id in self.stages:
            raise GraphError(
                f"stage {name!r} is declared twice: a name identifies one stage, choose a different name"
            )
        extra = dict(outputs or {})
        refuse_options(name, extra, state_provider, shuffle_partitions, begin)
        given, pinned = given_inputs(self, name, inputs)
        self.stages[stage_id] = StageSpec(
            stage_id,
            given,
            function=function,
            outputs=extra,
            output_mode=output_mode,
            trigger=trigger,
            shuffle_partitions=shuffle_partitions,
            state_provider=state_provider,
            begin=begin,
            adopt=adopt,
            pinned=pinned,
        )
        return Stage(self, stage_id, MAIN_OUTPUT, (MAIN_OUTPUT, *extra))

    def lookup(self, name: str, *, table: str, refresh: str = "batch") -> Lookup:
        """Declare a Delta table for stages to join with. Each batch chooses the version that it reads.

            job.stage("enriched", [orders, job.lookup("customers", table=…)], lambda o, c: o.join(c, "id"))

        A repeated batch reads the same version again. A stage with lookups reads one stream beside them and
        has no state: its function is applied to each batch separately.

        Args:
            name: the name under which the versions are recorded. A lookup under a new name has no record.
            table: path, URI or name in a catalog of the table.
            refresh: `batch`: each batch reads the newest version; a duration such as `30s`: a version that
                was the newest at most so long ago; `never`: always the version of the first start.

        Raises:
            UsageError: `refresh` cannot be read, or `table` is the name of no Delta table.
        """
        target = find_target(self.spark, self.root.storage, table)
        return declared_lookup(self, name, target.uri, refresh)

    def feedback(self, name: str, schema: StructType | str) -> Feedback:
        """Declare a feedback edge: an output sends rows back to an earlier stage or to its own stage (P17).

            retry = job.feedback("retry", "order_id string, tries int")
            matched = job.stage("match", [orders, retry], match, outputs={"again": unmatched})
            retry.close(matched["again"])

        Rows in the loop are part of a checkpoint, as state is. Stages of a loop can read a native stream only
        through a source. A bounded run ends when all other input has ended and no row is left in the loop.

        Args:
            name: the name in messages; the channel is named after the output.
            schema: of the rows that come back, as a `StructType` or as DDL text.

        Raises:
            GraphError: the name is taken.
        """
        if any(f.name == name for f in self.feedbacks):
            raise GraphError(f"feedback {name!r} is declared twice")
        declared = struct_of(schema) if isinstance(schema, str) else schema
        found = Feedback(self, checked_name(name, "feedback"), declared)
        self.feedbacks.append(found)
        return found

    def sink(
        self,
        name: str,
        source: Output,
        *,
        table: Delta | str | None = None,
        foreach_batch: BatchFunction | None = None,
        two_phase: TwoPhaseSink | None = None,
        existing: Existing | None = None,
        **outside: Unpack[SinkKinds],
    ) -> None:
        """Write an output of a stage to a Delta table, pass it to a function, or send it to a system outside.

        Args:
            name: the sink's uid. Keep the name: a sink under a new name is a new sink.
            source: a stage, or one of its outputs.
            table: a Delta table by its path, URI or name in a catalog, or `spark_abs.Delta` with options. It
                is created if it does not exist. Rows are written exactly once: with each batch, or after each
                checkpoint with `visible="checkpoint"`.
            foreach_batch: `fn(batch_frame, batch_id)`, called after the batch is committed to the tables and
                channels of its stage. As in Spark, it is called again for a batch that is repeated.
            two_phase: your own sink, which commits rows and its mark in one step; see `TwoPhaseSink`.
            existing: for a table that already has rows from elsewhere at the sink's first start. None: the
                start is refused. `append`: the sink adds its rows and leaves the others alone. `take_over`:
                the sink also fences all other roots from this table for good; use it when the root of this
                job was lost and a new root replaces it. Not for topics, functions and your own sinks.
            outside: a sink in another system, by the keyword of its kind: the name of a table or topic, or an
                object with options, such as `spark_abs.Kafka`. Its class says when it gets rows; `SinkKinds`
                lists the kinds.
        """
        outside_kinds = keywords(outside)
        require_one_kind(
            name,
            table=table,
            foreach_batch=foreach_batch,
            **outside_kinds,
            two_phase=two_phase,
        )
        if not isinstance(source, Output) or source.job is not self:
            raise GraphError(f"sink {name!r} takes an output of a stage of this job")
        if existing is not None and existing not in get_args(Existing):
            raise UsageError(f"sink {name!r}: existing={existing!r} is not one of {get_args(Existing)}")
        if existing == "take_over" and table is None:
            raise UsageError(f"sink {name!r}: existing='take_over' is for Delta tables")
        delta = table if table is None or isinstance(table, Delta) else Delta(table)
        target, behind = None, None
        if delta is not None:
            target = find_target(self.spark, self.root.storage, delta.path, delta.location)
            behind = delta.after_checkpoints(target.uri, target.said, existing == "take_over")
        at_once = target.uri if target is not None and behind is None else None
        kind, settings = described(outside_kinds, behind)
        made = two_phase or made_again(kind, settings, self.root, lambda: self.spark)
        checked = checked_name(name, "sink")
        self.sinks.append(
            SinkSpec(
                checked,
                source,
                table=at_once,
                function=foreach_batch,
                existing=existing,
                outside=made,
                kind=kind,
                settings=settings,
                delta=delta,
                target=target,
            )
        )

    def graph(self) -> JobGraph:
        """Return the graph, checked.

        Raises:
            GraphError: the job cannot run.
        """
        return self.spec().graph()

    def spec(self) -> JobSpec:
        """Return the declarations so far as a value, with the present settings.

        Raises:
            ConfigError: a setting in the session or environment is unknown or cannot be read.
        """
        return JobSpec(
            self.name,
            self.root,
            spark=self.spark,
            settings=Settings.of_session(self.spark, self.config, self.settings),
            failpoint=self.failpoint,
            stages=MappingProxyType(dict(self.stages)),
            feedbacks=tuple(self.feedbacks),
            sinks=tuple(self._of_this_start(sink) for sink in self.sinks),
        )

    def _of_this_start(self, sink: SinkSpec) -> SinkSpec:
        """Return a sink with a new client, since the client of an earlier run may still be in use."""
        made = made_again(sink.kind, sink.settings, self.root, lambda: self.spark) or sink.outside
        target = sink.target and find_again(self.spark, self.root.storage, sink.target)
        return replace(sink, outside=made, target=target)

    def start(
        self,
        *,
        available_now: bool = False,
        takeover: bool = False,
        restart: Restart = "native",
        allow_non_restored_state: bool = False,
    ) -> Run:
        """Start the job.

        Args:
            available_now: process all input that is available now, take a last checkpoint and end.
            takeover: fence a run that is alive; without it the start is refused.
            restart: `native` resumes from Spark's own checkpoints; `checkpoint` first restores the newest
                intact checkpoint, sinks included.
            allow_non_restored_state: leave behind the state of stages that are no longer declared, as in
                Flink.

        Raises:
            UsageError: the graph or a setting is wrong; nothing was started.
            Refused: the state of the root forbids it.
            DamageError: a native checkpoint is missing or damaged.
        """
        check = instead_of_start.get(None)
        if check is not None:
            raise Checked(check(self.spec(), allow_non_restored_state))
        return start_job(
            self.spec(),
            available_now=available_now,
            takeover=takeover,
            restart=restart,
            allow_non_restored_state=allow_non_restored_state,
        )

    def check(self, *, to: str | int | None = None, allow_non_restored_state: bool = False) -> Comparison:
        """Return whether a start would keep, begin, leave behind or refuse each stage, with the reasons.

        Starts nothing and writes nothing. Print the result, or read its `ok`, `stages` and `obstacles`.

        Args:
            to: check a start after a restore to this checkpoint: an id, the name of a savepoint, or `latest`.
                None: a start without a restore.
            allow_non_restored_state: as for `start`.

        Raises:
            GraphError: the job cannot run at all.
            CheckpointNotFound: there is no such checkpoint.
            DamageError: the records of the root cannot be read.
        """
        return check_job(self.spec(), allow_non_restored_state, to=to)

    def explain(self, *, allow_non_restored_state: bool = False) -> Explanation:
        """Return the job as a value to print: stages, channels, sinks, places, and the effect of a start.

        Starts nothing and writes nothing. `print(job.explain())` shows the text; its `start` is the result of
        `check`.

        Args:
            allow_non_restored_state: as for `start`.

        Raises:
            GraphError: the job cannot run at all.
            DamageError: the records of the root cannot be read.
        """
        return explain_job(self.spec(), allow_non_restored_state)
