"""The attribution job on a standalone cluster: what it writes is what a batch query over the input says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from deltalake import DeltaTable

import oracle
from generate_events import START, USUAL, write_file
from tests.crash.cluster import Cluster, Process

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

FILES = 80
AT_ONCE = 16
"""Files that the first driver finds."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=2) as cluster:
        yield cluster


@dataclass
class Job:
    """The job's input, and what its root says."""

    base: Path
    files: int = 0

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            for kind in ("clicks", "orders"):
                write_file(self.base / "input", kind, number, "json", USUAL.file(kind, number))
            self.files = number + 1

    def completed(self) -> list[int]:
        """The ids of the checkpoints that are there, ascending."""
        path = str(self.base / "root" / "checkpoints")
        if not DeltaTable.is_deltatable(path):
            return []
        return sorted(DeltaTable(path).to_pyarrow_table(columns=["id"])["id"].to_pylist())

    def wait_for_checkpoints(self, driver: Process, more: int, until: int) -> None:
        """Wait for further checkpoints, while files arrive until there are so many."""
        before = max(self.completed(), default=0)

        def enough() -> bool:
            self.feed(min(1, until - self.files))
            return sum(number > before for number in self.completed()) >= more

        driver.wait_for(enough, f"{more} checkpoints after {before}")

    def at_work(self) -> bool:
        """Whether a batch of the join is planned and not finished."""
        native = self.base / "root" / "native" / "1" / "match"
        planned, finished = (
            max((int(p.name) for p in (native / log).glob("*") if p.name.isdigit()), default=-1)
            for log in ("offsets", "commits")
        )
        return planned > finished


def test_nothing_is_lost_or_there_twice_when_a_worker_and_then_the_driver_are_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    """spark_abs comes by `--py-files` only. A worker dies in mid-batch, the driver later; back, and on."""
    assert "No module named 'spark_abs'" in cluster.python("-c", "import spark_abs").stderr
    job = Job(tmp_path / "base")
    job.feed(AT_ONCE)

    driver = cluster.submit(job.base)
    job.wait_for_checkpoints(driver, 2, until=30)
    driver.wait_for(job.at_work, "a batch to be under way")
    cluster.workers[0].kill()
    driver.wait_for(lambda: "Lost executor" in driver.says(), "the loss to be seen")
    job.wait_for_checkpoints(driver, 2, until=50)
    driver.kill()

    goal = job.completed()[1]
    assert goal < job.completed()[-1]
    way_back = ("restore", str(job.base / "root"), "--to", str(goal), "--yes")
    subprocess.run([sys.executable, "-m", "spark_abs", *way_back], check=True)
    job.feed(FILES - job.files)
    driver = cluster.submit(job.base, "--available-now")
    assert driver.end() == 0, driver.tail()
    assert not list((job.base / "root" / "native").glob("*/*/offsets/.*.crc"))

    end = pd.Timestamp(START) + pd.Timedelta(seconds=FILES * USUAL.slice_seconds)
    # What is behind the watermark of the last stage is out: its delay, and one batch that it runs behind.
    cutoff = end - pd.Timedelta(minutes=4)
    tables = oracle.compare(job.base, cutoff, pd.Timedelta("60s"), pd.Timedelta("1min"))
    assert [(table.lost, table.extra) for table in tables] == [(0, 0), (0, 0)]
    assert all(table.expected > 0 for table in tables)
