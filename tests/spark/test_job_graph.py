"""What cannot run is refused before anything exists, with the stage or sink and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_abs.errors import ConfigError, GraphError, UsageError
from spark_abs.job import Job
from spark_abs.model import ChannelId, StageId
from spark_abs.plan.graph import JobGraph, SinkDecl, StageDecl
from spark_abs.plan.specs import Stage
from spark_abs.sinks.delta.options import Delta
from tests.job_support import checked


def rate(job: Job) -> DataFrame:
    return job.spark.readStream.format("rate").load()


def source(job: Job, name: str = "ticks") -> Stage:
    return job.source(name, rate(job))


def late(frame: DataFrame, delay: str) -> DataFrame:
    return frame.withWatermark("timestamp", delay)


def counted(frame: DataFrame) -> DataFrame:
    return late(frame, "10 seconds").groupBy(F.window("timestamp", "5 seconds").alias("w")).count()


def in_a_row(first: str, then: str) -> Callable[[Job], object]:
    """Declare an outer join that holds rows back, and a stage after it with another delay."""

    def declare(job: Job) -> object:
        def match(one: DataFrame, two: DataFrame) -> DataFrame:
            right = late(two, first).selectExpr("timestamp AS other", "value AS v")
            near = F.expr("value = v AND other BETWEEN timestamp AND timestamp + INTERVAL 5 SECONDS")
            return late(one, first).join(right, near, "leftOuter").select("timestamp", "value")

        ticks = source(job)
        joined = job.stage("match", [ticks, ticks], match)
        return job.stage(
            "then", [joined], lambda frame: late(frame, then).dropDuplicates(["value", "timestamp"])
        )

    return declare


def two_sinks(job: Job) -> None:
    ticks = source(job)
    for name in ("one", "two"):
        job.sink(name, ticks, table="/tmp/same")


WRONG: dict[str, tuple[Callable[[Job], object], str]] = {
    "a name that is no name": (lambda job: source(job, "1st.."), "stage '1st..' is not a name"),
    "one name twice": (lambda job: [source(job), source(job)], "stage 'ticks' is declared twice"),
    "no input": (lambda job: job.stage("s", [], lambda: rate(job)), "stage 's' has no streaming input"),
    "only a static frame": (
        lambda job: job.stage("s", [job.spark.range(3)], lambda frame: frame),
        "stage 's' has no streaming input",
    ),
    "an input of another kind": (
        lambda job: job.stage("s", ["ticks"], lambda frame: frame),  # type: ignore[list-item]
        "stage 's': input 'ticks' is neither a stage nor a DataFrame",
    ),
    "a stage in place of a list of inputs": (
        lambda job: job.stage("s", source(job), lambda frame: frame),  # type: ignore[arg-type]
        "stage 's': inputs must be a list, and a single input was given without a list",
    ),
    "a frame in place of a list of inputs": (
        lambda job: job.stage("s", rate(job), lambda frame: frame),  # type: ignore[arg-type]
        "stage 's': inputs must be a list, and a single input was given without a list",
    ),
    "a name in place of a list of inputs": (
        lambda job: job.stage("s", "ticks", lambda frame: frame),  # type: ignore[arg-type]
        "stage 's': inputs must be a list, and 'ticks' is not a list",
    ),
    "an output that is not there": (lambda job: source(job)["late"], "stage 'ticks' has no output 'late'"),
    "an input of another job": (
        lambda job: job.stage("s", [source(Job("b", root="/tmp/b", spark=job.spark))], lambda frame: frame),
        "stage 's' reads 'ticks.main' of another job",
    ),
    "an input that is not used": (
        lambda job: job.stage("s", [source(job), source(job, "tocks")], lambda one, two: one),
        "stage 's' has the input 'tocks.main', but its plan does not read this input",
    ),
    "a function that fails": (
        lambda job: job.stage("s", [source(job)], lambda frame: frame.select("nothing")),
        "stage 's': its function failed",
    ),
    "a function that gives no frame": (
        lambda job: job.stage("s", [source(job)], lambda frame: 7),  # type: ignore[arg-type, return-value]
        "stage 's': its function returned int, not a DataFrame",
    ),
    "a static frame out of a stage": (
        lambda job: job.stage("s", [source(job)], lambda frame: job.spark.range(3)),
        "stage 's': its function returned a frame that is not streaming",
    ),
    "a further output that fails": (
        lambda job: job.source("s", rate(job), outputs={"late": lambda batch: batch.select("nothing")}),
        "output 'late' of stage 's' failed",
    ),
    "an output called main": (
        lambda job: job.source("s", rate(job), outputs={"main": lambda batch: batch}),
        "output 'main' is the name of the stage's main output",
    ),
    "an unknown output mode": (
        lambda job: job.stage("s", [source(job)], counted, output_mode="all"),  # type: ignore[arg-type]
        "stage 's': output mode 'all' is not one of append, update, complete",
    ),
    "complete mode before another stage": (
        lambda job: job.stage("t", [job.stage("s", [source(job)], counted, output_mode="complete")], counted),
        "stage 's' has output mode 'complete', and a stage",
    ),
    "complete mode before a table with a key": (
        lambda job: job.sink(
            "out",
            job.stage("s", [source(job)], counted, output_mode="complete"),
            table=Delta("./out", key="value"),
        ),
        "sink 'out' has a key, and stage 's' has output mode 'complete'",
    ),
    "an unknown provider": (
        lambda job: job.source("s", rate(job), state_provider="redis"),  # type: ignore[arg-type]
        "stage 's': state_provider 'redis' is not one of rocksdb, hdfs",
    ),
    "no shuffle partitions": (
        lambda job: job.source("s", rate(job), shuffle_partitions=0),
        "shuffle_partitions must be at least 1",
    ),
    "a source that forgets": (
        lambda job: job.source(
            "s", job.spark.readStream.format("socket").option("host", "127.0.0.1").option("port", 9).load()
        ),
        "stage 's' reads from 'socket', which cannot be replayed",
    ),
    "a sink of nothing": (lambda job: job.sink("out", source(job)), "needs one of table=, foreach_batch="),
    "a sink of two kinds": (
        lambda job: job.sink("out", source(job), table="/tmp/t", kafka="orders"),
        "sink 'out' has table= and kafka=, but a sink writes to one place",
    ),
    "one table for two sinks": (two_sinks, "write the same table"),
    "an aggregation that appends without a watermark": (
        lambda job: job.stage("s", [source(job)], lambda frame: frame.groupBy("value").count()),
        "stage 's' cannot run in output mode 'append': [STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION]",
    ),
    "all rows at each batch without an aggregation": (
        lambda job: job.stage("s", [source(job)], lambda frame: frame, output_mode="complete"),
        "stage 's' cannot run in output mode 'complete': [STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION]",
    ),
    "a sort of a stream": (
        lambda job: job.stage("s", [source(job)], lambda frame: frame.orderBy("value")),
        "stage 's' cannot run in output mode 'append': ",
    ),
    "a delay that is too short": (
        in_a_row("10 seconds", "10 seconds"),
        "stage 'then': a watermark delay of 10000 ms on 'timestamp' is too short: 'match' may send rows",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_run_is_refused_and_nothing_exists(
    spark: SparkSession, tmp_path: Path, wrong: str
) -> None:
    declare, message = WRONG[wrong]
    job = Job("a", root=str(tmp_path / "root"), spark=spark)
    with pytest.raises(UsageError, match=re.escape(message)):
        refused(job, declare)
    if "cannot run in output mode" in message:
        with pytest.raises(GraphError, match=re.escape(message)):
            job.check()
    assert not (tmp_path / "root").exists()


def refused(job: Job, declare: Callable[[Job], object]) -> None:
    declare(job)
    job.start()


def test_a_delay_that_covers_the_bound_of_the_join_before_it_will_do(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = Job("a", root=str(tmp_path / "root"), spark=spark)
    in_a_row("10 seconds", "16 seconds")(job)
    _, doubts = checked(job)
    assert doubts == ()


def test_a_job_without_stages_and_settings_that_are_none(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with pytest.raises(GraphError, match="no stages"):
        Job("a", root=root, spark=spark).start()
    with pytest.raises(ConfigError, match=r"'intervall' .*nearest is 'interval'"):
        with_source(Job("a", root=root, spark=spark, intervall="10s")).start()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="neither 'native' nor 'checkpoint'"):
        with_source(Job("a", root=root, spark=spark)).start(restart="backwards")  # type: ignore[arg-type]
    assert not (tmp_path / "root").exists()


def test_a_static_frame_is_no_source(spark: SparkSession, tmp_path: Path) -> None:
    job = Job("a", root=str(tmp_path / "root"), spark=spark)
    with pytest.raises(GraphError, match=r"source 'x' has a static frame.*spark\.readStream"):
        job.source("x", spark.range(3))
    assert not job.stages


def test_an_argument_of_another_kind_is_refused_where_it_is_given(
    spark: SparkSession, tmp_path: Path
) -> None:
    job: Any = Job("a", root=str(tmp_path / "root"), spark=spark)
    made, back = source(job), job.feedback("back", "n long")
    given = r"source 'x' takes a native stream, .* job\.stage\('x', \[input\]"
    for wrong in (made, made["main"], back):
        with pytest.raises(GraphError, match=given):
            job.source("x", wrong)
    with pytest.raises(GraphError, match=r"source 'x' takes a streaming DataFrame, or a function .*'/in'"):
        job.source("x", "/in")
    with pytest.raises(UsageError, match="stage 'x': function takes a function, not 'upper'"):
        job.stage("x", [made], "upper")
    with pytest.raises(UsageError, match="stage 'x': output 'late' takes a function, not 3"):
        job.stage("x", [made], lambda frame: frame, outputs={"late": 3})
    with pytest.raises(UsageError, match=r"a table is given as text .* not as PosixPath"):
        job.lookup("x", table=tmp_path)
    sinks = {
        "table": "a table is given as text .* not as 3",
        "foreach_batch": "sink 'x': foreach_batch= takes a function, not 3",
        "two_phase": "sink 'x': two_phase= takes a spark_abs.TwoPhaseSink, not 3",
        "postgres": "postgres= takes a name as text or a spark_abs.Postgres, not 3",
        "kafka": "kafka= takes a name as text or a spark_abs.Kafka, not 3",
        "iceberg": "iceberg= takes a name as text or a spark_abs.Iceberg, not 3",
    }
    for kind, message in sinks.items():
        with pytest.raises(UsageError, match=message):
            job.sink("x", made, **{kind: 3})
    assert list(job.stages) == [made.stage]
    assert not job.sinks


def with_source(job: Job) -> Job:
    source(job)
    return job


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("spark.sql.streaming.asyncProgressTracking.enabled", "true"),
        ("spark.hadoop.outputCommitCoordination.enabled", "false"),
    ],
)
def test_a_session_that_cannot_be_trusted_is_refused(
    spark: SparkSession, tmp_path: Path, setting: str, value: str
) -> None:
    spark.conf.set(setting, value)
    try:
        with pytest.raises(UsageError, match=setting.removesuffix(".enabled").rpartition(".")[2]):
            with_source(Job("a", root=str(tmp_path / "root"), spark=spark)).start()
    finally:
        spark.conf.unset(setting)


READS_NOTHING = StageDecl(StageId("a"), (ChannelId("ghost.main"),))
CYCLE = (StageDecl(StageId("a"), (ChannelId("b.main"),)), StageDecl(StageId("b"), (ChannelId("a.main"),)))
ALONE = StageDecl(StageId("a"), (), has_native=True)


@pytest.mark.parametrize(
    ("stages", "sinks", "message"),
    [
        ((READS_NOTHING,), (), "stage 'a' reads 'ghost.main', which no stage writes"),
        (CYCLE, (), "stages form a cycle: "),
        (
            (ALONE,),
            (SinkDecl("s", StageId("a"), "late", None),),
            "sink 's' writes a.late, but no stage has this output",
        ),
        ((ALONE,), (SinkDecl("s", StageId("a"), "main", None),) * 2, "sink 's' is declared twice"),
    ],
)
def test_a_graph_that_cannot_be(
    stages: tuple[StageDecl, ...], sinks: tuple[SinkDecl, ...], message: str
) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        JobGraph(stages, sinks)


def test_a_job_explains_itself_and_its_start_and_makes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "root"
    job = Job("shop", root=str(root), spark=spark)
    again = job.feedback("again", "timestamp timestamp, value long")
    ticks = job.source("ticks", rate(job))
    tries = job.stage("tries", [ticks, again], lambda new, old: new.union(old), trigger="5 seconds")
    again.close(tries)
    counts = job.stage("counts", [tries], counted, output_mode="update", shuffle_partitions=3)
    job.sink("counted", counts, table=str(tmp_path / "counted"))
    job.sink("mail", ticks, foreach_batch=lambda frame, batch: None)
    found = job.explain()
    assert not root.exists()
    assert [s.name for s in found.stages] == ["ticks", "tries", "counts"]
    assert [(c.id, c.readers) for c in found.channels] == [
        ("ticks.main", ("tries",)),
        ("tries.main", ("tries", "counts")),
    ]
    assert [(s.name, s.source, s.table) for s in found.sinks] == [
        ("counted", "counts.main", str(tmp_path / "counted")),
        ("mail", "ticks.main", None),
    ]
    assert (found.start.ok, found.start) == (True, job.check())
    assert (
        str(found)
        == f"""\
job shop at {root}, attempt 1
stage ticks
  reads rate source
  writes main (append)
  native checkpoint {root}/native/1/ticks
stage tries
  reads channel ticks.main
  reads channel tries.main, the feedback edge of a loop
  writes main (append), every 5 seconds
  native checkpoint {root}/native/1/tries
stage counts
  reads channel tries.main
  watermark on timestamp, 10000 ms late
  keeps state of Aggregate, in 3 shuffle partitions (as declared)
  writes main (update)
  native checkpoint {root}/native/1/counts
channel ticks.main to tries: {root}/channels/ticks.main
channel tries.main to tries, counts: {root}/channels/tries.main
sink counted of counts.main: {tmp_path}/counted, exactly once
sink mail of ticks.main: a function, at least once
state of checkpoints: {root}/state
tables of the job: {root}/checkpoints, {root}/history, {root}/control
a start: possible
  compared with a new root:
  ticks: new
    rate source starts where its options say
  tries: new
  counts: new"""
    )
