"""A job with a stateful Python function is killed between the commits of its state and of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

POINTS = ("batch.tail.files.after@later", "batch.tail.handover.after@later")
"""Its state is written and its rows are not; its rows are committed and Spark does not know that yet."""


def test_killed_while_a_function_is_at_work_and_started_again(first: DriverProcess, tmp_path: Path) -> None:
    jobs = {point: Small(tmp_path / str(number)) for number, point in enumerate(POINTS)}
    for job in jobs.values():
        job.feed()
    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = ({"base": str(job.base), "points": [point], "in_python": True} for point, job in jobs.items())
        doomed.start(*lives, then="kill")

        def feed() -> None:
            for job in jobs.values():
                job.feed()

        doomed.wait_for_end("the end in the middle of a batch", feed)
        assert [doomed.at(job.base) for job in jobs.values()] == [[point] for point in POINTS], doomed.told

    for job in jobs.values():
        check(job.base)
        job.finish(first, in_python=True)
        check_complete(job.base, job.files)
