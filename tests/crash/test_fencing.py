"""A run that was replaced writes nothing more, however late it wakes up."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import spark_abs
from spark_abs.protocol.control import Run
from spark_abs.store.control import Control
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)


def test_a_driver_frozen_before_its_commits_and_replaced_by_a_restore_commits_nothing(
    first: DriverProcess, second: DriverProcess, tmp_path: Path
) -> None:
    """One job is frozen before the commits of three stages, another before it commits a manifest."""
    batches, outcome = Small(tmp_path / "batches"), Small(tmp_path / "outcome")
    points = {
        batches.base: ["batch.tail.files.after@later", "batch.pair.files.after", "batch.events.files.after"],
        outcome.base: ["manifest.before@later"],
    }

    def feed() -> None:
        for job in (batches, outcome):
            first.require_running(job.base)
            job.feed()

    feed()  # a stream needs a directory to read
    first.start(*({"base": str(base), "points": walk} for base, walk in points.items()))
    first.wait_for(lambda: all(first.at(b) == walk for b, walk in points.items()), "threads to park", feed)
    first.signal(signal.SIGSTOP)

    # Somebody believes it dead, goes back to the newest checkpoint, and runs on from there.
    for job in (batches, outcome):
        spark_abs.open(job.root.uri).restore("latest", force=True)
        job.start(second)
        job.run_until(
            second,
            lambda job=job: sum(m.attempt == 2 for m in job.completed()) >= 2,  # type: ignore[misc]
            "checkpoints of the restored attempt",
        )
    before = {job.base: job.completed() for job in (batches, outcome)}

    # It was not dead: it goes on with what it was about to commit.
    first.signal(signal.SIGCONT)
    first.go()
    assert batches.end(first) == "Fenced"
    assert outcome.end(first) == "Fenced"
    for job in (batches, outcome):
        job.stop(second)
        check(job.base)
        late = {m.id for m in job.completed() if m.attempt == 1} - {m.id for m in before[job.base]}
        assert not late
        job.finish(second)
        check_complete(job.base, job.files)


def test_a_second_start_is_refused_and_with_takeover_fences_the_first(
    first: DriverProcess, second: DriverProcess, tmp_path: Path
) -> None:
    job = Small(tmp_path)
    job.start(first)
    job.run_until(first, lambda: bool(job.completed()), "a checkpoint")

    job.start(second)
    assert job.end(second) == "RunAlive"
    first.require_running(job.base)

    job.start(second, takeover=True)
    assert job.end(first) == "Fenced"
    job.run_until(second, lambda: any(m.run == _newest(job).id for m in job.completed()), "a checkpoint")
    job.stop(second)
    check(job.base)
    job.finish(second)
    check_complete(job.base, job.files)


def test_a_driver_frozen_and_taken_over_without_a_restore_harms_nothing_when_it_wakes_up(
    first: DriverProcess, second: DriverProcess, tmp_path: Path
) -> None:
    """Both runs have one native directory: what the woken one does there must not stop the new one."""
    job = Small(tmp_path)
    walk = ["batch.tail.files.after@later", "batch.pair.handover.before", "batch.events.files.before"]
    job.start(first, points=walk)
    job.run_until(first, lambda: first.at(job.base) == walk, "threads to park")
    first.signal(signal.SIGSTOP)

    job.start(second, takeover=True, config={"run": {"leaseTimeout": "1s"}})
    _two_more(job, second)

    first.signal(signal.SIGCONT)
    first.go()
    assert job.end(first) == "Fenced"
    _two_more(job, second)
    job.stop(second)
    check(job.base)
    job.finish(second)
    check_complete(job.base, job.files)


def _two_more(job: Small, driver: DriverProcess) -> None:
    """Older ones are retired meanwhile: their number says nothing."""
    newest = max(m.id for m in job.completed())
    job.run_until(driver, lambda: sum(m.id > newest for m in job.completed()) >= 2, "two more checkpoints")


def _newest(job: Small) -> Run:
    run = Control.open(job.root).state.run
    assert run is not None
    return run
