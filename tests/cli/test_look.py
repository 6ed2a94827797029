"""Verbs that only look."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import spark_abs
from spark_abs.cli.main import main
from spark_abs.cli.output import moment
from spark_abs.manifest import Origin
from spark_abs.model import NO_ATTEMPT, AttemptId, BatchId, CheckpointId, RunId, StageId, Version
from spark_abs.protocol import control as ledger
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from tests.cli.conftest import Cli
from tests.root_support import SmallJob, with_failpoint


def test_list_shows_what_is_complete_and_marks_what_was_left_behind(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(2, name="before-upgrade")
    job.checkpoint(3)
    spark_abs.open(job.root.uri).restore("before-upgrade")
    job.start()
    job.checkpoint(4)
    rows = cli.json("list")
    assert [(r["id"], r["kind"], r["name"], r["attempt"], r["abandoned"]) for r in rows] == [
        (1, "checkpoint", None, 1, False),
        (2, "savepoint", "before-upgrade", 1, False),
        (3, "checkpoint", None, 1, True),
        (4, "checkpoint", None, 2, False),
    ]
    text = cli("list").stdout.splitlines()
    shown = ["id", "kind", "name", "attempt", "completed", "age", "duration", "new", "full"]
    assert text[0].split() == shown
    assert text[2].split()[:4] == ["2", "savepoint", "before-upgrade", "1"]
    assert text[2].split()[4:6] == moment(rows[1]["completed_ms"]).split()
    assert text[3].endswith("abandoned")


def test_list_shows_a_damaged_row_beside_the_others(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    (file,) = Path(job.root.path("checkpoints")).glob("00000001-*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    damaged, whole = cli.json("list")
    assert (damaged["id"], whole["id"], whole["damage"]) == (1, 2, None)
    assert file.name in damaged["damage"]
    assert "damaged" in cli("list").stdout


def test_a_newest_checkpoint_that_is_damaged_is_said_with_what_to_do(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    (file,) = Path(job.root.path("checkpoints")).glob("00000002-*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    said = cli("show", "latest", exits=3).stderr
    assert "the newest checkpoint may be damaged: 2 (" in said
    assert "see `spark-abs list ROOT` and name another checkpoint, or restore the newest" in said
    assert "with --fallback" in said
    assert "with --fallback" in cli("restore", "--to", "latest", exits=3).stderr


def test_a_new_root_has_nothing_to_list(job: SmallJob, cli: Cli) -> None:
    assert cli("list").stdout == "no checkpoint was completed yet\n"
    assert cli.json("list") == []


def test_show_takes_an_id_a_name_or_latest(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1, name="first")
    job.checkpoint(2)
    for asked, found in (("1", 1), ("first", 1), ("latest", 2)):
        assert cli.json("show", asked)["manifest"]["id"] == found
    text = cli("show", "first").stdout
    assert "'first'" in text
    assert job.table in text


def test_show_of_an_unknown_checkpoint_is_one_clear_line(job: SmallJob, cli: Cli) -> None:
    assert (
        cli("show", "7", exits=1).stderr
        == "spark-abs: job 'job' has no checkpoint '7': none is complete yet\n"
    )
    job.checkpoint(1)
    job.checkpoint(2, name="first")
    result = cli("show", "7", exits=1)
    assert result.stdout == ""
    assert result.stderr == (
        "spark-abs: job 'job' has no checkpoint '7': it has 1, 2 (first), see `spark-abs list ROOT`; "
        "others were retired, or never completed\n"
    )


def test_status_says_who_runs_and_what_is_open(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    dead = cli.json("status")
    assert (dead["alive"], dead["open"], dead["last"]["id"], dead["run"]["id"]) == (None, [], 1, 1)
    job.come_alive()
    job.claim("second")
    alive = cli.json("status")
    assert alive["alive"]["run"] == 1
    assert [(c["id"], c["kind"], c["name"]) for c in alive["open"]] == [(2, "savepoint", "second")]
    assert "2, savepoint 'second'" in cli("status").stdout
    assert alive["kept"] == len(cli.json("list"))
    assert "channels keep their logs since then" in cli("status").stdout


def test_status_tells_how_a_run_ended_and_what_it_was(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    assert (cli.json("status")["killed"], cli.json("status")["run"]["kind"]) == (True, "job")
    assert "killed, or its machine was lost" in cli("status").stdout
    job.come_alive()
    assert cli.json("status")["killed"] is False
    assert "at work" in cli("status").stdout
    spark_abs.open(job.root.uri).restore(1, force=["run"])
    shown = cli.json("status")
    assert (shown["killed"], shown["run"]["kind"], shown["run"]["ended"]) == (False, "restore", "restored")
    assert "2, a restore, begun" in cli("status").stdout
    job.start()
    Control.open(job.root).update(lambda s: ledger.end_run(s, job.run, "failed: stage 'a' failed"))
    assert "ended: failed: stage 'a' failed" in cli("status").stdout


def test_status_shows_how_far_each_stage_is(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    native = Path(job.root.path("native/1"))
    (native / "b" / "offsets" / "2").write_text("v1\n{}")
    stages = cli.json("status")["stages"]
    assert [(s["stage"], s["finished"], s["planned"], s["checkpoint"], s["cut"]) for s in stages] == [
        ("a", 1, 1, 2, 1),
        ("b", 1, 2, 2, 1),
    ]
    heading, *rows = cli("status").stdout.partition("\n\n")[2].splitlines()
    assert heading.split("  ")[0] == "stage"
    assert [row.split() for row in rows] == [
        ["a", "1", "0", "ms", "-", "2", "1", "-"],
        ["b", "1", "0", "ms", "2", "-", "-", "2", "1", "-"],
    ]
    shutil.rmtree(native)
    assert [s["finished"] for s in cli.json("status")["stages"]] == [None, None]


def test_a_stage_that_was_late_for_the_open_checkpoint_is_first(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()

    def late(checkpoint: int, stage: str, why: str) -> None:
        at, event = AttemptId(1), HistoryEvent.STAGE_WAITING
        row = HistoryRow(1, event, at, job.run, CheckpointId(checkpoint), stage=StageId(stage), detail=why)
        History(job.root).append([row])

    late(1, "a", "an outcome is known")
    late(job.claim().id, "b", "the barrier has not come out of a.main")
    stages = cli.json("status")["stages"]
    assert [(s["stage"], s["waiting"]) for s in stages] == [
        ("b", "the barrier has not come out of a.main"),
        ("a", ""),
    ]
    assert "late for the open checkpoint: the barrier has not come out of a.main" in cli("status").stdout


def test_a_last_manifest_that_cannot_be_read_is_said(job: SmallJob, cli: Cli) -> None:
    """Its flat columns can: only the column with its stages is damaged."""
    job.checkpoint(1)
    (file,) = Path(job.root.path("checkpoints")).glob("00000001-*.parquet")
    rows = pq.read_table(file)
    at = rows.schema.get_field_index("body")
    pq.write_table(rows.set_column(at, "body", pa.array(["{"])), file)
    found = cli.json("status")
    assert (found["last"]["id"], found["stages"]) == (1, [])
    assert found["last"]["damage"] in cli("status").stdout


def test_a_savepoint_that_an_edit_made_is_not_the_last_checkpoint_of_the_job(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    barrier = job.claim("edited")
    manifest = job.manifest(barrier, Version(job.step(2, barrier=barrier)))
    origin = Origin(job.attempt, CheckpointId(1))
    assert job.checkpoints.complete(replace(manifest, attempt=NO_ATTEMPT, edited=origin))
    assert [row["id"] for row in cli.json("list")] == [1, 2]
    found = cli.json("status")
    assert (found["last"]["id"], [s["checkpoint"] for s in found["stages"]]) == (1, [1, 1])


def test_status_says_which_stage_is_restarted_without_progress(job: SmallJob, cli: Cli) -> None:
    """Not of a batch that was finished since, nor of a run before."""

    def restarted(stage: str, batch: int, run: int) -> None:
        row = HistoryRow(
            batch,
            HistoryEvent.STAGE_RESTARTED,
            AttemptId(1),
            RunId(run),
            stage=StageId(stage),
            detail="OSError: full",
            batch=BatchId(batch),
            restarts=1,
        )
        History(job.root).append([row])

    job.checkpoint(1)
    job.come_alive()
    for stage, batch, run in (("b", 0, 7), ("b", 4, 1), ("b", 5, 1), ("b", 5, 1), ("a", 0, 1), ("a", 9, 1)):
        restarted(stage, batch, run)
    native = Path(job.root.path("native/1/a/commits"))
    native.mkdir(parents=True, exist_ok=True)
    (native / "9").write_text("v1\n{}")
    first, other = cli.json("status")["stages"]
    assert (first["stage"], first["restarts"]) == ("b", 3)
    assert first["failing"] == {"batch": 5, "restarts": 2, "cause": "OSError: full"}
    assert (other["stage"], other["restarts"], other["failing"]) == ("a", 2, None)
    said = "stage 'b' has been restarted 2 times without finishing batch 5: OSError: full"
    assert said in cli("status").stdout


def test_a_restore_by_an_earlier_version_is_told_by_its_end(job: SmallJob, cli: Cli) -> None:
    Control.open(job.root).update(lambda s: ledger.end_run(s, job.run, "restored"))
    assert cli.json("status")["run"]["kind"] == "restore"


def test_status_says_that_a_restore_is_unfinished(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    stop_at(job, "restore.3.")
    found = cli.json("status")
    assert (found["ready"], found["killed"], found["run"]["ended"]) == (
        False,
        False,
        "failed: KeyboardInterrupt",
    )
    assert "not finished" in cli("status").stdout
    assert spark_abs.open(job.root.uri).restore(1).plan.continues
    assert cli.json("status")["run"]["ended"] == "restored"


def test_status_says_why_a_restore_failed(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)

    def failpoint(name: str) -> None:
        if name.startswith("restore.3."):
            raise OSError("no room\n  at the store")

    with pytest.raises(OSError, match="no room"):
        with_failpoint(job.root.uri, failpoint).restore(1)
    assert "a restore, begun" in cli("status").stdout
    assert "ended: failed: no room" in cli("status").stdout


def stop_at(job: SmallJob, point: str) -> None:
    def failpoint(name: str) -> None:
        if name.startswith(point):
            raise KeyboardInterrupt

    try:
        with_failpoint(job.root.uri, failpoint).restore("latest")
    except KeyboardInterrupt:
        return
    raise AssertionError(f"no point {point}")


def test_history_keeps_the_order_and_a_limit(job: SmallJob, cli: Cli) -> None:
    for value in range(3):
        job.checkpoint(value)
    assert [r["checkpoint"] for r in cli.json("history")] == [1, 2, 3]
    assert [r["checkpoint"] for r in cli.json("history", "--limit", "2")] == [2, 3]
    assert "completed" in cli("history").stdout


def test_looking_writes_nothing(job: SmallJob, cli: Cli) -> None:
    before = sorted(Path(job.root.uri).rglob("*"))
    for command in ("list", "status", "history", "verify"):
        cli(command)
    cli("show", "1", exits=1)
    assert sorted(Path(job.root.uri).rglob("*")) == before


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["list", "--output", "json"], "Missing argument 'ROOT'."),
        (["list", "/none", "--bogus", "--output=json"], "No such option"),
        (["--output", "json", "lst"], "No such command 'lst'"),
        (["--bogus", "--output", "json"], "No such option"),
        (["history", "/none", "--limit", "many", "--output", "json"], "Invalid value for '--limit'"),
    ],
)
def test_what_click_refuses_is_json_too_if_that_is_wanted(call: list[str], said: str) -> None:
    result = CliRunner().invoke(main, call)
    assert (result.exit_code, result.stdout) == (2, "")
    error = json.loads(result.stderr)
    assert (error["error"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"].startswith(said)
    plain = [part for part in call if part not in ("--output", "json", "--output=json")]
    assert CliRunner().invoke(main, plain).stderr.startswith("Usage: ")


def test_a_place_without_a_job_is_a_wrong_call(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--output", "json", "list", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    error = json.loads(result.stderr)
    assert (error["error"], error["exit_code"]) == ("RootNotFound", 2)
    assert str(tmp_path) in error["message"]


def test_names_from_storage_do_not_command_a_terminal(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1, name="\x1b[2Jgone [bold]x")
    text = cli("list").stdout
    assert "\x1b" not in text
    assert "[bold]x" in text


WATCHED = """
import sys
started = []
sys.addaudithook(lambda event, _: started.append(event) if event in {
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"} else None)
from spark_abs.cli.main import main
main(sys.argv[1:], standalone_mode=False)
loaded = {name.partition(".")[0] for name in sys.modules} & {"pyspark", "py4j", "delta"}
sys.exit(f"loaded {loaded}, started {started}" if loaded or started else 0)
"""


def test_looking_neither_loads_spark_nor_starts_a_process(job: SmallJob) -> None:
    job.checkpoint(1)
    for arguments in (["list"], ["status"], ["history"], ["show", "1"], ["verify"]):
        call = [arguments[0], job.root.uri, *arguments[1:]]
        done = subprocess.run([sys.executable, "-c", WATCHED, *call], capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stderr)
