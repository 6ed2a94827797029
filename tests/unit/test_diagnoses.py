"""Each diagnosis from facts: with the numbers that it says, and not a little below them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spark_abs.diagnosis.diagnoses import MB, Diagnosis, diagnoses
from spark_abs.diagnosis.facts import Facts, Orphan, Partitions, StateSize
from spark_abs.diagnosis.gather import partitions_of
from spark_abs.diagnosis.health import health
from spark_abs.errors import UsageError
from spark_abs.keep import Keep, Tier
from spark_abs.manifest import Location, StoredFile
from spark_abs.model import AttemptId, BatchId, ChannelId, CheckpointId, RunId, StageId
from spark_abs.observe.headline import headline
from spark_abs.observe.listing import CheckpointRow
from spark_abs.observe.status import AbortedInRow, FailingBatch, JobStatus, LiveRun, StageStatus
from spark_abs.protocol.control import WATCHED_JOB, WRAPPED_JOB, Paused, Run
from spark_abs.store.activity import DORMANT, Backlog, Disk, Earlier, Longest, Phase, StageActivity

NOW = 10_000_000_000
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
GB = 1024 * MB
MATCH = StageId("match")


def doing(**given: Any) -> StageActivity:
    """Return a stage that waits for rows, after a batch of half a second."""
    usual: dict[str, Any] = {"batch": BatchId(7), "last_ms": 500, "slowest_ms": 900, "ended_ms": NOW - 2_000}
    return StageActivity(MATCH, **{**usual, **given})


def stage(activity: StageActivity | None = None, **given: Any) -> StageStatus:
    return StageStatus(MATCH, BatchId(7), BatchId(7), activity=activity or doing(), **given)


HEALTHY = Facts(
    "/data/a shop",
    NOW,
    alive=True,
    stages=(stage(),),
    last_completed_ms=NOW - 4 * SECOND,
    settings={"interval_ms": "10000", "timeout_ms": "600000"},
    keep=Keep(3),
    earlier=(Earlier(MATCH, NOW - 30 * MINUTE, 0, 0),),
    disks=(Disk("/data", 50 * GB, 100 * GB, 50 * GB, NOW - HOUR),),
    usual_write_ms=12,
    ahead_of_store_ms=0,
    versions={"spark-abs": "0.1"},
    own_versions={"spark-abs": "0.1"},
    sizes={MATCH: tuple(StateSize(CheckpointId(n), NOW - 100 + n, 50 * MB) for n in range(20))},
    partitions=(Partitions(MATCH, 0, (9 * MB, 10 * MB, 11 * MB, 9 * MB)),),
    restore_ms=5 * SECOND,
    retained_ms=20 * SECOND,
    retained=3,
)


def grown(*sizes: int) -> Facts:
    found = tuple(StateSize(CheckpointId(n), NOW + n * MINUTE, size * MB) for n, size in enumerate(sizes))
    return replace(HEALTHY, sizes={MATCH: found})


def with_stage(**given: Any) -> Facts:
    return replace(HEALTHY, stages=(stage(doing(**given)),))


def behind(rows: int, lag_ms: int, was_ms: int = 30 * SECOND, at_ms: int = NOW - 20 * MINUTE) -> Facts:
    unread = Backlog(ChannelId("clean.main"), 3, rows, 100, oldest_ms=NOW - lag_ms)
    before = Earlier(MATCH, at_ms, rows=10, lag_ms=was_ms)
    return replace(HEALTHY, stages=(stage(doing(inputs=(unread,))),), earlier=(before,))


def held(since_ms: int, idle_rows: int = 0, moved_ms: int = NOW - SECOND) -> Facts:
    busy = Backlog(ChannelId("clicks.main"), moved_ms=moved_ms)
    idle = Backlog(ChannelId("orders.main"), rows=idle_rows, moved_ms=NOW - HOUR)
    return with_stage(watermark_ms=NOW - HOUR, watermark_since_ms=since_ms, inputs=(busy, idle))


def failing(restarts: int) -> Facts:
    return replace(
        HEALTHY, stages=(stage(failing=FailingBatch(BatchId(8), restarts, "ValueError: no\n  at …")),)
    )


def aborted(number: int) -> Facts:
    given = AbortedInRow(number, NOW - HOUR, CheckpointId(41), "expired", "after 10000 ms without match")
    waits = stage(first=True, waiting="batch 8 has been under way for 11.0 s: function 'mail' is called")
    return replace(HEALTHY, aborted=given, stages=(waits,))


def test_a_healthy_job_has_nothing_and_so_has_one_of_which_nothing_is_known() -> None:
    assert diagnoses(HEALTHY) == ()
    assert diagnoses(Facts("/data/shop", NOW)) == ()


WRONG: dict[str, tuple[Facts, tuple[str, ...], Facts]] = {
    "restarts-without-progress": (
        failing(4),
        ("stage 'match' has been restarted 4 times without finishing batch 8: ValueError: no",),
        failing(1),
    ),
    "checkpoints-aborted": (
        aborted(8),
        ("The last 8 checkpoints were aborted (expired)", "4.0 s ago", "match is late: batch 8", "10.0 min"),
        aborted(1),
    ),
    "disk-full": (
        replace(HEALTHY, disks=(Disk("/data", 2 * GB, 100 * GB, 4 * GB, NOW - HOUR),)),
        ("2.0 GB free of 100.0 GB", "loses 2.0 GB an hour", "full in 1.0 h"),
        replace(HEALTHY, disks=(Disk("/data", 4 * GB, 100 * GB, 5 * GB, NOW - MINUTE),)),
    ),
    "slow-sink": (
        with_stage(slowest_ms=14 * SECOND, longest=Longest(Phase.CALLING, "mail", 12 * SECOND)),
        ("function 'mail' of stage match takes 12.0 s of a batch of 14.0 s", "every 10.0 s"),
        with_stage(slowest_ms=14 * SECOND, longest=Longest(Phase.WRITING, "main", 12 * SECOND)),
    ),
    "interval-too-short": (
        with_stage(last_ms=12 * SECOND, slowest_ms=12 * SECOND),
        ("A batch of stage match takes 12.0 s, longer than the interval of 10.0 s",),
        with_stage(last_ms=8 * SECOND, slowest_ms=12 * SECOND),
    ),
    "hot-key": (
        replace(HEALTHY, partitions=(Partitions(MATCH, 1, (MB, 90 * MB, MB, 2 * MB)),)),
        ("Partition 1 of the state of stage match (operator 1) has 90.0 MB, the others about 1.0 MB",),
        replace(HEALTHY, partitions=(Partitions(MATCH, 1, (90 * MB,)), Partitions(MATCH, 2, (10, 9_000, 9)))),
    ),
    "growing-state": (
        grown(10, 20, 30, 40, 50, 60, 70, 80, 90),
        ("from 10.0 MB in checkpoint 0 to 90.0 MB in checkpoint 8, in 8.0 min, 600.0 MB an hour",),
        grown(10, 40, 80, 90, 88, 91, 90, 89, 90, 91),
    ),
    "growing-lag": (
        behind(4_000, 5 * MINUTE),
        ("Stage match is 5.0 min behind, with 4000 unread rows; 20.0 min ago it was 30.0 s behind, with 10",),
        behind(4_000, 5 * MINUTE, at_ms=NOW - MINUTE),
    ),
    "held-watermark": (
        held(NOW - 10 * MINUTE),
        ("stood still for 10.0 min: no rows came from orders.main", "while clicks.main had some"),
        held(NOW - 10 * MINUTE, moved_ms=NOW - HOUR),
    ),
    "slow-store": (
        replace(HEALTHY, usual_write_ms=2_300),
        ("some kilobytes into the root usually takes 2.3 s",),
        replace(HEALTHY, usual_write_ms=300),
    ),
    "clock-skew": (
        replace(HEALTHY, ahead_of_store_ms=-60 * SECOND),
        ("The clock of the driver is 1.0 min behind the clock of the store",),
        replace(HEALTHY, ahead_of_store_ms=-3 * SECOND),
    ),
    "versions-differ": (
        replace(HEALTHY, versions={"spark-abs": "0.2", "pyspark": "4.2.0"}),
        ("spark-abs 0.2 there and 0.1 here",),
        replace(HEALTHY, versions={"pyspark": "4.2.0"}),
    ),
    "retention-too-short": (
        replace(HEALTHY, restore_ms=10 * MINUTE),
        ("reach back 20.0 s (keep=3), and the last restore took 10.0 min",),
        replace(HEALTHY, restore_ms=10 * MINUTE, keep=Keep(3, (Tier(HOUR, MINUTE),))),
    ),
    "orphaned-files": (
        replace(HEALTHY, orphans=(Orphan(GB, NOW - 2 * HOUR), Orphan(GB, NOW - HOUR), Orphan(GB, NOW))),
        ("2 files in state/, 2.0 GB together, the oldest written 2.0 h ago, are in no checkpoint",),
        replace(HEALTHY, orphans=(Orphan(MB, NOW - 2 * HOUR), Orphan(GB, NOW - MINUTE))),
    ),
}


ASLEEP = doing(what=DORMANT)
WRONG["not-running"] = (
    replace(HEALTHY, alive=False, ended="run 2 was killed, or its machine was lost"),
    ("No run is alive: run 2 was killed, or its machine was lost",),
    replace(HEALTHY, alive=False),
)
WRONG["restore-unfinished"] = (
    replace(HEALTHY, alive=False, ended="run 2 ended: failed", unfinished_restore="spark-abs restore /r"),
    ("A restore was begun and is not finished",),
    HEALTHY,
)
WRONG["damaged-checkpoint"] = (
    replace(HEALTHY, damaged=("checkpoints/7.parquet: torn",)),
    ("A checkpoint cannot be read: checkpoints/7.parquet: torn",),
    HEALTHY,
)
WRONG["query-does-not-run"] = (
    replace(HEALTHY, job=WRAPPED_JOB, stages=(stage(ASLEEP, checkpoint=CheckpointId(9), cut=BatchId(4)),)),
    ("Query match does not run, and others", "repeat its part of checkpoint 9, after batch 4"),
    replace(HEALTHY, job=WRAPPED_JOB),
)


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said_with_its_numbers(kind: str) -> None:
    facts, numbers, below = WRONG[kind]
    (found,) = diagnoses(facts)
    assert found.kind == kind
    assert [number for number in numbers if number not in f"{found.said} {found.then}"] == []
    assert diagnoses(below) == ()


MERGED = (16, 35, 55, 78, 25)
"""Megabytes of a list that is rewritten with each batch, as RocksDB's files had them on Spark."""


def test_a_state_whose_files_are_merged_now_and_then_grows_if_its_smallest_sizes_do() -> None:
    rising = [size + 8 * n for n in range(10) for size in MERGED]
    assert [one.kind for one in diagnoses(grown(*rising))] == ["growing-state"]
    assert diagnoses(grown(*rising[:39])) == (), "too few to tell"
    assert diagnoses(grown(*MERGED * 10)) == (), "it is merged to the same size again and again"
    assert diagnoses(grown(*rising, *rising)) == (), "it began anew in between"


def test_a_clock_that_is_ahead_is_said_both_ways() -> None:
    ahead = replace(HEALTHY, heard_ahead_ms=20 * SECOND, ahead_of_store_ms=60 * SECOND)
    here, store = diagnoses(ahead)
    assert "20.0 s ahead of this machine's" in here.said
    assert "1.0 min ahead of the clock of the store" in store.said


def test_the_worst_comes_first_and_commands_take_the_root_as_it_is() -> None:
    slow = doing(
        phase=Phase.CALLING, what="mail", since_ms=NOW - 11_000, began_ms=NOW - 11_000, last_ms=12 * SECOND
    )
    facts = replace(aborted(8), stages=(stage(slow, first=True, waiting="batch 8 …"),))
    found = diagnoses(facts)
    assert [one.kind for one in found] == ["checkpoints-aborted", "slow-sink", "interval-too-short"]
    assert found[0].command == "spark-abs set '/data/a shop' timeout=1800s"
    assert found[2].command == "spark-abs set '/data/a shop' interval=24s"


def test_of_two_slow_sinks_the_slower_comes_first() -> None:
    """The other may be slow only since the machine is."""
    short = doing(slowest_ms=14 * SECOND, longest=Longest(Phase.COMMITTING, "main", 11 * SECOND))
    long = doing(slowest_ms=40 * SECOND, longest=Longest(Phase.CALLING, "mail", 30 * SECOND))
    first, second = diagnoses(replace(HEALTHY, stages=(stage(short), stage(long))))
    assert "function 'mail'" in first.said
    assert "commit to 'main'" in second.said


def kinds(facts: Facts) -> list[str]:
    return [one.kind for one in diagnoses(facts)]


def test_a_batch_that_waits_for_another_stage_is_not_the_slow_one() -> None:
    waited = {"last_ms": 12 * SECOND, "last_waited_ms": 11 * SECOND}
    assert kinds(with_stage(**waited)) == []
    began = {"began_ms": NOW - 12 * SECOND, "phase": Phase.WRITING, "what": "main"}
    assert kinds(with_stage(**began)) == ["interval-too-short"]
    assert kinds(with_stage(**began, waited_ms=11 * SECOND)) == []
    assert kinds(with_stage(**{**began, "phase": Phase.WAITING})) == []


def test_a_job_at_rest_is_not_told_how_long_its_last_batch_took() -> None:
    assert kinds(with_stage(last_ms=12 * SECOND, ended_ms=NOW - 21 * SECOND)) == ["interval-too-short"]
    assert kinds(with_stage(last_ms=12 * SECOND, ended_ms=NOW - 23 * SECOND)) == []


def test_a_lag_that_has_grown_for_hours_still_grows() -> None:
    assert kinds(behind(9_000, 3 * HOUR, was_ms=3 * HOUR - 10 * MINUTE)) == ["growing-lag"]
    assert kinds(behind(9_000, 3 * HOUR, was_ms=3 * HOUR - 1 * MINUTE)) == []


def test_a_watermark_that_no_row_has_begun_is_held_too() -> None:
    facts = held(NOW - 10 * MINUTE)
    (activity,) = facts.activities
    never = replace(activity, watermark_ms=0)
    (found,) = diagnoses(replace(facts, stages=(stage(replace(never, has_watermark=True)),)))
    assert "The watermark of stage match has not begun for 10.0 min: no rows came from orders" in found.said
    assert diagnoses(replace(facts, stages=(stage(never),))) == (), "it has none"


def test_a_watermark_of_a_job_at_rest_is_not_held() -> None:
    """The last rows came soon after those that moved it."""
    assert diagnoses(held(NOW - HOUR, moved_ms=NOW - HOUR + 5 * SECOND)) == ()


def test_a_small_state_is_skewed_if_its_stage_holds_a_checkpoint_up() -> None:
    skewed = replace(HEALTHY, partitions=(Partitions(MATCH, 0, (100_000, 2 * MB)),))
    assert kinds(skewed) == []
    late = replace(skewed, stages=(stage(first=True, waiting="batch 8 …"),))
    assert kinds(late) == ["hot-key"]
    assert "Partition 1 of the state" in diagnoses(late)[0].said


def test_one_checkpoint_reaches_back_no_time_and_a_young_job_has_yet_to_keep_more() -> None:
    slow = replace(HEALTHY, restore_ms=10 * MINUTE)
    one = diagnoses(replace(slow, keep=Keep(1), retained=1, retained_ms=0))[0]
    assert "reach back 0 ms (keep=1), and the last restore took 10.0 min" in one.said
    assert kinds(replace(slow, keep=Keep(9))) == []
    assert kinds(replace(slow, keep=None)) == [], "it is not known"


def test_what_to_do_is_said_of_what_there_is() -> None:
    """Batches of a wrapped query are made by its owner, and watched queries need no job."""
    slow, orphaned = WRONG["interval-too-short"][0], WRONG["orphaned-files"][0]
    assert "smaller (max_entries_per_batch)" in diagnoses(slow)[0].then
    assert "smaller (an option of its source" in diagnoses(replace(slow, job=WRAPPED_JOB))[0].then
    found = {job: diagnoses(replace(orphaned, alive=False, job=job))[0] for job in (WRAPPED_JOB, WATCHED_JOB)}
    assert [one.then.rpartition(": ")[2] for one in found.values()] == ["start a query", "start a watcher"]
    assert diagnoses(replace(orphaned, job=WATCHED_JOB))[0].command == "", "a watcher takes no commands"


def commands() -> list[Diagnosis]:
    return [diagnoses(facts)[0] for facts, _, _ in WRONG.values()]


def test_every_command_is_one_that_there_is() -> None:
    from spark_abs.cli.main import main

    given = [one.command.split()[:2] for one in commands() if one.command]
    assert {verb for _, verb in given} <= set(main.commands)


def test_bytes_of_partitions_are_added_up_over_their_files() -> None:
    def file(path: str, size: int) -> StoredFile:
        return StoredFile(path, size, "", Location("", 0, 1))

    snapshot: Any = type("Snapshot", (), {})()
    snapshot.stage = MATCH
    snapshot.files = (
        file("state/0/0/1.zip", 5),
        file("state/0/0/left-keyToNumValues/1.zip", 2),
        file("state/0/1/1.zip", 3),
        file("state/1/0/1.zip", 9),
        file("state/0/_metadata/metadata", 99),
        file("offsets/3", 99),
    )
    assert partitions_of(snapshot) == (Partitions(MATCH, 0, (7, 3)), Partitions(MATCH, 1, (9,)))


ROW = CheckpointRow(CheckpointId(12), completed_ms=NOW - 8 * SECOND, age_ms=8 * SECOND)
STATUS = JobStatus(
    root="/data/shop",
    job="shop",
    attempt=AttemptId(1),
    parent=None,
    restored_from=None,
    ready=True,
    run=Run(RunId(2), AttemptId(1), "host", 1, NOW - HOUR),
    killed=False,
    alive=LiveRun(RunId(2), "host", 1, 100),
    open=(),
    last=ROW,
    last_aborted=None,
    pending=(),
    stages=(stage(),),
)


PAUSED = (Paused(StageId("clicks"), "ann@desk", NOW - 5 * MINUTE),)


def test_paused_sources_are_said_first_with_the_command_that_resumes_them() -> None:
    first = diagnoses(replace(failing(2), paused=PAUSED))[0]
    assert (first.kind, first.command) == ("paused", "spark-abs resume '/data/a shop'")
    assert first.said.startswith("PAUSED: clicks for 5.0 min by ann@desk; clicks read nothing until")
    assert headline(replace(STATUS, paused=PAUSED), NOW) == (
        "PAUSED: clicks for 5.0 min by ann@desk; job shop runs and completed checkpoint 12 8.0 s ago"
    )


def judged(status: JobStatus, max_age: int | None = None, max_lag: int | None = None) -> str:
    return health(status, NOW, max_age, max_lag).line


def lagging(status: JobStatus) -> JobStatus:
    return replace(status, stages=behind(5, 2 * HOUR).stages)


def finished(status: JobStatus) -> JobStatus:
    run = Run(RunId(2), AttemptId(1), "host", 1, NOW - HOUR, ended="finished")
    return replace(status, alive=None, run=run)


def standing(status: JobStatus) -> JobStatus:
    """Skip its checkpoints: the last one is as good as new."""
    return replace(status, skipped=3, unchanged_ms=2 * SECOND)


def restarted(status: JobStatus) -> JobStatus:
    return replace(status, stages=failing(1).stages)


@pytest.mark.parametrize(
    ("change", "age", "lag", "said"),
    [
        (lambda s: s, 5 * MINUTE, HOUR, "healthy: checkpoint 12, 8.0 s old, lag 0 ms"),
        (finished, None, HOUR, "healthy: checkpoint 12, 8.0 s old, lag 0 ms"),
        (lagging, None, None, "healthy: checkpoint 12, 8.0 s old, lag 2.0 h"),
        (lambda s: replace(s, last=None), 2 * HOUR, None, "healthy: no checkpoint yet, lag 0 ms"),
        (standing, 5 * SECOND, None, "healthy: checkpoint 12, 2.0 s old, lag 0 ms"),
        (standing, SECOND, None, "unhealthy: the last completed checkpoint is 2.0 s old"),
        (lambda s: s, SECOND, None, "unhealthy: the last completed checkpoint is 8.0 s old, more than 1.0 s"),
        (lambda s: replace(s, last=None), MINUTE, None, "unhealthy: no checkpoint was ever completed, more"),
        (lagging, None, HOUR, "unhealthy: stage match is 2.0 h behind, more than 1.0 h"),
        (lambda s: replace(s, stages=()), None, HOUR, "unhealthy: the run has not told its lag"),
        (
            lambda s: replace(s, alive=None, killed=True),
            None,
            None,
            "unhealthy: no run is alive: it was killed",
        ),
        (lambda s: replace(s, ready=False), None, None, "unhealthy: a restore is not finished"),
        (restarted, None, None, "unhealthy: stage 'match' has been restarted once without finishing batch 8"),
        (
            lambda s: replace(s, paused=PAUSED),
            None,
            None,
            "unhealthy: PAUSED: clicks for 5.0 min by ann@desk",
        ),
        (
            lambda s: replace(s, job=WRAPPED_JOB, stages=(stage(ASLEEP),)),
            None,
            None,
            "unhealthy: query match does not run",
        ),
        (lambda s: replace(s, aborted=aborted(2).aborted), None, None, "healthy: "),
        (lambda s: replace(s, aborted=aborted(3).aborted), None, None, "unhealthy: the last 3 checkpoints"),
    ],
)
def test_health_is_one_line(
    change: Callable[[JobStatus], JobStatus], age: int | None, lag: int | None, said: str
) -> None:
    assert judged(change(STATUS), age, lag).startswith(said)


AT_CUT = stage(checkpoint=CheckpointId(12), cut=BatchId(7))
WATCHED = replace(
    STATUS,
    job=WATCHED_JOB,
    alive=None,
    run=Run(RunId(2), AttemptId(1), "host", 1, NOW - HOUR, ended="stopped"),
    moment_ms=NOW - 20 * MINUTE,
    stages=(replace(AT_CUT, finished=BatchId(9)),),
)


@pytest.mark.parametrize(
    ("change", "age", "said"),
    [
        ({}, 30 * MINUTE, "healthy: checkpoint 12, 20.0 min old, lag -"),
        ({}, 5 * MINUTE, "unhealthy: the newest cut is 20.0 min old, more than 5.0 min are too many"),
        ({"stages": (AT_CUT,)}, 5 * MINUTE, "healthy: checkpoint 12, 0 ms old"),
        ({"stages": (replace(AT_CUT, planned=BatchId(8)),)}, 5 * MINUTE, "unhealthy: the newest cut is 20.0"),
        ({"stages": (replace(AT_CUT, finished=None, planned=None),)}, MINUTE, "unhealthy: the newest cut is"),
        (
            {"killed": True},
            None,
            "unhealthy: no watcher is at work: run 2 was killed, or its machine was lost",
        ),
        ({"last": None, "moment_ms": None}, None, "unhealthy: no cut is kept"),
        ({"moment_ms": None}, None, "unhealthy: the newest cut, 12, cannot be read"),
    ],
)
def test_a_watched_root_is_as_healthy_as_its_newest_cut(
    change: dict[str, Any], age: int | None, said: str
) -> None:
    """Its queries may have done nothing since: then it is no older than now."""
    assert judged(replace(WATCHED, **change), age).startswith(said)


def test_a_watcher_that_failed_is_said_and_none_knows_a_lag() -> None:
    assert WATCHED.run is not None
    failed = replace(WATCHED, run=replace(WATCHED.run, ended="failed: the state of gold is of a later Spark"))
    assert judged(failed) == (
        "unhealthy: no watcher is at work: run 2 ended: failed: the state of gold is of a later Spark"
    )
    assert judged(replace(failed, alive=STATUS.alive)).startswith("healthy: "), "the next one is at work"
    with pytest.raises(UsageError, match="leave --max-lag out"):
        judged(WATCHED, max_lag=MINUTE)
