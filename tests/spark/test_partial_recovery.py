"""One stage fails and comes back alone; the others do not notice (P18)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_abs.store.history import HistoryEvent
from tests.job_support import events, eventually
from tests.spark.conftest import Start
from tests.spark.test_job_life import Line


class Failing:
    """A probe that raises at a point so many times, from when it is told to."""

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
    """It fails behind the commit of its table, and takes the barrier that came meanwhile."""
    line.probe = failing = Failing("batch.twice.commit-twice.after")
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
