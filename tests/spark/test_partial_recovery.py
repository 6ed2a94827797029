"""One stage fails, or loses its native checkpoint, and comes back alone; the others do not notice (P18)."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_abs.job import Job
from spark_abs.model import MAIN_OUTPUT, StageId
from spark_abs.plan.specs import Output
from spark_abs.run.run import Run
from spark_abs.spark.driver import close_state_stores
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import Feed, assert_tables_at_every_cut, events, eventually, newest_data
from tests.spark.conftest import Start
from tests.spark.shapes import OUTER, SCHEMA, clicks_of, orders_of
from tests.spark.test_job_life import Line


class Failing:
    """A failpoint that raises at a point so many times, from when it is told to."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.times = 0
        self.raised = 0

    def __call__(self, point: str) -> None:
        if point == self.point and self.raised < self.times:
            self.raised += 1
            raise OSError(f"no luck {self.raised}")


@pytest.fixture
def line(spark: SparkSession, tmp_path: Path) -> Line:
    return Line(spark, tmp_path)


def test_a_stage_that_fails_twice_comes_back_alone_also_with_a_checkpoint_under_way(
    line: Line, start: Start
) -> None:
    """It fails after the commit of its table, and takes the barrier that came meanwhile."""
    line.failpoint = failing = Failing("batch.twice.commit-twice.after")
    line.write(2)
    run = start(line.job(restart_strategy="fixed-delay", restart_delay="100ms"))
    eventually(run, line.has_all, "the first rows through")
    before = {name: run.query(name).runId for name in ("numbers", "twice")}

    failing.times = 2
    line.write(1)
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(run.checkpoint)
        eventually(run, lambda: failing.raised == 2, "two failures")
        line.write(2)
        eventually(run, line.has_all, "rows through after two restarts")
        assert checkpoint.result(120) == 1
    assert run.query("numbers").runId == before["numbers"]
    assert run.query("twice").runId != before["twice"]
    eventually(run, lambda: events(line.root, HistoryEvent.STAGE_RESTARTED)[1:], "two events")
    told = events(line.root, HistoryEvent.STAGE_RESTARTED)[:2]
    assert [(e["stage"], e["restarts"], e["detail"]) for e in told] == [
        ("twice", 1, "OSError: no luck 1"),
        ("twice", 2, "OSError: no luck 2"),
    ]
    assert len({e["batch"] for e in told}) == 1

    run.stop()
    line.assert_all_once()
    line.assert_cuts()


def test_stages_without_their_native_checkpoints_are_rebuilt_alone(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A stateful join and a leaf after it repeat their batches and go on; sources do not notice.

    The rebuilding ends in the middle the first time; the next start goes on with it.
    """
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    feeds = {name: Feed(spark, tmp_path / name, SCHEMA) for name in ("clicks", "orders")}
    failing = Failing("rebuild.outer_join.batch.after")

    def feed(files: int) -> None:
        for _ in range(files):
            number = len(feeds["clicks"].files)
            feeds["clicks"].write(*clicks_of(number))
            feeds["orders"].write(*orders_of(number))

    def declare() -> Job:
        job = Job("rebuilt", root=root, spark=spark, interval="1h", keep=1000)
        job.failpoint = failing
        clicks, orders = (job.source(name, given.stream()) for name, given in feeds.items())
        OUTER.add(job, clicks, orders, tables)
        joined = Output(job, StageId("outer_join"), MAIN_OUTPUT)
        job.sink("last", job.stage("last", [joined], lambda frame: frame), table=str(tables / "last"))
        return job

    def read_all(run: Run) -> None:
        for stage in ("clicks", "orders", "outer_join", "last"):
            run.query(stage).processAllAvailable()

    feed(3)
    run = start(declare())
    read_all(run)
    run.checkpoint()
    feed(3)
    read_all(run)
    run.stop()
    natives = Path(root, "native/1")
    sources = [p for stage in ("clicks", "orders") for p in (natives / stage).rglob("*")]
    untouched = {path: path.stat().st_ctime_ns for path in sources}
    written = {name: newest_data(tables / name) for name in ("outer_join", "last")}
    # Spark uploads snapshots of a stopped query later, into what is lost by then.
    close_state_stores(spark._jvm)
    for lost in written:
        shutil.rmtree(natives / lost)

    failing.times = 1
    with pytest.raises(OSError, match="no luck 1"):
        start(declare())
    record = Control.open(Root(root)).state.attempt.rebuilt_stage(StageId("outer_join"))
    assert record is not None
    assert (record.number, record.checkpoint, record.done) == (2, 1, False)
    assert {path: path.stat().st_ctime_ns for path in untouched} == untouched

    failing.point = "start.clicks.query.after"
    failing.times = 2
    with pytest.raises(OSError, match="no luck 2"):
        start(declare())
    told = events(root, HistoryEvent.STAGE_REBUILT)
    assert [(e["stage"], e["checkpoint"]) for e in told] == [("outer_join", 1), ("last", 1)]
    assert {name: newest_data(tables / name) for name in written} == written
    assert not any((natives / lost).exists() for lost in written)

    feed(2)
    run = start(declare())
    read_all(run)
    end = run.stop(savepoint="end")
    (query,) = OUTER.queries.values()
    found = assert_tables_at_every_cut(spark, root, feeds, dict.fromkeys(written, query), tables)
    assert (found[-1].id, len(events(root, HistoryEvent.STAGE_REBUILT))) == (end, 2)
    assert sum(stage.dropped_late for manifest in found for stage in manifest.stages) == 0
