"""Killed between a request and its answer: before and after the commit of what is asked for."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import spark_abs
from spark_abs.model import StageId
from spark_abs.protocol.control import Command, CommandKind, ControlState, ask
from spark_abs.snapshots.file_sources import FileSources
from spark_abs.store.control import Control
from tests.crash.facts import check, check_complete, native_of
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

BEFORE, AFTER = "command.pause.answer.before", "command.pause.answer.after"
OFTEN: dict[str, object] = {"checkpoint": {"interval": "300ms"}}
COMMAND = Command("one", CommandKind.PAUSE, None, 0, by="ann@desk")


def state(job: Small) -> ControlState:
    return Control.open(job.root).state


def answer(job: Small) -> Command:
    return next(c for c in state(job).commands if c.id == COMMAND.id)


def finished(job: Small) -> int:
    """Return the last batch of the source that Spark has finished."""
    return max(int(each.name) for each in (native_of(job.base, "events") / "commits").glob("[0-9]*"))


def has_newer(job: Small, checkpoint: int) -> bool:
    return job.newest() > checkpoint


def test_a_pause_and_its_answer_are_one_commit(first: DriverProcess, tmp_path: Path) -> None:
    """Before it nothing is paused, and the next run says so; after it the pause holds over the kill."""
    jobs = {point: Small(tmp_path / point.rpartition(".")[2]) for point in (BEFORE, AFTER)}
    for job in jobs.values():
        job.feed()
    asked: set[Path] = set()

    def meanwhile() -> None:
        for job in jobs.values():
            if job.completed() and job.base not in asked:
                asked.add(job.base)
                Control.open(job.root).update(lambda s: ask(s, COMMAND))
            job.feed()

    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = ({"base": str(job.base), "points": [point], **OFTEN} for point, job in jobs.items())
        doomed.start(*lives, then="kill")
        doomed.wait_for_end("the end of both", meanwhile)
        assert [doomed.at(job.base) for job in jobs.values()] == [[BEFORE], [AFTER]], doomed.told

    unpaused, paused = jobs[BEFORE], jobs[AFTER]
    assert (state(unpaused).paused, answer(unpaused).answered) == ((), False)
    assert ([one.stage for one in state(paused).paused], answer(paused).ok) == (["events"], True)
    for job in jobs.values():
        check(job.base)
        before = job.newest()
        job.start(first, **OFTEN)
        first.wait_for(partial(has_newer, job, before), "a checkpoint of it")
    assert (answer(unpaused).ok, "repeat the request" in answer(unpaused).message) == (False, True)
    read, taken = finished(paused), paused.newest()
    first.wait_for(lambda: paused.newest() > taken + 2, "checkpoints of the paused job")
    assert finished(paused) == read
    assert spark_abs.open(paused.root.uri).resume() == "resumed: events"
    paused.run_until(first, lambda: finished(paused) > read + 1, "rows after the pause")
    for job in jobs.values():
        job.stop(first)
        check(job.base)
        job.finish(first)
        check_complete(job.base, job.files)


TORN = "torn.json.gz"
RECORD = ("skip-file.record.before", "skip-file.record.after")
RESTARTED = {"stage": {"restartStrategy": "fixed-delay", "restartAttempts": "unlimited"}}


def tear(job: Small) -> str:
    """Let a file arrive that cannot be read; return its URI."""
    torn, whole = job.base / "input" / TORN, gzip.compress(b'{"id": -1}\n' * 5_000)
    unseen = job.base / TORN
    unseen.write_bytes(whole[: len(whole) // 2])
    newest = max(file.stat().st_mtime for file in torn.parent.glob("*.json"))
    os.utime(unseen, (newest, newest))  # were it younger by a week, the source would ignore those after it
    unseen.rename(torn)
    return torn.as_uri()


def is_planned(job: Small) -> bool:
    planned = FileSources(job.root.place(f"native/{state(job).attempt.id}/events")).planned()
    return any(file.endswith(TORN) for file in planned)


@pytest.mark.long
def test_a_skipped_file_is_recorded_before_the_stage_starts_without_it(
    first: DriverProcess, tmp_path: Path
) -> None:
    """Killed before the record nothing is skipped; after it the next run starts without the file."""
    jobs = {point: Small(tmp_path / point.rpartition(".")[2]) for point in RECORD}
    torn: dict[Path, str] = {}
    asked: set[Path] = set()
    for job in jobs.values():
        job.feed()

    def meanwhile() -> None:
        for job in jobs.values():
            if job.base in asked:
                continue
            if job.base not in torn and job.completed():
                torn[job.base] = tear(job)
            elif job.base in torn and is_planned(job):
                asked.add(job.base)
                command = Command("one", CommandKind.SKIP_FILE, None, 0, stages=(StageId("events"),))
                command = replace(command, files=(torn[job.base],), by="ann@desk")
                Control.open(job.root).update(partial(ask, command=command))
            job.feed()

    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        lives = (
            {"base": str(job.base), "points": [point], "config": RESTARTED, **OFTEN}
            for point, job in jobs.items()
        )
        doomed.start(*lives, then="kill")
        doomed.wait_for_end("the end of both", meanwhile)
        assert [doomed.at(job.base) for job in jobs.values()] == [[point] for point in RECORD], doomed.told

    read, skipped = jobs.values()
    assert [len(state(job).skipped) for job in jobs.values()] == [0, 1]
    assert [answer(job).answered for job in jobs.values()] == [False, False]
    done = spark_abs.open(read.root.uri).skip_file("events", str(read.base / "input" / TORN))
    assert done == f"stage 'events' skips {torn[read.base]}; no run is alive"
    for job in jobs.values():
        check(job.base)
        before = job.newest()
        job.start(first, **OFTEN)
        job.run_until(first, partial(has_newer, job, before), "a checkpoint after the file")
        assert (answer(job).ok, "repeat the request" in answer(job).message) == (False, True)
    again = spark_abs.open(skipped.root.uri).skip_file("events", torn[skipped.base])
    assert again == f"stage 'events' skips {torn[skipped.base]}, which ann@desk had skipped before"
    for job in jobs.values():
        job.stop(first)
        check(job.base)
        job.finish(first)
        check_complete(job.base, job.files)
