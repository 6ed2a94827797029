"""How a user declares a job: sources, stages, sinks. Its docstrings are the reference of what it may say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack, get_args

from spark_abs.catalog.target import find_again, find_target
from spark_abs.channels.schema import struct_of
from spark_abs.codec import to_json
from spark_abs.compatibility.explain import Explanation, explain_job
from spark_abs.compatibility.inspection import Checked, check_job, instead_of_start
from spark_abs.errors import GraphError, UsageError
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
from spark_abs.sinks.registry import DELTA, kind_of, made_again
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from spark_abs.sinks.iceberg.sink import Iceberg
    from spark_abs.sinks.kafka.sink import Kafka
    from spark_abs.sinks.postgres.sink import Postgres


@dataclass(eq=False, repr=False)
class Job:
    """A job: native streaming queries joined by channels, with consistent checkpoints over all of them.

    Args:
        name: the job's name; a root belongs to one job.
        root: where channels, state and checkpoints are kept: a path, or `s3://BUCKET/PATH`, that the driver
            and all executors reach.
        spark: a classic session made by `spark_abs.spark_session` or `spark_abs.configure`.
        config: settings as read from YAML: areas, and settings below them.
        settings: any setting by its short name, for example `interval="10s"`; they win over all others.
    """

    name: str
    root: Root
    spark: SparkSession
    config: Mapping[str, object]
    settings: JobSettings
    failpoint: Failpoint
    """Called at named points; tests of failures set another one."""
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

        A function as `frame` returns the frame. It is called at each start, with a location for Delta's
        option `schemaTrackingLocation`.

        `adopt` is the checkpoint of a native query that has stopped, and has written this frame to the Delta
        table of a sink of the stage. The stage goes on where the query was, with its state; the query cannot
        write there any more.
        """
        require_stream(name, frame)
        made = self.stage(
            name,
            [frame],
            lambda only: only,
            outputs=outputs,
            trigger=trigger,
            shuffle_partitions=shuffle_partitions,
            state_provider=state_provider,
            output_mode=output_mode,
        )
        self.stages[made.stage] = replace(self.stages[made.stage], adopt=adopt)
        return made

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
    ) -> Stage:
        """Declare a stage: one native streaming query.

        Args:
            name: its uid; keep it, or its state is lost.
            inputs: outputs of other stages, feedback edges, native streaming frames, lookups, static frames.
                A static Delta table stays at the version that it has now; a lookup follows its table.
            function: takes one frame for each input, in order, and returns the stage's frame.
            outputs: further outputs, each a function of the stage's batch frame, evaluated once a batch for
                all who take it; it may be called more than once to learn its columns.
            output_mode: `append`, `update`, or `complete`: each batch has all rows, which take the place of
                what is in the tables of its sinks; no other stage reads it.
            trigger: processing-time interval such as `5 seconds`; None: as fast as batches end.
            shuffle_partitions: of this stage; None: the session's `spark.sql.shuffle.partitions`, and where
                nobody has set that, one for each core. The first batch fixes the number.
            state_provider: `rocksdb` or `hdfs`; None: the session's.
            begin: where it begins to read a channel that others have written before it read it: at the `cut`
                where the job stands then, or with the `earliest` rows that the channel still has.

        Raises:
            GraphError: something of it cannot be part of a job.
        """
        stage_id = StageId(checked_name(name, "stage"))
        if stage_id in self.stages:
            raise GraphError(f"stage {name!r} is declared twice: the name is its uid, choose another")
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
            pinned=pinned,
        )
        return Stage(self, stage_id, MAIN_OUTPUT, (MAIN_OUTPUT, *extra))

    def lookup(self, name: str, *, table: str, refresh: str = "batch") -> Lookup:
        """Declare a Delta table that stages join rows with, at a version that each batch chooses.

            job.stage("enriched", [orders, job.lookup("customers", table=…)], lambda o, c: o.join(c, "id"))

        A batch that is repeated reads the version that it has read. Such a stage reads one stream beside its
        lookups and keeps no state: its function is applied to one batch after the other.

        Args:
            name: by which versions are recorded; under another name it begins anew.
            table: path, URI or name in a catalog of the table.
            refresh: `batch`: each batch reads the newest version; a duration such as `30s`: a version that
                was the newest at most so long ago; `never`: always the version of the first start.

        Raises:
            UsageError: `refresh` cannot be read, or `table` is the name of no Delta table.
        """
        target = find_target(self.spark, self.root.storage, table)
        return declared_lookup(self, name, target.uri, refresh)

    def feedback(self, name: str, schema: StructType | str) -> Feedback:
        """Declare a feedback edge: rows that an output sends to an earlier stage, or to its own (P17).

            retry = job.feedback("retry", "order_id string, tries int")
            matched = job.stage("match", [orders, retry], match, outputs={"again": unmatched})
            retry.close(matched["again"])

        What is on its way round belongs to a checkpoint as state does. Stages of a loop read native streams
        only through a source. A bounded run ends when all other input has, and nothing goes round any more.

        Args:
            name: for messages; the channel is that of the output.
            schema: of the rows that come back, as a `StructType` or in SQL's words.

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
        postgres: Postgres | str | None = None,
        kafka: Kafka | str | None = None,
        iceberg: Iceberg | str | None = None,
        two_phase: TwoPhaseSink | None = None,
        existing: Existing | None = None,
    ) -> None:
        """Write an output of a stage to a Delta table, hand it to a function, or send it outside.

        Args:
            name: the sink's uid; keep it, or it begins as a new sink.
            source: a stage, or one of its outputs.
            table: a Delta table by its path, URI or name in a catalog, or `spark_abs.Delta` to say more of
                it, created if there is none: written exactly once, with each batch or, with
                `visible="checkpoint"`, after each checkpoint.
            foreach_batch: `fn(batch_frame, batch_id)`, called when the batch is committed to the tables and
                channels of its stage, and again, as in Spark, for a batch that is repeated.
            postgres: a table of PostgreSQL, or `spark_abs.Postgres` to say more of it: gets the rows after
                each checkpoint, or with each batch, exactly once.
            kafka: a topic of Kafka, or `spark_abs.Kafka` to say more of it: gets a record for each row after
                each checkpoint, exactly once for readers of what is committed.
            iceberg: a table of Iceberg, or `spark_abs.Iceberg` to say more of it: gets a snapshot after each
                checkpoint that has rows.
            two_phase: a sink of your own that commits rows and mark at once, see `TwoPhaseSink`.
            existing: for a table that has rows of others when the sink first comes to it. None: the sink is
                refused there. `append`: it writes beside them, and each keeps its rows. `take_over`: it
                fences all other roots there for good, as when the root of this job was lost and a new one
                takes its place. Not for topics, functions and sinks of your own.
        """
        require_one_kind(
            name,
            table=table,
            foreach_batch=foreach_batch,
            postgres=postgres,
            kafka=kafka,
            iceberg=iceberg,
            two_phase=two_phase,
        )
        if not isinstance(source, Output) or source.job is not self:
            raise GraphError(f"sink {name!r} takes an output of a stage of this job")
        if existing is not None and existing not in get_args(Existing):
            raise UsageError(f"sink {name!r}: existing={existing!r} is not one of {get_args(Existing)}")
        if existing == "take_over" and table is None:
            raise UsageError(f"sink {name!r}: existing='take_over' is for Delta tables")
        delta = table if table is None or isinstance(table, Delta) else Delta(table)
        target, at_once = None, None
        if delta is not None:
            target = find_target(self.spark, self.root.storage, delta.path, delta.location)
            at_once = target.uri
        kind, settings = kind_of(postgres, kafka, iceberg)
        if delta is not None and target is not None and delta.visible == "checkpoint":
            from spark_abs.sinks.delta.epoch_sink import EpochTable

            kind = DELTA
            changed = EpochTable(target.uri, tuple(delta.key), existing == "take_over", delta.changes)
            settings, at_once = to_json(replace(changed, name=target.said)), None
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
            GraphError: it cannot run.
        """
        return self.spec().graph()

    def spec(self) -> JobSpec:
        """Return what has been declared until now, as a value, with the settings as they are now.

        Raises:
            ConfigError: a setting has come since that is unknown or cannot be read.
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
        """Return a sink with a client of its own: that of a run before may still be at work."""
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
            available_now: process what is there now, take a last checkpoint and end.
            takeover: fence a run that is alive instead of refusing.
            restart: `native` goes on from Spark's own checkpoints; `checkpoint` restores the newest intact
                one, sinks included.
            allow_non_restored_state: leave behind what the checkpoint has of stages that are no longer
                declared, as in Flink.

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
        """Say what a start would do with each stage: kept, new, left behind or refused, and why.

        Starts nothing and writes nothing. Print the answer, or ask its `ok`, `stages` and `obstacles`.

        Args:
            to: as if the job had been restored to this checkpoint: an id, the name of a savepoint, or
                `latest`. None: as it stands.
            allow_non_restored_state: as for `start`.

        Raises:
            GraphError: the job cannot run at all.
            CheckpointNotFound: there is no such checkpoint.
            DamageError: what is recorded cannot be read.
        """
        return check_job(self.spec(), allow_non_restored_state, to=to)

    def explain(self, *, allow_non_restored_state: bool = False) -> Explanation:
        """Return the job as a value to print: stages, channels, sinks, where each thing is kept, its start.

        Starts nothing and writes nothing. `print(job.explain())` shows it; `start` of it is as `check`.

        Args:
            allow_non_restored_state: as for `start`.

        Raises:
            GraphError: the job cannot run at all.
            DamageError: what is recorded cannot be read.
        """
        return explain_job(self.spec(), allow_non_restored_state)
