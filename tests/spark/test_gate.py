"""The gate under real Spark: stages read channels in micro-batches that end at barriers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from spark_abs.channels.gate import FORMAT_NAME, GateSpec, open_gate
from spark_abs.channels.gate_facts import offset_lines
from spark_abs.errors import AbortReason
from spark_abs.model import AttemptId, Branch, CheckpointId, RunId, Version, positions_of
from spark_abs.protocol.control import Aborted, settle
from spark_abs.spark.plans import as_active
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.channel_support import JOB, NUMBERS, Log, position


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(str(tmp_path / "root"))
    Control.create(root, JOB, 0)
    return root


def spec(root: Root, channel: str, stage: str = "s", **changes: object) -> GateSpec:
    control = Control.open(root)
    values: dict[str, object] = {
        "root": root.uri,
        "start": position(channel, 0),
        "schema": NUMBERS.json(),
        "native": root.at(f"native/1/{stage}"),
        "path": (Branch(AttemptId(1), None),),
        "run": RunId(1),
        "attempt": AttemptId(1),
        "floor": CheckpointId(0),
        "control_version": control.version,
        "max_entries": 1000,
        "max_bytes": 2**30,
        "partition_bytes": 2**20,
        "poll_ms": 0,
        "native_poll_ms": 0,
    }
    return GateSpec(**{**values, **changes})  # type: ignore[arg-type]


class Recorder:
    """What a stage saw, batch by batch: rows, and its positions at the end of the batch."""

    def __init__(self, root: Root, stage: str = "s") -> None:
        self.native = Path(root.at(f"native/1/{stage}"))
        self.batches: list[tuple[list[object], list[tuple[int, int, bool]]]] = []

    def __call__(self, frame: DataFrame, batch: int) -> None:
        rows = sorted((row[0] for row in frame.collect()), key=repr)
        lines = offset_lines((self.native / "offsets" / str(batch)).read_text(), "offsets")
        at = [(int(p.version), int(p.epoch), p.at_barrier) for p in positions_of(lines)]
        self.batches.append((rows, at))

    @property
    def rows(self) -> list[list[object]]:
        """The rows of the batches that had any."""
        return [rows for rows, _ in self.batches if rows]


@contextmanager
def running(frame: DataFrame, recorder: Recorder) -> Iterator[StreamingQuery]:
    query = (
        frame.writeStream.foreachBatch(recorder)
        .option("checkpointLocation", str(recorder.native))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        yield query
    finally:
        query.stop()


def caught_up(query: StreamingQuery, until: Callable[[], bool] = lambda: True) -> None:
    """Wait until the query has nothing more to do, and `until` holds."""
    deadline = time.monotonic() + 60
    query.processAllAvailable()
    while not until():
        assert time.monotonic() < deadline
        query.processAllAvailable()


def abort(root: Root, checkpoint: int) -> None:
    """Commit the abort of an id as the coordinator does."""
    gone = Aborted(CheckpointId(checkpoint), AbortReason.EXPIRED)
    Control.open(root).update(lambda state: settle(state, (gone,)))


def test_a_batch_ends_at_the_barrier(spark: SparkSession, root: Root) -> None:
    """Rows after a barrier belong to the next batch, also when all is there from the start (P4)."""
    log = Log(root)
    log.batch(1, 2)
    log.batch(3, barrier_id=1)
    log.batch(4)
    log.batch()
    last = log.batch(5)
    seen = Recorder(root)
    with running(open_gate(spark, spec(root, log.channel)), seen) as query:
        caught_up(query)
    assert seen.rows == [[1, 2, 3], [4, 5]]
    assert seen.batches[-1][1] == [(last, 1, False)]


def test_an_input_waits_at_the_barrier_for_the_other(spark: SparkSession, root: Root) -> None:
    """An input at the barrier stops; the other goes on until it has the barrier too (P4, P5)."""
    a, b = Log(root, "a"), Log(root, "b")
    at_a = a.batch(1, barrier_id=1)
    a.batch(2)
    b.batch(10)
    both = open_gate(spark, spec(root, a.channel)).union(open_gate(spark, spec(root, b.channel)))
    seen = Recorder(root)
    with running(both, seen) as query:
        caught_up(query)
        assert seen.rows == [[1, 10]]  # 2 stays behind barrier 1
        at_b = b.batch(11, barrier_id=1)
        caught_up(query)
    cut = [at for _, at in seen.batches if all(line[2] for line in at)]
    assert cut == [[(at_a, 1, True), (at_b, 1, True)]]
    assert seen.rows == [[1, 10], [11], [2]]


def test_a_restart_repeats_the_last_batch_with_the_same_rows(spark: SparkSession, root: Root) -> None:
    """Spark plans batch 0 again after a crash: the offsets decide, not what is there by then."""
    log = Log(root)
    log.batch(1)
    seen = Recorder(root)

    class Crash(Recorder):
        def __call__(self, frame: DataFrame, batch: int) -> None:
            super().__call__(frame, batch)
            raise RuntimeError("killed before the end of the batch")

    crash = Crash(root)
    with (
        running(open_gate(spark, spec(root, log.channel)), crash) as query,
        pytest.raises(Exception, match="killed"),
    ):
        query.awaitTermination()
    log.batch(2)
    with running(open_gate(spark, spec(root, log.channel)), seen) as query:
        caught_up(query)
    assert (crash.rows, seen.rows) == ([[1]], [[1], [2]])


@pytest.mark.parametrize(("offset_log", "frames"), [(1, 2), (2, 2), (1, 1)])
def test_a_self_join_of_one_channel(spark: SparkSession, root: Root, offset_log: int, frames: int) -> None:
    """A channel used twice, in one frame or two, gives two lines of offsets that are both kept."""
    log = Log(root)
    log.batch(1, 2)
    log.batch(3, barrier_id=1)
    log.batch(4)
    opened = [open_gate(spark, spec(root, log.channel)) for _ in range(frames)]
    one, two = opened[0].alias("one"), opened[-1].alias("two")
    joined = one.join(two, F.expr("one.n = two.n - 1")).select(F.col("one.n").alias("n"))
    seen = Recorder(root)
    spark.conf.set("spark.sql.streaming.offsetLog.formatVersion", offset_log)
    try:
        with running(joined, seen) as query:
            caught_up(query)
            last = log.batch(5)
            caught_up(query)
    finally:
        spark.conf.unset("spark.sql.streaming.offsetLog.formatVersion")
    assert [row for rows in seen.rows for row in rows] == [1, 2, 3, 4]
    assert all(len(at) == 2 for _, at in seen.batches)
    assert seen.batches[-1][1] == [(last, 1, False)] * 2


def test_an_abort_unblocks(spark: SparkSession, root: Root) -> None:
    """Barrier 1 came on A, never comes on B, and is aborted: A goes on."""
    a, b = Log(root, "a"), Log(root, "b")
    a.batch(1, barrier_id=1)
    a.batch(2)
    b.batch(10)
    specs = [spec(root, log.channel) for log in (a, b)]
    seen = Recorder(root)
    with running(open_gate(spark, specs[0]).union(open_gate(spark, specs[1])), seen) as query:
        caught_up(query)
        assert seen.rows == [[1, 10]]
        abort(root, 1)
        caught_up(query, until=lambda: len(seen.rows) > 1)
    assert seen.rows == [[1, 10], [2]]


def test_limits_never_split_an_entry_and_partitions_split_a_batch(spark: SparkSession, root: Root) -> None:
    """Two entries a batch at most; a batch over the size of a partition is read by several tasks."""
    log = Log(root)
    for start in range(0, 50, 10):
        log.batch(*range(start, start + 10))
    seen = Recorder(root)
    frame = open_gate(spark, spec(root, log.channel, max_entries=2, partition_bytes=1))
    partitions = frame.select(F.concat_ws(":", F.spark_partition_id(), "n").alias("n"))
    with running(partitions, seen) as query:
        caught_up(query)
    assert [len(rows) for rows in seen.rows] == [20, 20, 10]
    assert {str(row).split(":")[0] for row in seen.rows[0]} == {"0", "1"}


def test_a_closed_input_unblocks_the_other_until_a_new_run(spark: SparkSession, root: Root) -> None:
    """An end marker closes the input for its run (P10); the next run reads on after it."""
    a, b = Log(root, "a"), Log(root, "b")
    a.batch(1, barrier_id=1)
    a.batch(2)
    b.batch(10)
    b.writer.commit_end()
    seen = Recorder(root)
    first = open_gate(spark, spec(root, a.channel)).union(open_gate(spark, spec(root, b.channel)))
    with running(first, seen) as query:
        caught_up(query)
        assert seen.rows == [[1, 10], [2]]
    Log(root, "b", run=2).batch(11)
    again = [open_gate(spark, spec(root, log.channel, run=RunId(2))) for log in (a, b)]
    with running(again[0].union(again[1]), seen) as query:
        caught_up(query)
    assert seen.rows[-1] == [11]


def test_entries_of_an_abandoned_attempt_are_not_read(spark: SparkSession, root: Root) -> None:
    """Attempt 2 branches off at the barrier: what attempt 1 wrote after it stays in the log."""
    log = Log(root)
    branch = log.batch(1, barrier_id=1)
    log.batch(666)
    Log(root, attempt=2, run=2).batch(2)
    path = (Branch(AttemptId(1), Version(branch)), Branch(AttemptId(2), None))
    seen = Recorder(root)
    with running(open_gate(spark, spec(root, log.channel, path=path, attempt=AttemptId(2))), seen) as query:
        caught_up(query)
    assert seen.rows == [[1], [2]]


def test_a_file_that_is_gone_fails_the_stage_with_its_name(spark: SparkSession, root: Root) -> None:
    log = Log(root)
    log.batch(1)
    (file,) = Path(root.path("channels/a.main/data")).rglob("*.parquet")
    file.unlink()
    with running(open_gate(spark, spec(root, log.channel)), Recorder(root)) as query:
        with pytest.raises(Exception, match=r"part-0.parquet of a channel cannot be read"):
            query.awaitTermination()


def test_gates_that_start_change_only_values_of_the_map_that_tasks_are_serialized_with(
    spark: SparkSession, root: Root
) -> None:
    """Spark sets variables of workers in it when a gate starts; tasks of other gates may be on their way."""
    log = Log(root)
    log.batch(1)
    session: Any = spark.newSession()
    with as_active(session):
        frame = open_gate(session, spec(root, log.channel))
    sources = session._jsparkSession.sessionState().dataSourceManager()
    variables = sources.lookupDataSource(FORMAT_NAME).dataSourceCls().envVars()
    before = set(variables)
    assert "SPARK_LOCAL_DIRS" not in session.sparkContext.environment
    seen = Recorder(root)
    with running(frame, seen) as query:
        caught_up(query, lambda: seen.rows == [[1]])
    assert variables["SPARK_LOCAL_DIRS"] != ""
    assert set(variables) == before
