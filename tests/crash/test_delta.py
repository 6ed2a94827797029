"""A job is killed at the commits of Delta tables: merged, overwritten, and behind checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.crash.expected import events_of, pairs_of, totals_of
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

POINTS = (
    "batch.tail.commit-merged.after@later",
    "batch.every.commit-every.after@later",
    "send.shown.rows.after@later",
    "send.shown.commit.after@later",
    "send.latest.commit.after@later",
)
"""Delta has the batch, and Spark does not know that yet: it comes again. Or an epoch is written and not
committed, or committed and not known to be."""


def test_killed_between_the_commits_of_tables_and_started_again(first: DriverProcess, tmp_path: Path) -> None:
    jobs = {point: Small(tmp_path / str(number)) for number, point in enumerate(POINTS)}
    for job in jobs.values():
        job.feed()
    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = ({"base": str(job.base), "points": [point], "kinds": True} for point, job in jobs.items())
        doomed.start(*lives, then="kill")

        def feed() -> None:
            for job in jobs.values():
                job.feed()

        doomed.wait_for_end("the end at a commit", feed)
        assert [doomed.at(job.base) for job in jobs.values()] == [[point] for point in POINTS], doomed.told

    for job in jobs.values():
        check(job.base)
        job.finish(first, kinds=True)
        check_complete(job.base, job.files)
        events = [event for file in range(job.files) for event in events_of(file)]
        expected = {key: (n, total) for key, n, total in totals_of(pairs_of(events).elements())}
        for table in ("merged", "every", "latest"):
            rows = DeltaTable(str(job.base / table)).to_pyarrow_table().to_pylist()
            assert {row["key"]: (row["n"], row["total"]) for row in rows} == expected, table
            assert len(rows) == len(expected)
        both = (DeltaTable(str(job.base / name)).to_pyarrow_table() for name in ("shown", "arrivals"))
        shown, arrived = (table.sort_by("id") for table in both)
        assert shown.to_pydict() == arrived.select(shown.column_names).to_pydict()
