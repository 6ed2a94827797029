"""A job is killed at the commits of Delta tables: merged, overwritten, and after checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.crash.expected import events_of, pairs_of, totals_of
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

BATCHES = ("batch.tail.commit-merged.after@later", "batch.every.commit-every.after@later")
"""Delta has the batch, and Spark does not know that yet: it comes again."""
EPOCHS = ("send.shown.rows.after@later", "send.shown.commit.after@later", "send.latest.commit.after@later")
"""An epoch is written and not committed, or committed and not known to be."""


def kill_at(points: Sequence[str], tmp_path: Path, **options: bool) -> list[Small]:
    """Start a job for each point in one process, which is killed when all of them are there."""
    jobs = [Small(tmp_path / str(number)) for number, _ in enumerate(points)]
    for job in jobs:
        job.feed()
    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = (
            {"base": str(job.base), "points": [point], **options}
            for point, job in zip(points, jobs, strict=True)
        )
        doomed.start(*lives, then="kill")

        def feed() -> None:
            for job in jobs:
                job.feed()

        doomed.wait_for_end("the end at a commit", feed)
        assert [doomed.at(job.base) for job in jobs] == [[point] for point in points], doomed.told
    return jobs


def require_totals(job: Small, *tables: str, fifth: bool = True) -> None:
    """Require that tables have one row of each key, with what all the input comes to.

    Without each `fifth`: a key is deleted while its number is a multiple of five.
    """
    events = [event for file in range(job.files) for event in events_of(file)]
    totals = totals_of(pairs_of(events).elements())
    expected = {key: (n, total) for key, n, total in totals if fifth or n % 5}
    for table in tables:
        rows = DeltaTable(str(job.base / table)).to_pyarrow_table().to_pylist()
        assert {row["key"]: (row["n"], row["total"]) for row in rows} == expected, table
        assert len(rows) == len(expected)


def test_killed_between_the_commits_of_tables_and_started_again(first: DriverProcess, tmp_path: Path) -> None:
    for job in kill_at(BATCHES, tmp_path, kinds=True):
        check(job.base)
        job.finish(first, kinds=True)
        check_complete(job.base, job.files)
        require_totals(job, "merged", fifth=False)
        require_totals(job, "every")


@pytest.mark.long
def test_killed_while_tables_move_to_a_checkpoint_and_started_again(
    first: DriverProcess, tmp_path: Path
) -> None:
    for job in kill_at(EPOCHS, tmp_path, shown=True):
        check(job.base)
        job.finish(first, shown=True)
        check_complete(job.base, job.files)
        require_totals(job, "latest")
        both = (DeltaTable(str(job.base / name)).to_pyarrow_table() for name in ("shown", "arrivals"))
        shown, arrived = (table.sort_by("token") for table in both)
        assert shown.to_pydict() == arrived.select(shown.column_names).to_pydict()
