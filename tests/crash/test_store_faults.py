"""A store that is slow, that hangs, or that answers after the fact.

| the store                    | promised                                                             |
|------------------------------|----------------------------------------------------------------------|
| commits and does not say so  | the commit is known again by its token: nothing is written twice     |
| … and cannot be read either  | the stage fails and names the table; the next run goes on            |
| is slow                      | the job is slow                                                      |
| hangs where state is kept    | checkpoints expire, with that reason; rows keep coming meanwhile     |
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_abs.errors import AbortReason
from spark_abs.store.history import History, HistoryEvent
from tests.crash.facts import SINKS, check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

RETAINED = 10
"""Batches whose state Spark keeps: a capture may fall behind by half of that before its stage waits."""


@pytest.fixture
def job(first: DriverProcess, tmp_path: Path) -> Small:
    return Small(tmp_path)


def test_a_commit_whose_reply_is_lost_is_found_again(job: Small, first: DriverProcess) -> None:
    first.store("lost", str(job.base), every=2)
    job.start(first)
    job.run_until(first, lambda: len(job.completed()) >= 2 and touched(first) >= EVERYWHERE, "lost replies")
    first.store(None)
    job.stop(first)
    check(job.base)
    job.finish(first)
    check_complete(job.base, job.files)


EVERYWHERE = {*SINKS, "events.main", "events.orders", "pair.main", "control", "checkpoints", "state"}


def test_a_commit_that_cannot_be_read_back_fails_the_stage_and_the_next_run_goes_on(
    job: Small, first: DriverProcess
) -> None:
    job.start(first)
    job.run_until(first, lambda: bool(job.completed()), "a checkpoint")
    first.store("blind", str(job.base / "pairs"))
    first.wait_for(lambda: first.ended(job.base) is not None, "the end", job.feed)
    first.store(None)
    assert first.ended(job.base) == "StageFailed"
    assert "stage 'pair' failed in batch" in first.message(job.base)
    assert "CommitStateUnknown: the store did not confirm version" in first.message(job.base)
    assert str(job.base / "pairs") in first.message(job.base)
    check(job.base)
    job.finish(first)
    check_complete(job.base, job.files)


def test_while_the_store_of_state_hangs_checkpoints_expire_and_rows_keep_coming(
    job: Small, first: DriverProcess
) -> None:
    job.start(
        first,
        checkpoint={"timeout": "5s"},
        spark={"spark.sql.streaming.minBatchesToRetain": str(RETAINED)},
    )
    job.run_until(first, lambda: bool(job.completed()), "a checkpoint")
    first.store("hang", str(job.root.at("state")).removeprefix("file://"))
    job.run_until(first, lambda: len(expired(job)) >= 2, "checkpoints that expire")
    completed, newest, files = job.completed(), job.newest(), job.files
    job.run_until(first, lambda: job.files >= files + 2 * RETAINED, "rows to keep coming")
    assert job.completed() == completed

    first.store("slow", str(job.base))
    job.run_until(first, lambda: job.newest() > newest, "a checkpoint on the slow store")
    first.store(None)
    job.stop(first)
    check(job.base)
    job.finish(first)
    check_complete(job.base, job.files)


def expired(job: Small) -> list[int]:
    rows = History(job.root).read().to_pylist()
    reason = AbortReason.EXPIRED.value
    return [r["checkpoint"] for r in rows if r["event"] == HistoryEvent.ABORTED and r["reason"] == reason]


def touched(driver: DriverProcess) -> set[str]:
    """Return the tables to which the store has done something."""
    return {Path(event["faulty"]).name for event in driver.told if "faulty" in event}
