"""Talking to a running job: asked, waited for, answered, or said at once that nobody is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import spark_abs
from spark_abs.model import CheckpointId, StageId
from spark_abs.observe.client import asker
from spark_abs.protocol import control as ledger
from spark_abs.store.control import Control
from spark_abs.store.lease import own_lease, renew
from tests.cli.conftest import Cli
from tests.root_support import SmallJob, with_failpoint

Move = Callable[[], None]


class Acting:
    """Plays the running job: makes one move whenever the command pauses."""

    def __init__(self, *moves: Move) -> None:
        self.moves = list(moves)

    def __call__(self, _: float) -> None:
        assert self.moves, "the command goes on waiting although nothing more will come"
        self.moves.pop(0)()


def nothing() -> None:
    """Another look, and no answer yet."""


def answering(job: SmallJob, ok: bool, checkpoint: int | None, message: str = "") -> Move:
    def move() -> None:
        (asked,) = [c for c in job.state.commands if not c.answered]
        given = None if checkpoint is None else CheckpointId(checkpoint)
        Control.open(job.root).update(lambda s: ledger.answer(s, asked.id, ok, given, message))

    return move


def ending(job: SmallJob, how: str) -> Move:
    def move() -> None:
        Control.open(job.root).update(lambda s: ledger.end_run(s, job.run, how))
        renew(job.root, own_lease(job.run, 0), 0, ended=True)

    return move


def test_a_savepoint_is_asked_for_and_waited_for(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(nothing, answering(job, True, 7))
    assert cli("savepoint", "before-upgrade").stdout == "savepoint 'before-upgrade' is checkpoint 7\n"
    (asked,) = job.state.commands
    assert (asked.kind, asked.name) == (ledger.CommandKind.SAVEPOINT, "before-upgrade")


def test_the_answer_as_json(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(answering(job, True, 7))
    answer = cli.json("savepoint", "before-upgrade")
    assert (answer["ok"], answer["checkpoint"]) == (True, 7)


def test_a_no_is_an_error_with_the_reason(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(answering(job, False, None, "there is a savepoint 'twice' already"))
    assert "already" in cli("savepoint", "twice", exits=1).stderr


@pytest.mark.parametrize(
    "command",
    [
        ("savepoint", "s"),
        ("stop",),
        ("stop", "--savepoint", "s"),
        ("set", "timeout=5m"),
        ("checkpoint",),
        ("cancel", "7"),
        ("pause",),
        ("restart", "b"),
    ],
)
def test_nobody_is_asked_when_nobody_is_alive(job: SmallJob, cli: Cli, command: tuple[str, ...]) -> None:
    result = cli(*command, exits=1)
    assert "no run of job 'job' is alive: run 1 died" in result.stderr
    assert ("start the job first" in result.stderr) is (command[0] != "stop")
    assert job.state.commands == ()


def test_a_run_that_dies_meanwhile_is_not_waited_for(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(nothing, ending(job, "failed: out of memory"))
    said = cli("savepoint", "s", exits=1).stderr
    assert "run 1 ended (failed: out of memory) before it answered" in said


def test_a_job_that_fails_while_it_is_stopped_says_why(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(
        answering(job, True, None, "stopping"), ending(job, "failed: stage 'a' failed: no room")
    )
    assert "the job failed: stage 'a' failed: no room" in cli("stop", exits=1).stderr


def test_an_answer_given_just_before_the_end_counts(job: SmallJob, cli: Cli) -> None:
    job.come_alive()

    def both() -> None:
        answering(job, True, 7)()
        ending(job, "stopped")()

    cli.pause = Acting(both)
    cli("savepoint", "s")


def test_a_restore_meanwhile_is_said(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    cli.pause = Acting(lambda: void(spark_abs.open(job.root.uri).restore(1, force=True)))
    assert "the job was restored to checkpoint 1" in cli("savepoint", "s", exits=1).stderr


def void(_: object) -> None:
    """Drop a value."""


def test_stop_waits_for_the_end(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(answering(job, True, None, "stopping"), nothing, ending(job, "stopped"))
    assert cli("stop").stdout == "stopped\n"


def test_stop_says_as_json_how_the_run_ended(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    how = "stopped, while stage 'a' was failing"
    cli.pause = Acting(answering(job, True, None, "stopping"), ending(job, how))
    answer = cli.json("stop")
    assert (answer["ok"], answer["kind"], answer["ended"]) == (True, "stop", how)


def test_stop_with_a_savepoint_names_it(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(answering(job, True, 9), ending(job, "stopped"))
    assert cli("stop", "--savepoint", "last").stdout == "stopped; savepoint 'last' is checkpoint 9\n"
    assert job.state.commands[0].name == "last"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../x", "is not a name"),
        ("9a", "is not a name"),
        ("latest", "means the newest checkpoint"),
    ],
)
@pytest.mark.parametrize("command", [("savepoint",), ("stop", "--savepoint")])
def test_a_bad_name_is_refused_before_anybody_is_asked(
    job: SmallJob, cli: Cli, command: tuple[str, ...], name: str, why: str
) -> None:
    job.come_alive()
    assert why in cli(*command, name, exits=2).stderr
    assert job.state.commands == ()


def test_settings_are_sent_as_they_were_given_and_the_answer_is_shown(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(nothing, answering(job, True, None, "interval 10s -> 30s"))
    assert cli("set", "interval=30s", "min_pause=5s").stdout == "interval 10s -> 30s\n"
    (asked,) = job.state.commands
    assert (asked.kind, asked.settings) == (ledger.CommandKind.SET, {"interval": "30s", "min_pause": "5s"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("interval", "'interval' is not KEY=VALUE, such as interval=30s"),
        ("interval=soon", "setting interval: 'soon': expected a duration such as 500ms, 10s or 5m"),
        (
            "copy_threads=8",
            "'copy_threads' cannot be changed while a job runs; settings that can be changed: interval=10s",
        ),
    ],
)
def test_what_cannot_be_set_is_refused_before_anybody_is_asked(
    job: SmallJob, cli: Cli, change: str, said: str
) -> None:
    job.come_alive()
    assert said in cli("set", change, exits=2).stderr
    assert job.state.commands == ()


def test_during_a_restore_nobody_is_asked(job: SmallJob, cli: Cli) -> None:
    """The restoring process is alive, but it is no run that could answer."""
    job.checkpoint(1)
    told: list[str] = []

    def failpoint(name: str) -> None:
        if name == "restore.3.FenceRoot.before":
            told.append(cli("savepoint", "s", exits=1).stderr)

    with_failpoint(job.root.uri, failpoint).restore(1)
    assert "is being restored" in told[0]


def test_a_drain_is_asked_for_with_its_savepoint_and_not_without(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    assert "give --savepoint NAME" in cli("stop", "--drain", exits=2).stderr
    assert list(job.state.commands) == []
    cli.pause = Acting(answering(job, True, 7), ending(job, "drained, with savepoint 'last'"))
    assert (
        cli("stop", "--savepoint", "last", "--drain").stdout == "stopped; savepoint 'last' is checkpoint 7\n"
    )
    (asked,) = job.state.commands
    assert (asked.kind, asked.name, asked.drain) == (ledger.CommandKind.STOP, "last", True)


def test_a_savepoint_that_takes_longer_than_its_timeout_has_an_exit_code_of_its_own(
    job: SmallJob, cli: Cli
) -> None:
    job.come_alive()
    clock = iter(range(1_000_000, 2_000_000, 400))
    cli.now_ms, cli.pause = lambda: next(clock), lambda _: None
    assert "may still complete" in cli("savepoint", "slow", "--timeout", "2s", exits=4).stderr
    assert "expected a duration" in cli("savepoint", "slow", "--timeout", "2", exits=2).stderr


def asked(job: SmallJob) -> ledger.Command:
    return job.state.commands[-1]


def test_a_checkpoint_is_asked_for_with_who_asks(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(nothing, answering(job, True, 7, "completed"))
    assert cli("checkpoint").stdout == "checkpoint 7 is complete\n"
    assert (asked(job).kind, asked(job).by) == (ledger.CommandKind.CHECKPOINT, asker())


def test_a_cancel_says_what_became_of_the_checkpoint(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(answering(job, True, 7, "checkpoint 7 is cancelled"))
    assert cli("cancel", "7").stdout == "checkpoint 7 is cancelled\n"
    assert (asked(job).kind, asked(job).name) == (ledger.CommandKind.CANCEL, "7")
    said = "checkpoint 7 was completed before it could be cancelled"
    cli.pause = Acting(answering(job, False, 7, said))
    assert said in cli("cancel", "nightly", exits=1).stderr


def test_a_pause_names_sources_and_without_an_answer_says_that_it_may_still_come(
    job: SmallJob, cli: Cli
) -> None:
    job.come_alive()
    cli.pause = Acting(answering(job, True, None, "paused: clicks"))
    assert cli("pause", "clicks").stdout == "paused: clicks\n"
    assert (asked(job).kind, asked(job).stages) == (ledger.CommandKind.PAUSE, ("clicks",))
    clock = iter(range(1_000_000, 2_000_000, 20_000))
    cli.now_ms, cli.pause = lambda: next(clock), lambda _: None
    said = cli("pause", exits=1).stderr
    assert "no answer within 60 s: the run may still carry out pause; `spark-abs status" in said


def test_a_restart_of_a_stage_is_waited_for(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(nothing, answering(job, True, None, "stage 'b' runs again"))
    assert cli("restart", "b").stdout == "stage 'b' runs again\n"
    assert (asked(job).kind, asked(job).stages) == (ledger.CommandKind.RESTART, ("b",))


def test_files_are_skipped_by_a_live_run_and_shown(job: SmallJob, cli: Cli) -> None:
    job.come_alive()
    cli.pause = Acting(nothing, answering(job, True, None, "stage 'a' skips /in/7; stage 'a' runs again"))
    assert cli("skip-file", "a", "/in/7", "/in/8").stdout == "stage 'a' skips /in/7; stage 'a' runs again\n"
    assert (asked(job).kind, asked(job).stages) == (ledger.CommandKind.SKIP_FILE, ("a",))
    assert asked(job).files == ("/in/7", "/in/8")
    one = ledger.SkippedFile(StageId("a"), "file:///in/7", "ann@desk", job.clock_ms, job.run)
    files = [one, replace(one, file="file:///in/8"), replace(one, stage=StageId("c"))]
    Control.open(job.root).update(lambda s: ledger.skip(s, files))
    shown = [
        line.split(maxsplit=2)[2] for line in cli("status").stdout.splitlines() if "skipped files" in line
    ]
    assert [line.partition(", ")[0] for line in shown] == ["2 of stage a", "1 of stage c"]
    assert "the last file:///in/8, " in shown[0]
    assert cli.json("status")["skipped_files"][0]["file"] == "file:///in/7"


def test_files_are_skipped_while_nothing_runs_or_refused(job: SmallJob, cli: Cli) -> None:
    said = "has declared no stage yet: a file can be skipped once the batch that reads it has failed"
    assert said in cli("skip-file", "a", "/in/7", exits=2).stderr
    assert "Missing argument 'FILE...'" in cli("skip-file", "a", exits=2).stderr


def test_paused_sources_are_resumed_also_while_nothing_runs(job: SmallJob, cli: Cli) -> None:
    clicks, orders = StageId("clicks"), StageId("orders")
    control = Control.open(job.root)
    control.update(lambda s: ledger.pause(s, [clicks, orders], "ann@desk", 5))
    assert "PAUSED: clicks for " in cli("status").stdout.splitlines()[0]
    assert (
        "source 'totals' is not paused; paused are: clicks, orders" in cli("resume", "totals", exits=2).stderr
    )
    assert cli("resume", "clicks").stdout == "resumed: clicks; no run is alive\n"
    assert [one.stage for one in job.state.paused] == ["orders"]
    (row,) = [row for row in cli.json("history") if row["event"] == "command"]
    assert (row["kind"], row["stage"], row["reason"], row["by"]) == ("resume", "clicks", "done", asker())
    assert f"by {asker()}" in cli("history").stdout
    job.come_alive()
    cli.pause = Acting(answering(job, True, None, "resumed: orders"))
    assert cli("resume").stdout == "resumed: orders\n"
    assert (asked(job).kind, asked(job).stages) == (ledger.CommandKind.RESUME, ())


def test_a_resume_is_refused_if_a_run_begins_meanwhile(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run has read that the source is paused."""
    Control.open(job.root).update(lambda s: ledger.pause(s, [StageId("clicks")], "ann@desk", 5))

    def starting(*given: object) -> tuple[StageId, ...]:
        job.start()
        return (StageId("clicks"),)

    monkeypatch.setattr("spark_abs.observe.client.paused_of", starting)
    assert "a run began meanwhile" in cli("resume", exits=1).stderr
    assert [one.stage for one in job.state.paused] == ["clicks"]
