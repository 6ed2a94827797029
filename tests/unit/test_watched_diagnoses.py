"""Each diagnosis of a watched root from facts: with the numbers that it says, and not a little below them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_abs.cuts.cut import Pipeline
from spark_abs.errors import AbortReason
from spark_abs.model import AttemptId, CheckpointId, RunId
from spark_abs.observe.listing import CheckpointRow
from spark_abs.observe.status import JobStatus, LiveRun
from spark_abs.protocol.control import WATCHED_JOB, Aborted, Run
from spark_abs.protocol.watch import Watch
from spark_abs.rewind.survey import Survey
from spark_abs.watch.ahead import Ahead, Lost
from spark_abs.watch.diagnoses import KeptTable, WatchedFacts, watched_diagnoses
from spark_abs.watch.pins import CleanUp

NOW = 10_000_000_000
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
RUN = Run(RunId(2), AttemptId(1), "host", 1, NOW - DAY, ended="stopped")
WATCH = Watch(("/c/silver", "/c/gold"), ("/t/gold", "/t/of nobody"), "3 24h:all 7d:1h", "5m")
STATUS = JobStatus(
    root="/kept/a shop",
    job=WATCHED_JOB,
    attempt=AttemptId(1),
    parent=None,
    restored_from=None,
    ready=True,
    run=RUN,
    killed=False,
    alive=None,
    open=(),
    last=CheckpointRow(CheckpointId(12), completed_ms=NOW - HOUR, age_ms=HOUR),
    last_aborted=Aborted(CheckpointId(13), AbortReason.DECLINED, "state/0/0/41.delta is gone"),
    pending=(),
    moment_ms=NOW - 2 * HOUR,
    watch=WATCH,
)
VACUUM = CleanUp("delta.deletedFileRetentionDuration", "VACUUM may delete files of versions", 2 * DAY)
TABLE = KeptTable("/t/gold", (VACUUM,), oldest=(3, NOW - 2 * DAY), log_begins=0)
HEALTHY = WatchedFacts(
    "/kept/a shop",
    NOW,
    STATUS,
    ahead=Ahead(ready_ms=NOW - MINUTE, since_ms=NOW - MINUTE, found=Survey((), (), Pipeline({}), ())),
    tables=(TABLE,),
)
ALIVE = LiveRun(RunId(2), "host", 1, 100)
PAIR = "table /t/bronze: query 'silver' had read it up to version 3 with batch 7, and query 'bronze' \u2026"


def given(alive: bool = False, **status: Any) -> WatchedFacts:
    return replace(HEALTHY, status=replace(STATUS, alive=ALIVE if alive else None, **status))


def waiting(since_ms: int, *pairs: str) -> WatchedFacts:
    return replace(HEALTHY, ahead=Ahead(waits=pairs, since_ms=since_ms))


WRONG: dict[str, tuple[WatchedFacts, tuple[str, ...], WatchedFacts]] = {
    "watcher-away": (
        replace(HEALTHY, overdue=True),
        (
            "No watcher is at work: run 2 ended: stopped; the newest cut is 12, 2.0 h old",
            "more than 1.0 h",
        ),
        replace(given(alive=True), overdue=False),
    ),
    "cuts-passed-over": (
        replace(given(alive=True), overdue=True),
        ("newer cut for more than 1.0 h", "cut 13 was given up: state/0/0/41.delta is gone"),
        given(alive=True),
    ),
    "unreadable": (
        replace(HEALTHY, ahead=Ahead(unread="/c/gold is not the checkpoint of a streaming query")),
        ("cannot be read from here: /c/gold is not",),
        replace(HEALTHY, ahead=None),
    ),
    "no-aligned-cut": (
        waiting(NOW - HOUR, PAIR, PAIR, PAIR),
        ("the newest cut is 12, 2.0 h old", "the oldest of 1.0 h ago", PAIR, "and 2 more such pairs"),
        waiting(NOW - HOUR + 1, PAIR),
    ),
    "deleted-before-kept": (
        replace(given(alive=True), ahead=Ahead(ready_ms=NOW, lost=(Lost("gold", 13, 39),))),
        ("Nothing goes back to batches 13 to 39 of query gold",),
        replace(given(alive=True), ahead=Ahead(ready_ms=NOW)),
    ),
    "table-made-anew": (
        replace(HEALTHY, tables=(replace(TABLE, of_another=(1, 2, 5)),)),
        ("Table /t/gold was dropped and made anew: 3 kept cuts, the first 1, are of the table before",),
        HEALTHY,
    ),
    "tables-cleaned": (
        replace(HEALTHY, tables=(replace(TABLE, oldest=(3, NOW - 3 * DAY)),)),
        ("Table /t/gold: VACUUM may delete files", "older than 2.0 d, and cut 3 is 3.0 d old"),
        replace(HEALTHY, tables=(replace(TABLE, oldest=None),)),
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said_with_its_numbers(kind: str) -> None:
    facts, numbers, below = WRONG[kind]
    (found,) = watched_diagnoses(facts)
    assert found.kind == kind
    assert [number for number in numbers if number not in found.said] == []
    assert watched_diagnoses(below) == ()


def test_a_healthy_root_has_nothing_nor_has_one_that_has_kept_nothing_yet() -> None:
    assert watched_diagnoses(HEALTHY) == ()
    assert watched_diagnoses(WatchedFacts("/kept/shop", NOW, replace(STATUS, last=None, run=None))) == ()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"killed": True}, "run 2 was killed, or its machine was lost"),
        ({"run": replace(RUN, ended="failed: fenced\n by run 3")}, "run 2 ended: failed: fenced;"),
    ],
)
def test_a_watcher_that_broke_is_away_at_once(status: dict[str, Any], said: str) -> None:
    (found,) = watched_diagnoses(given(**status))
    assert (found.kind, said in found.said) == ("watcher-away", True)
    assert watched_diagnoses(given(alive=True, **status)) == (), "the next one is at work"


def test_what_spark_has_deleted_while_no_watcher_was_there_is_told_with_it() -> None:
    facts = replace(HEALTHY, ahead=Ahead(ready_ms=NOW, lost=(Lost("gold", 13, 13),)))
    away, lost = watched_diagnoses(facts)
    assert (away.kind, "back to batch 13 of query gold" in lost.said) == ("watcher-away", True)
    assert away.command == (
        "spark-abs watch '/kept/a shop' --checkpoints /c/silver /c/gold --tables /t/gold '/t/of nobody' "
        "--keep 3 24h:all 7d:1h --every 5m"
    )


def test_a_watcher_that_looked_once_is_started_to_look_once() -> None:
    (found,) = watched_diagnoses(given(killed=True, watch=replace(WATCH, every="")))
    assert (found.kind, found.command.endswith(" --once")) == ("watcher-away", True)


def test_a_root_that_has_kept_nothing_says_why() -> None:
    begun = {"last": None, "moment_ms": None, "run": replace(RUN, ended=None)}
    (found,) = watched_diagnoses(
        replace(given(alive=True, **begun), ahead=Ahead(waits=(PAIR,), since_ms=NOW - DAY))
    )
    assert found.kind == "no-aligned-cut"
    assert found.said.startswith("no cut is kept, and no batches fit together, the oldest of 1.0 d ago: ")
    (found,) = watched_diagnoses(replace(given(alive=True, **begun), overdue=True))
    assert (found.kind, found.said.endswith("and no cut is kept")) == ("cuts-passed-over", False)


def test_a_query_whose_batches_are_gone_keeps_cuts_away() -> None:
    (found,) = watched_diagnoses(replace(HEALTHY, ahead=Ahead(waits=("query 'gold' has no batch",))))
    assert found.said.endswith("no batches since then fit together: query 'gold' has no batch")


def test_of_a_root_of_an_earlier_version_there_is_no_command() -> None:
    (found,) = watched_diagnoses(given(killed=True, watch=None))
    assert (found.command, "with the --keep that it had" in found.then) == ("", True)


def test_cuts_whose_versions_are_gone_from_a_log_are_counted() -> None:
    gone = replace(TABLE, oldest=(3, NOW - 60 * DAY), log_begins=50, without_log=(3, 4, 5))
    (found,) = watched_diagnoses(replace(HEALTHY, tables=(gone,)))
    assert found.said == (
        "The log of table /t/gold begins at version 50, and 3 kept cuts, the first 3, are of versions "
        "before that: a rewind there is refused"
    )
    (found,) = watched_diagnoses(replace(HEALTHY, tables=(replace(gone, without_log=(3,)),)))
    assert (
        "begins at version 50, and kept cut 3 is of versions before that: a rewind there is refused"
        in found.said
    )


def test_every_command_is_one_that_there_is() -> None:
    from spark_abs.cli.main import main

    found = [watched_diagnoses(facts)[0].command for facts, _, _ in WRONG.values()]
    assert {command.split()[1] for command in found if command} <= set(main.commands)
