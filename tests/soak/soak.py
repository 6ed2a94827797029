"""Run a job under seeded kills: `SEED=… KILLS=… make soak`.

A run has a seed and up to twenty kills; its seed replays it. After each death of a driver the invariants
are checked on what the dead have left; at the end all input comes through and is compared with batch queries.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.crash.process import PATIENCE_S, DriverProcess
from tests.soak.jobs import AttributionSoaked, SmallSoaked, Soaked, Verdict
from tests.soak.schedule import LOCAL, Life, job_of, lives

KILLS_PER_RUN = 20
FILES_AT_THE_END = 8
"""Files a batch when what is left comes through: as many as the job's configuration allows for."""

Say = Callable[[str], None]


class SoakFailed(AssertionError):
    """A job did not do after a kill what it should."""


def soak(base: Path, seed: int, kills: int, say: Say) -> Verdict:
    """Do one run, and return how far its tables and channels are from what they should be."""
    name = job_of(seed)
    job: Soaked = AttributionSoaked(base, seed) if name == "attribution" else SmallSoaked(base)
    found = Verdict()
    plan = lives(seed, kills)
    masters = [*(life.master for life in plan), LOCAL]
    driver = _driver(base, 0, masters[0])
    for number, life in enumerate(plan):
        with driver, ExitStack() as coming:
            meanwhile = _Meanwhile(driver, job, life, f"seed {seed}", say)
            _start(driver, name, job, life)
            driver.wait_for(meanwhile.is_under_way, "the job to start", meanwhile)
            following = coming.enter_context(_driver(base, number + 1, masters[number + 1]))
            patience_s = PATIENCE_S * len(life.kills)
            driver.wait_for_end(f"the kills of life {number} of seed {seed}", meanwhile, patience_s)
            meanwhile.finish()
            found += job.check()
            coming.pop_all()
        driver = following
    with driver:
        job.feed_tail()
        _start(driver, name, job, Life(LOCAL, "native", ()), available_now=True)
        driver.wait_for(lambda: driver.ended(base) is not None, "all input to come through")
        if driver.ended(base):
            raise SoakFailed(f"seed {seed}: the last run failed: {driver.told[-5:]}")
    return found + job.check_complete()


@dataclass(slots=True)
class _Meanwhile:
    """What is done while a life goes on: let input arrive, say who was killed."""

    driver: DriverProcess
    job: Soaked
    life: Life
    where: str
    say: Say
    said: int = 0

    def __call__(self) -> None:
        """Look once. The job may end only because the driver's other half is gone."""
        killed = [event["killed"] for event in self.driver.told if "killed" in event]
        for kill in self.life.kills[self.said : len(killed)]:
            self.say(f"{self.where}  kill {kill.number:3}  {kill}")
        self.said = len(killed)
        if self.said < len(self.life.kills):
            self.driver.require_running(self.job.base)
        self.job.feed()

    def is_under_way(self) -> bool:
        return self.driver.over or self.said > 0 or self.driver.has_started(self.job.base)

    def finish(self) -> None:
        self()
        if self.said < len(self.life.kills):
            raise SoakFailed(f"{self.where}: the driver ended before {self.life.kills[self.said]}")


def _driver(base: Path, number: int, master: str) -> DriverProcess:
    return DriverProcess(base / f"life-{number}", "tests.soak.driver", master)


def _start(driver: DriverProcess, name: str, job: Soaked, life: Life, **options: object) -> None:
    driver.wait_ready()
    driver.say(
        {
            "job": name,
            "base": str(job.base),
            "files_per_batch": FILES_AT_THE_END if options else 1,
            "options": {"restart": life.restart, **options},
            "kills": [kill.plain() for kill in life.kills],
        }
    )


def main(seed: int, kills: int, say: Say) -> Verdict:
    """Do as many runs as the kills need, from a seed on; stop at the first that fails."""
    found, done = Verdict(), 0
    while done < kills:
        count, began = min(KILLS_PER_RUN, kills - done), time.monotonic()
        say(f"seed {seed}: {count} kills; replay with SEED={seed} KILLS={count} make soak")
        base = Path(tempfile.mkdtemp(prefix=f"spark-abs-soak-{seed}-"))
        verdict = soak(base, seed, count, say)
        if verdict.wrong:
            say(f"seed {seed}: {verdict}; what is left of it is in {base}")
        else:
            shutil.rmtree(base)
        found += verdict
        done, seed = done + count, seed + 1
        say(f"{_summary(done, found)}  ({time.monotonic() - began:.0f} s)")
        if found.wrong:
            break
    return found


def _summary(kills: int, found: Verdict) -> str:
    return (
        f"kills = {kills}, lost = {found.lost}, duplicated = {found.duplicated}, "
        f"out of order = {found.out_of_order}"
    )


if __name__ == "__main__":
    out: Say = partial(print, flush=True)
    verdict = main(int(os.environ.get("SEED", "1")), int(os.environ.get("KILLS", "200")), out)
    sys.exit(1 if verdict.wrong or not verdict.expected else 0)
