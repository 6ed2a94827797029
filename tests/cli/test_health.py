"""`doctor ROOT` and `health` against a small real root."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import spark_abs
from spark_abs.errors import AbortReason
from spark_abs.model import StageId
from spark_abs.store.activity import Longest, Phase, RunActivity, StageActivity, write_activity
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.lease import own_lease, write_lease
from tests.cli.conftest import Cli
from tests.cli.test_status import NOW, abort, tell
from tests.root_support import SmallJob

SLOW = StageActivity(
    StageId("b"),
    ended_ms=NOW - 2_000,
    last_ms=12_000,
    slowest_ms=13_000,
    longest=Longest(Phase.CALLING, "mail", 11_000),
)


def told(job: SmallJob, **given: object) -> None:
    activity = RunActivity(job.run, NOW, (SLOW,), settings={"interval_ms": "3000", "timeout_ms": "9000"})
    write_activity(job.root, replace(activity, **given))  # type: ignore[arg-type]


def keeps(job: SmallJob, number: int) -> None:
    """Let a run be alive that keeps so many checkpoints."""
    job.come_alive()
    write_activity(job.root, RunActivity(job.run, NOW, settings={"keep": str(number)}))


def test_the_doctor_of_a_job_says_what_is_wrong_and_what_to_type(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    told(job)
    abort(job, AbortReason.EXPIRED, AbortReason.EXPIRED)
    found = {one["kind"]: one for one in cli.json("doctor", exits=1)}
    assert {"checkpoints-aborted", "slow-sink", "interval-too-short"} <= found.keys()
    assert found["slow-sink"]["stage"] == "b"
    said = cli("doctor", exits=1).stdout
    assert "slow-sink: function 'mail' of stage b takes 11.0 s of a batch of 13.0 s;" in said
    assert f"    spark-abs set {job.root.uri} interval=26s\n" in said


def test_the_doctor_finds_nothing_in_a_job_in_order_and_tries_nothing_in_its_root(
    job: SmallJob, cli: Cli
) -> None:
    job.checkpoint(1)
    assert [one["kind"] for one in cli.json("doctor", exits=1)] == ["not-running"], "it was killed"
    job.stop()
    assert cli("doctor").stdout == "nothing is wrong with the job\n"
    assert cli.json("doctor") == []


def test_state_that_grows_is_seen_over_the_checkpoints_of_the_run(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)

    def acked(number: int) -> HistoryRow:
        size = (10 + 10 * number) * 1024**2
        at, event = job.clock_ms + 60_000 * number, HistoryEvent.STAGE_ACKED
        ids = {"checkpoint": number, "stage": StageId("b"), "size_full": size}
        return HistoryRow(at, event, job.attempt, job.run, **ids)  # type: ignore[arg-type]

    History(job.root).append([acked(number) for number in range(10)])
    job.stop()
    (found,) = cli.json("doctor", exits=1)
    assert found["kind"] == "growing-state"
    assert "from 10.0 MB in checkpoint 0 to 100.0 MB in checkpoint 9, in 9.0 min" in found["said"]


def test_a_restore_that_took_longer_than_checkpoints_are_kept(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    row = HistoryRow(job.clock_ms, HistoryEvent.RESTORED, job.attempt, job.run, duration_ms=600_000)
    History(job.root).append([row])
    keeps(job, 3)
    assert cli.json("doctor") == [], "the job is young"
    keeps(job, 2)
    (found,) = cli.json("doctor", exits=1)
    assert (found["kind"], "the last restore took 10.0 min" in found["said"]) == ("retention-too-short", True)


def test_a_real_restore_of_checkpoints_of_a_moment_is_one_that_takes_longer(job: SmallJob, cli: Cli) -> None:
    """The checkpoints are milliseconds apart."""
    job.checkpoint(1)
    job.checkpoint(2)
    spark_abs.open(job.root.uri).restore(2)
    keeps(job, 2)
    said = [one["said"] for one in cli.json("doctor", exits=1) if one["kind"] == "retention-too-short"]
    assert re.match(
        r"The checkpoints that are kept reach back \d+ ms \(keep=2\), and the last restore ", said[0]
    )


def test_a_lease_that_is_renewed_while_the_doctor_reads_has_no_wrong_clock(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.checkpoint(1)
    write_lease(job.root, own_lease(job.run, NOW + 20_000))
    (found,) = cli.json("doctor", exits=1)
    assert " s ahead of this machine's" in found["said"]
    reads = iter((5_000, 25_000))
    monkeypatch.setattr("spark_abs.diagnosis.gather.steady_ms", lambda: next(reads))
    assert cli.json("doctor") == []


def test_health_is_an_exit_code_and_one_line(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    assert cli("health", exits=1).stdout == "unhealthy: no run is alive: it was killed\n"
    job.come_alive()
    tell(job)
    healthy = cli("health", "--max-age", "1h", "--max-lag", "1m").stdout
    assert healthy.startswith("healthy: checkpoint 1, ")
    assert healthy.endswith("old, lag 30.0 s\n")
    late = cli("health", "--max-lag", "10s", exits=1).stdout
    assert late == "unhealthy: stage b is 30.0 s behind, more than 10.0 s are too many\n"
    found = cli.json("health", "--max-age", "5m", exits=1)
    assert (found["healthy"], found["stage"], found["lag_ms"], found["checkpoint"]) == (False, "b", 30_000, 1)
    assert "more than 5.0 min are too many" in found["problems"][0]
    assert "--max-age" in cli("health", "--max-age", "soon", exits=2).stderr
