"""A stage's native checkpoint is lost, and whoever rebuilds it is killed in the middle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from spark_abs.model import StageId
from spark_abs.store.control import Control
from tests.crash.facts import check, check_complete, table
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

POINTS = ("rebuild.pair.write.after", "rebuild.pair.plan.after", "rebuild.pair.batch.after")
RARE = {"checkpoint": {"interval": "1h"}}


def test_killed_while_a_stage_is_rebuilt_and_started_again(first: DriverProcess, tmp_path: Path) -> None:
    """The join repeats its batches from the first on: no checkpoint was ever taken."""
    jobs = {point: Small(tmp_path / point) for point in POINTS}
    for job in jobs.values():
        job.start(first, **RARE)
        job.run_until(first, partial(_is_under_way, first, job), "some pairs")
        job.stop(first)
        job.lose("pair")

    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = ({"base": str(job.base), "points": [point], **RARE} for point, job in jobs.items())
        doomed.start(*lives, then="kill")
        doomed.wait_for_end("the end of the rebuilding")
        assert [doomed.at(job.base) for job in jobs.values()] == [[point] for point in POINTS], doomed.told

    for job in jobs.values():
        check(job.base)
        job.finish(first)
        check_complete(job.base, job.files)
        record = Control.open(job.root).state.attempt.rebuilt_stage(StageId("pair"))
        assert record is not None
        assert (record.number, record.done) == (2, True)


def _is_under_way(driver: DriverProcess, job: Small) -> bool:
    """Say whether all stages have started, and some pairs are there."""
    if not driver.has_started(job.base) or not (job.base / "pairs" / "_delta_log").is_dir():
        return False
    return len(table(job.base, "pairs")) >= 4
