"""Killed while barriers overtake data, started again, brought back to a checkpoint with data in flight."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import spark_abs
from spark_abs.manifest import Manifest
from spark_abs.model import CheckpointMode
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

KEEP_ALL = "1 1h:all"
"""Only the newest one keeps the rows of channels; of the others, rows in flight stay."""
AHEAD: dict[str, object] = {"checkpoint": {"mode": "unaligned", "keep": KEEP_ALL}}
OVERTAKEN: dict[str, object] = {"checkpoint": {"alignedTimeout": "1ms", "keep": KEEP_ALL}}
LIVES: dict[str, dict[str, object]] = {
    "agent.pair.commit-main.after": AHEAD,
    "overtake.after": OVERTAKEN,
}
"""A stage's barrier is out, and its cut is not handed over; gates have been let on."""


def flown(job: Small) -> list[Manifest]:
    """Return the checkpoints with rows in flight, or at least entries."""
    return [manifest for manifest in job.completed() if manifest.in_flight()]


def test_killed_while_barriers_overtake_and_started_again(first: DriverProcess, tmp_path: Path) -> None:
    """Every checkpoint is whole; one with data in flight comes back with nothing lost or twice (P16)."""
    jobs = {point: Small(tmp_path / point) for point in LIVES}
    for job in jobs.values():
        job.feed()

    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = ({"base": str(job.base), "points": [p], **LIVES[p]} for p, job in jobs.items())
        doomed.start(*lives, then="kill")

        def meanwhile() -> None:
            for job in jobs.values():
                doomed.require_running(job.base)
                job.feed()

        doomed.wait_for_end("the end of all", meanwhile)
        assert [doomed.at(job.base) for job in jobs.values()] == [[point] for point in LIVES], doomed.told

    for point, job in jobs.items():
        check(job.base)
        job.start(first, **LIVES[point])
        job.run_until(first, partial(_is_flown, first, job), "a checkpoint with data in flight")
        job.stop(first)
        check(job.base)

    job = jobs["agent.pair.commit-main.after"]
    target = max(flown(job), key=_length)
    assert target.mode is CheckpointMode.UNALIGNED
    spark_abs.open(job.root.uri).restore(target.id)
    assert job.rows() == job.rows(target)
    for point, job in jobs.items():
        job.finish(first, **LIVES[point])
        check_complete(job.base, job.files)


def _length(manifest: Manifest) -> int:
    """Return how many entries are in flight, over all inputs."""
    return sum(flight.until - flight.after for flight in manifest.in_flight())


def _is_flown(driver: DriverProcess, job: Small) -> bool:
    """Say whether the job has started, and has a checkpoint with data in flight."""
    return driver.has_started(job.base) and bool(flown(job))
