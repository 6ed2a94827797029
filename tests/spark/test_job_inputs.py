"""Stages with inputs of several kinds and speeds, and sinks that are functions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import AbortReason, GraphError, Refused, UsageError
from spark_abs.job import Job
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.model import StageId
from spark_abs.observe.listing import event_rows
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import (
    Feed,
    assert_tables_at_every_cut,
    caught_up,
    checked,
    eventually,
    files_read,
    hold_until,
    read_table,
    version_of,
)
from tests.spark.conftest import Start

NUMBERS = "id long"


def numbers(*values: int) -> list[dict[str, object]]:
    return [{"id": value} for value in values]


def test_a_mixed_stage_with_a_static_table_and_a_sink_that_is_a_function(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A channel, a native stream and a Delta table, which stays as it was; at last the inputs are bounded."""
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    near, far = Feed(spark, tmp_path / "near", NUMBERS), Feed(spark, tmp_path / "far", NUMBERS)
    names = tmp_path / "names"
    for rest, name in enumerate(("even", "odd")):
        frame = spark.createDataFrame([(name, rest)], "name string, rest int")
        frame.write.format("delta").mode("append").save(str(names))
    handed: dict[int, tuple[spark_abs.Current, list[int]]] = {}

    def hand(batch: DataFrame, number: int) -> None:
        handed[number] = (spark_abs.current(), [row.id for row in batch.collect()])

    def mix(one: DataFrame, two: DataFrame, three: DataFrame) -> DataFrame:
        return one.union(two).join(F.broadcast(three), F.expr("id % 2 = rest")).select("id", "name")

    job = Job("mixed", root=root, spark=spark, interval="1s", keep=1000)
    source = job.source("near", near.stream())
    static = spark.read.format("delta").load(str(names))
    mixed = job.stage(
        "far",
        [source, far.stream(), static],
        mix,
        outputs={"odd": lambda batch: batch.where("name = 'odd'").select("id")},
    )
    job.sink("mixed", mixed, table=str(tables / "mixed"))
    job.sink("handed", mixed["odd"], foreach_batch=hand)

    near.write(*numbers(1, 2, 3))
    far.write(*numbers(101, 102))
    run = start(job)
    feeds = {"near": near, "far": far}
    eventually(run, lambda: caught_up(root, feeds), "a checkpoint after the first files")
    spark.sql(f"DELETE FROM delta.`{names}` WHERE rest = 0")
    for number in (4, 7):
        near.write(*numbers(number, number + 1, number + 2))
        far.write(*numbers(100 + number))
    eventually(run, lambda: caught_up(root, feeds), "a checkpoint after all files")
    run.stop()
    near.write(*numbers(10, 11))
    far.write(*numbers(110))
    assert start(job, available_now=True).await_termination(120)

    found = assert_tables_at_every_cut(
        spark,
        root,
        feeds,
        {
            "mixed": """
                SELECT checkpoint, id, IF(id % 2 = 0, 'even', 'odd') AS name
                FROM (SELECT checkpoint, id FROM near UNION ALL SELECT checkpoint, id FROM far)"""
        },
        tables,
    )
    for manifest in found:
        stage = stage_of(manifest, "far")
        assert dict(stage.static_tables) == {f"file:{names}": 1}
        rows = [row for batch, (_, rows) in handed.items() if batch <= stage.cut_batch for row in rows]
        there = read_table(tables / "mixed", version_of(manifest, "mixed"))
        assert sorted(rows) == sorted(n for n in there["id"].to_pylist() if n % 2)
        assert [o.version for o in stage.outputs if o.output == "handed"] == [None]
    batch, (current, _) = max(handed.items())
    identity = Control.open(Root(root)).state.root
    assert (current.job, current.stage, current.attempt, current.run) == ("mixed", "far", 1, 2)
    assert (current.batch, current.app_id) == (batch, f"mixed#{identity}/far/handed@1")
    epochs = [handed[number][0].epoch for number in sorted(handed)]
    assert epochs == sorted(epochs)
    assert 0 < current.epoch <= found[-1].id
    assert [files_read(found[-1], name) for name in feeds] == [4, 4]
    with pytest.raises(UsageError, match="only inside a sink function"):
        spark_abs.current()


def test_a_static_table_that_could_change_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Out of reach of `Job.stage`, in a closure or below a filter, a table must be read at a version."""
    table = str(tmp_path / "names")
    spark.createDataFrame([("odd", 1)], "name string, rest long").write.format("delta").save(table)

    def job_with(names: DataFrame) -> Job:
        job = Job("closure", root=str(tmp_path / "root"), spark=spark)
        ticks = job.source("ticks", rate(spark))
        job.stage("named", [ticks], lambda frame: frame.join(names, F.expr("value = rest")))
        return job

    moving = spark.read.format("delta").load(table)
    with pytest.raises(GraphError, match=r"stage 'named' reads the Delta table .*names.* versionAsOf"):
        job_with(moving.where("rest = 1")).start()
    fixed = spark.read.format("delta").option("versionAsOf", 0).load(table)
    job = job_with(fixed.where("rest = 1"))
    job.stage("again", [moving.alias("n"), job.source("tocks", rate(spark))], by_name)
    plans, _ = checked(job)
    assert [dict(plans[StageId(name)].static_tables) for name in ("named", "again")] == [
        {f"file:{table}": 0}
    ] * 2


def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


def by_name(names: DataFrame, ticks: DataFrame) -> DataFrame:
    return ticks.join(names, F.expr("value = n.rest"))


def stage_of(manifest: Manifest, name: str) -> StageSnapshot:
    found = manifest.stage(StageId(name))
    assert found is not None
    return found


def test_inputs_of_unequal_speeds_are_one_cut_and_a_silent_one_blocks_nobody(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """One input has 50 entries where the other has one; then one is silent, and no barrier follows (P4).

    The first savepoint is older than the first file of the slow one: after it that stage begins again.
    """
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    fast, slow = Feed(spark, tmp_path / "fast", NUMBERS), Feed(spark, tmp_path / "slow", NUMBERS)
    feeds = {"fast": fast, "slow": slow}

    def declare() -> Job:
        job = Job("speeds", root=root, spark=spark, interval="1h", keep=1000)
        inputs = [job.source("fast", fast.stream()), job.source("slow", slow.stream())]
        both = job.stage("both", inputs, lambda one, two: one.union(two))
        job.sink("both", both, table=str(tables / "both"))
        return job

    def assert_cuts() -> tuple[Manifest, ...]:
        both = "SELECT checkpoint, id FROM fast UNION ALL SELECT checkpoint, id FROM slow"
        return assert_tables_at_every_cut(spark, root, feeds, {"both": both}, tables)

    fast.write_all(numbers(n) for n in range(1, 51))
    run = start(declare())
    run.savepoint("early")
    slow.write(*numbers(0))
    while not caught_up(root, feeds):
        run.checkpoint(timeout=120)
    claimed = Control.open(Root(root)).state.last_claimed

    fast.write(*numbers(51))
    fast.write(*numbers(52))
    eventually(run, lambda: read_table(tables / "both").num_rows == 53, "rows after the last barrier through")
    assert Control.open(Root(root)).state.last_claimed == claimed
    run.stop()
    early, *later = assert_cuts()
    assert_figures(Root(root))
    assert (files_read(early, "slow"), stage_of(early, "slow").cut_batch) == (0, -1)
    assert 0 < files_read(later[0], "fast") < 50

    spark_abs.open(root, spark).restore("early")
    run = start(declare(), available_now=True)
    assert run.await_termination(120)
    assert sorted(read_table(tables / "both")["id"].to_pylist()) == list(range(53))
    assert assert_cuts()[-1].attempt == 2


def assert_figures(root: Root) -> None:
    """Each completed checkpoint of three stages has a row of each, and one of all (P20)."""
    events, before = event_rows(root), None
    for whole in [e for e in events if e.event is HistoryEvent.COMPLETED]:
        stages = [
            e for e in events if (e.checkpoint, e.event) == (whole.checkpoint, HistoryEvent.STAGE_ACKED)
        ]
        assert sorted(e.stage for e in stages if e.stage) == ["both", "fast", "slow"]
        assert (whole.acks, whole.stages) == (3, 3)
        assert all((e.duration_ms or 0) >= (e.start_delay_ms or 0) + (e.alignment_ms or 0) for e in stages)
        assert max(e.at_ms for e in stages) <= whole.at_ms
        assert (whole.last_completed_age_ms is None) == (before is None)
        before = whole


def test_a_checkpoint_that_expires_lets_a_blocked_input_go(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """One input is at the barrier and the other cannot reach it: its abort unblocks the first (P3, P8).

    `history/` says who was waited for (P20).
    """
    root, table = str(tmp_path / "root"), tmp_path / "table"
    fast, slow = Feed(spark, tmp_path / "fast", NUMBERS), Feed(spark, tmp_path / "slow", NUMBERS)
    rows = partial(rows_if_any, table)
    hold = hold_until("batch.slow.files.before", lambda: rows() == [1, 2])
    job = Job("expiry", root=root, spark=spark, interval="1h", timeout="5s", poll_interval="0ms")
    job.failpoint = hold
    inputs = [job.source("fast", fast.stream()), job.source("slow", slow.stream())]
    job.sink("both", job.stage("both", inputs, lambda one, two: one.union(two)), table=str(table))
    slow.write(*numbers(0))
    fast.write(*numbers(1))
    run = start(job)
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(run.checkpoint)
        log = tmp_path / "root" / "channels" / "fast.main" / "_delta_log"
        eventually(run, lambda: has_barrier(log), "its barrier is in the channel, before the next row")
        fast.write(*numbers(2))
        with pytest.raises(Refused, match=r"expired, after 5000 ms without .*slow"):
            checkpoint.result()
    eventually(run, lambda: rows() == [0, 1, 2], "all rows through")
    run.stop()
    assert {a.id: a.reason for a in Control.open(Root(root)).state.aborted} == {1: AbortReason.EXPIRED}
    events = event_rows(Root(root))
    acked = {e.stage for e in events if e.event is HistoryEvent.STAGE_ACKED}
    waited = {e.stage: e for e in events if e.event is HistoryEvent.STAGE_WAITING}
    assert acked | waited.keys() == {"fast", "slow", "both"}
    both, held = waited[StageId("both")], waited[StageId("slow")]
    assert both.detail == "the barrier has not come out of slow.main"
    assert both.alignment_ms is not None
    assert both.alignment_ms + (both.start_delay_ms or 0) == both.duration_ms
    assert held.alignment_ms is None
    assert held.start_delay_ms == held.duration_ms
    (end,) = [e for e in events if e.event is HistoryEvent.ABORTED]
    assert (end.reason, end.acks, end.stages, end.last_completed_age_ms) == ("expired", len(acked), 3, None)


def has_barrier(log: Path) -> bool:
    return any('\\"barrier\\":{' in commit.read_text() for commit in log.glob("*.json"))


def rows_if_any(table: Path) -> list[int]:
    return sorted(read_table(table)["id"].to_pylist()) if (table / "_delta_log").exists() else []
