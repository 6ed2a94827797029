"""SIGKILL at each step of a start that changes a job; then it is started again, restored, and goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

import spark_abs
from tests.crash.expected import events_of, write_file
from tests.crash.facts import check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

POINTS = (
    "start.abort.after",
    "change.pair.write.before",
    "change.pair.write.after",
    "change.record.after",
    "start.channels.after",
    "batch.through.commit-main.after",
    "start.through.query.after",  # last: whoever is held here keeps the queries of other jobs from starting
)
SOME = ("change.pair.write.after", "change.record.after")
KEPT = {"keep": 1000}
BEFORE, AFTER = 2, 1
"""Files that are read before the change, and after it."""


@pytest.mark.parametrize("points", [SOME, pytest.param(POINTS, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_changed_start_may_be_killed_anywhere(
    first: DriverProcess, tmp_path: Path, points: Sequence[str]
) -> None:
    """A stage is put before an input of the join, another reader is new."""
    jobs = [Small(tmp_path / str(number)) for number in range(len(points))]
    before = {}
    for job in jobs:
        for number in range(BEFORE):
            write_file(job.base, number)
        job.files = BEFORE
        job.finish(first, checkpoint=KEPT)
        before[job.base] = newest(job)
        for number in range(AFTER):
            write_file(job.base, BEFORE + number)
        job.files += AFTER
    with DriverProcess(tmp_path / "killed") as driver:
        driver.wait_ready()
        driver.start(
            *(
                {"base": str(job.base), "points": [point], "through": True, "checkpoint": KEPT}
                for job, point in zip(jobs, points, strict=True)
            ),
            then="kill",
        )
        driver.wait_for_end("the kill")
        assert [driver.at(job.base) for job in jobs] == [[point] for point in points]
    for job in jobs:
        job.finish(first, through=True, checkpoint=KEPT)
        check_complete(job.base, job.files)
        assert _beside(job.base) == _orders(BEFORE, BEFORE + AFTER)
    there = jobs[points.index("change.record.after")]
    changed = newest(there)
    spark_abs.open(str(there.root.uri)).restore(before[there.base])
    there.finish(first, checkpoint=KEPT)
    check_complete(there.base, there.files)
    for number in (before[there.base], changed):
        spark_abs.open(str(there.root.uri)).restore(number)
        there.finish(first, through=True, checkpoint=KEPT)
        check_complete(there.base, there.files)


def newest(job: Small) -> int:
    return max(manifest.id for manifest in job.completed())


def _beside(base: Path) -> Counter[int]:
    return Counter(DeltaTable(str(base / "beside")).to_pyarrow_table()["id"].to_pylist())


def _orders(start: int, stop: int) -> Counter[int]:
    events = (event for file in range(start, stop) for event in events_of(file))
    return Counter(event.id for event in events if event.kind == "order")
