"""One job history walks all fault points: killed at each, started again, nothing lost and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pytest

import spark_abs
from spark_abs.manifest import Manifest
from spark_abs.store.control import Control
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.points import ONE_BY_ONE, Round, histories
from tests.crash.process import DriverProcess
from tests.crash.restorer import kill_restore, points

pytestmark = [pytest.mark.timeout(36_000 if ONE_BY_ONE else 1800), pytest.mark.long]


@dataclass(slots=True)
class History:
    """A job, and where each of its lives ends."""

    job: Small
    rounds: list[Round]


@dataclass(frozen=True, slots=True)
class Survivors:
    """What is left when all lives are over: the jobs, and a process that nobody kills."""

    jobs: list[Small]
    driver: DriverProcess


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivors]:
    """Every job walks its points, several jobs in a process; the next process comes up meanwhile.

    After each death the invariants are checked on what the dead have left.
    """
    base = tmp_path_factory.mktemp("history")
    walks = [History(Small(base / f"job-{n}"), rounds) for n, rounds in enumerate(histories())]
    driver = DriverProcess(base / "life-0")
    for life in range(max(len(walk.rounds) for walk in walks)):
        now = [(walk.job, walk.rounds[life]) for walk in walks if life < len(walk.rounds)]
        with driver, ExitStack() as coming:
            driver.wait_ready()
            driver.start(
                *({"base": str(j.base), "points": list(r.points), **r.options} for j, r in now), then="kill"
            )
            driver.wait_for(
                partial(_under_way, driver, now), "all jobs to start", partial(_live, driver, now)
            )
            following = coming.enter_context(DriverProcess(base / f"life-{life + 1}"))
            driver.wait_for_end(f"the end of life {life}", partial(_live, driver, now))
            for job, step in now:
                assert driver.at(job.base) == list(step.points), driver.told
                check(job.base)
            coming.pop_all()
        driver = following
    with driver:
        driver.wait_ready()
        yield Survivors([walk.job for walk in walks], driver)


def _under_way(driver: DriverProcess, now: list[tuple[Small, Round]]) -> bool:
    """Say whether every job has started, or has come to where it is killed."""
    return driver.over or all(driver.has_started(job.base) or driver.at(job.base) for job, _ in now)


def _live(driver: DriverProcess, now: list[tuple[Small, Round]]) -> None:
    for job, step in now:
        driver.require_running(job.base)
        at = driver.at(job.base)
        if at != list(step.points) and (at or not step.quiet):
            job.feed()


def test_killed_at_every_step_of_a_restore_and_started_instead_it_is_refused_until_it_is_done(
    survivors: Survivors,
) -> None:
    """The restore is killed at its first step, again from the start at its second, and so on to its end."""
    job, driver = survivors.jobs[0], survivors.driver
    target = oldest(job)
    names = points(job.root.uri, target.id)
    for point in names:
        kill_restore(job.root.uri, target.id, point)
        check(job.base)
        state = Control.open(job.root).state
        assert state.attempt.ready == (point in (names[0], names[-1]))
        if not state.attempt.ready:
            job.start(driver)
            assert job.end(driver) == "AttemptNotReady", driver.told
        if ONE_BY_ONE:
            spark_abs.open(job.root.uri).restore(target.id)
            assert job.rows() == job.rows(target)
            job.finish(driver)
            check_complete(job.base, job.files)
            target = oldest(job)
    if not ONE_BY_ONE:
        assert job.rows() == job.rows(target)


def oldest(job: Small) -> Manifest:
    """Return the oldest checkpoint of the current path that is left."""
    state = Control.open(job.root).state
    return next(m for m in job.completed() if state.on_path(m.attempt, m.id))


def test_after_all_these_deaths_all_input_has_come_through_once(survivors: Survivors) -> None:
    driver = survivors.driver
    driver.start(*({"base": str(job.base), "available_now": True} for job in survivors.jobs))
    driver.wait_for(
        lambda: all(driver.ended(job.base) is not None for job in survivors.jobs), "bounded runs to end"
    )
    for job in survivors.jobs:
        assert driver.ended(job.base) == "", driver.told
        check_complete(job.base, job.files)
