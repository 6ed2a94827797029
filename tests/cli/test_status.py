"""`status` of a live run that tells what it does: the worst fact first, then each stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_abs.errors import AbortReason
from spark_abs.model import BatchId, ChannelId, CheckpointId, RunId, StageId
from spark_abs.observe.headline import headline
from spark_abs.observe.status import job_status
from spark_abs.protocol import control as ledger
from spark_abs.store.activity import Backlog, Late, Phase, RunActivity, Skips, StageActivity, write_activity
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from tests.cli.conftest import Cli
from tests.root_support import SmallJob

NOW = 1_000_000
CALLS = "batch 7 has been under way for 11.0 s: function 'mail' is called"


def tell(job: SmallJob, *late: Late) -> None:
    """Let the live run tell of both stages: `b` has been in its function for 11 s, and has 5 rows unread."""
    unread = Backlog(ChannelId("a.main"), 2, 5, 2048, oldest_ms=NOW - 30_000)
    b = StageActivity(
        StageId("b"),
        Phase.CALLING,
        "mail",
        since_ms=NOW - 11_000,
        batch=BatchId(7),
        began_ms=NOW - 11_000,
        ended_ms=NOW - 12_000,
        last_ms=12_000,
        rows_per_s=3.4,
        watermark_ms=NOW - 90_000,
        state_rows=17,
        inputs=(unread,),
    )
    write_activity(job.root, RunActivity(job.run, NOW - 1_000, (StageActivity(StageId("a")), b), late))


def abort(job: SmallJob, *reasons: AbortReason) -> None:
    for reason in reasons:
        barrier = job.claim()
        row = HistoryRow(
            job._tick(), HistoryEvent.ABORTED, job.attempt, job.run, barrier.id,
            reason=reason.value, detail="after 10000 ms without b",
        )  # fmt: skip
        History(job.root).append([row])
        aborted = ledger.Aborted(barrier.id, reason, "after 10000 ms without b")
        Control.open(job.root).update(lambda s, a=aborted: ledger.settle(s, aborted=(a,)))  # type: ignore[misc]


def first_line(cli: Cli) -> str:
    return cli("status").stdout.splitlines()[0]


def test_each_stage_is_shown_with_what_it_does(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    tell(job)
    heading, *rows = cli("status").stdout.partition("\n\n")[2].splitlines()
    assert [title.strip() for title in heading.split("  ") if title.strip()] == [
        *("stage", "batch", "under way", "last took", "ended", "rows/s", "unread rows", "bytes", "lag"),
        *("watermark lag", "state rows", "restarts", "checkpoint"),
    ]
    b = next(row for row in rows if row.startswith("b"))
    assert [cell.strip() for cell in b.split("  ") if cell.strip()] == [
        *("b", "7", "11.0 s", "12.0 s", "12.0 s", "3", "5", "2.0 kB", "30.0 s", "1.5 min", "17", "-", "1"),
        "function 'mail' is called, for 11.0 s",
    ]
    found = cli.json("status")
    assert found["told_ms"] == 1_000
    assert found["stages"][1]["activity"]["what"] == "mail"
    assert first_line(cli).startswith("job job runs and completed checkpoint 1 ")


def test_checkpoints_that_are_skipped_are_counted_and_make_the_last_one_young(
    job: SmallJob, cli: Cli
) -> None:
    job.checkpoint(1)
    job.come_alive()
    write_activity(job.root, RunActivity(job.run, NOW - 1_000, skips=Skips(7, NOW - 2_000, 9)))
    found = cli.json("status")
    assert (found["skipped"], found["unchanged_ms"]) == (7, 2_000)
    assert found["last"]["age_ms"] > 5_000
    assert first_line(cli).endswith(" ago; 2.0 s ago nothing had been done since")
    said = [" ".join(line.split()) for line in cli("status").stdout.splitlines()]
    assert "skipped 7 checkpoints since then: 2.0 s ago nothing had been done" in said
    assert cli("health", "--max-age", "5s").stdout.startswith("healthy: checkpoint 1, 2.0 s old")
    metrics = cli("metrics").stdout
    assert 'last_checkpoint_age_seconds{job_name="job"} 2\n' in metrics
    assert 'number_of_skipped_checkpoints_total{job_name="job"} 9\n' in metrics


def test_the_stage_that_holds_the_checkpoint_up_comes_first_and_is_in_the_first_line(
    job: SmallJob, cli: Cli
) -> None:
    job.checkpoint(1)
    job.come_alive()
    number = job.claim().id
    tell(job, Late(number, StageId("b"), CALLS, True), Late(number, StageId("a"), "the barrier …", False))
    assert [(s["stage"], s["first"], s["waiting"]) for s in cli.json("status")["stages"]] == [
        ("b", True, CALLS),
        ("a", False, "the barrier …"),
    ]
    assert first_line(cli) == f"job job runs; checkpoint 2 waits for b: {CALLS}"
    text = cli("status").stdout
    said = [" ".join(line.split()) for line in text.splitlines()]
    assert f"held up by b: {CALLS}" in said
    assert "waits a: the barrier …" in said


def test_checkpoints_that_are_aborted_one_after_another_are_in_the_first_line(
    job: SmallJob, cli: Cli
) -> None:
    job.checkpoint(1)
    job.come_alive()
    abort(job, AbortReason.EXPIRED, AbortReason.SUBSUMED, AbortReason.EXPIRED)
    aborted = cli.json("status")["aborted"]
    assert (aborted["number"], aborted["checkpoint"], aborted["reason"]) == (2, 4, "expired")
    said = first_line(cli)
    assert said.startswith("job job: the last 2 checkpoints, up to 4, were aborted in ")
    assert said.endswith(": expired, after 10000 ms without b")
    tell(job, Late(job.claim().id, StageId("b"), CALLS, True))
    assert first_line(cli).endswith(f": expired; now b is late: {CALLS}")
    job.checkpoint(2)
    assert cli.json("status")["aborted"] is None


def test_what_a_run_before_told_is_not_told_of_this_one(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    tell(job)
    assert (cli.json("status")["told_ms"], cli.json("status")["stages"][1]["activity"]) == (None, None)
    assert first_line(cli).startswith("job job does not run: run 1 was killed")
    job.start()
    job.come_alive()
    assert cli.json("status")["told_ms"] is None


def test_the_first_line_of_other_states(job: SmallJob) -> None:
    job.checkpoint(1)
    job.come_alive()
    found = job_status(job.root, NOW, 30_000)
    assert headline(replace(found, run=None), NOW) == "job job was never started"
    assert "a restore is not finished" in headline(replace(found, ready=False), NOW)
    ended: Any = replace(found.run, ended="failed: stage 'a'\nTraceback") if found.run else None
    assert headline(replace(found, alive=None, run=ended), NOW) == (
        "job job does not run: run 1 ended: failed: stage 'a'"
    )
    assert headline(replace(found, told_ms=20_000), NOW) == (
        "job job runs, and has told nothing of its stages for 20 s"
    )
    assert headline(replace(found, last=None), NOW) == "job job runs and has completed no checkpoint yet"


def test_watch_shows_it_again_and_json_is_one_line_a_look(job: SmallJob) -> None:
    job.checkpoint(1)
    looks = 0

    def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert seconds == 2
        if looks == 3:
            raise KeyboardInterrupt

    cli = Cli(job.root.uri, pause=pause)
    shown = cli("status", "--watch", "--output", "json", exits=1).stdout.splitlines()
    assert len([line for line in shown if line.startswith('{"root"')]) == 3
    looks = 0
    assert cli("status", "--watch", exits=1).stdout.count("job job does not run") == 3


@pytest.mark.parametrize("run", [RunId(1), RunId(9)])
def test_late_stages_of_another_run_are_not_taken(job: SmallJob, cli: Cli, run: RunId) -> None:
    job.checkpoint(1)
    job.come_alive()
    late = (Late(CheckpointId(2), StageId("a"), CALLS, True),)
    write_activity(job.root, RunActivity(run, NOW, (StageActivity(StageId("a")),), late))
    assert cli.json("status")["stages"][0]["waiting"] == (CALLS if run == job.run else "")


def test_the_settings_of_a_run_are_shown_also_after_its_end(job: SmallJob, cli: Cli) -> None:
    assert "\nsettings" not in cli("status").stdout
    row = HistoryRow(NOW, HistoryEvent.RUN_STARTED, job.attempt, job.run, settings="interval 30s, keep 5")
    History(job.root).append([row])
    assert cli.json("status")["settings"] == "interval 30s, keep 5"
    (line,) = (line for line in cli("status").stdout.splitlines() if line.startswith("settings"))
    assert line.split(maxsplit=1)[1].strip() == "interval 30s, keep 5"
