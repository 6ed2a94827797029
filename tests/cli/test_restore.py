"""Going back, on small real roots: every step, every crash, every refusal."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import spark_abs
from spark_abs.cli import restore as command
from spark_abs.errors import AttemptNotReady, CheckpointNotFound, DamageError, Fenced, Refused, RunAlive
from spark_abs.manifests.find import list_manifests
from spark_abs.model import AttemptId, Branch, CheckpointId, Version, counts
from spark_abs.observe.tables import table_at
from spark_abs.protocol.path import channel_path
from spark_abs.restore.apply import apply
from spark_abs.restore.prepare import prepare
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.snapshots.materialise import clear_ahead, materialise
from spark_abs.store.history import History, HistoryEvent
from tests.cli.conftest import Cli
from tests.root_support import CHANNEL, SmallJob, offsets_of, with_failpoint


class Killed(BaseException):
    """The process was killed at a named point."""


def kill_at(point: str) -> Any:
    def failpoint(name: str) -> None:
        if name == point:
            raise Killed(name)

    return failpoint


def points_of(job: SmallJob, to: str) -> list[str]:
    """Name every point that a restore passes, without restoring."""
    steps = prepare(job.root, to).plan.steps
    return [
        f"restore.{number}.{type(step).__name__}.{side}"
        for number, step in enumerate(steps, 1)
        for side in ("before", "after")
    ]


def restored_events(job: SmallJob) -> list[int]:
    rows = History(job.root).read().to_pylist()
    return [row["attempt"] for row in rows if row["event"] == HistoryEvent.RESTORED]


def test_everything_goes_back_together(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2, name="good")
    job.step(3)
    job.checkpoint(4)
    result = spark_abs.open(job.root.uri).restore("good")
    assert (result.plan.checkpoint, result.plan.attempt, result.plan.abandons) == (2, 2, (3,))
    assert job.rows() == [1, 2]
    state = job.state
    assert (state.attempt.ready, state.runs[-1].ended, result.run) == (True, "restored", 2)
    native = job.native(2, "b")
    assert native["offsets/1"] == offsets_of("b", 1)
    assert "query of b" not in native["metadata"]
    assert restored_events(job) == [2]
    job.start()
    job.step(5)
    assert job.rows() == [1, 2, 5]


def test_the_channel_keeps_its_log_and_the_path_says_what_counts(job: SmallJob) -> None:
    job.checkpoint(1)
    at_cut = job.step(2) - 1
    spark_abs.open(job.root.uri).restore(1)
    path = channel_path(job.state, CHANNEL)
    assert path == (Branch(AttemptId(1), Version(at_cut)), Branch(AttemptId(2), None))
    job.start()
    assert counts(path, AttemptId(2), Version(job.step(3)))
    assert not counts(path, AttemptId(1), Version(at_cut + 1))


def test_an_abandoned_checkpoint_can_be_gone_back_to(job: SmallJob) -> None:
    """Back to 1, on to 3, then back to the abandoned 2: undoing the first roll back."""
    job.checkpoint(1)
    job.checkpoint(2)
    spark_abs.open(job.root.uri).restore(1)
    job.start()
    job.checkpoint(3)
    assert job.rows() == [1, 3]
    plan = spark_abs.open(job.root.uri).restore(2).plan
    assert (plan.parent, plan.attempt, plan.abandons) == (1, 3, (3,))
    assert job.rows() == [1, 2]
    job.start()
    assert job.checkpoint(4) == 4
    assert spark_abs.open(job.root.uri).restore("latest").plan.checkpoint == 4


def test_the_replaced_run_can_commit_nothing_more(job: SmallJob) -> None:
    """A driver frozen before its commit, replaced by a restore, then continued."""
    job.checkpoint(1)
    barrier = job.claim()
    frozen = job.manifest(barrier, Version(1))
    job.come_alive()
    with pytest.raises(RunAlive, match=r"run 1 .* is alive"):
        spark_abs.open(job.root.uri).restore(1)
    spark_abs.open(job.root.uri).restore(1, force=True)
    with pytest.raises(Fenced):
        job.checkpoints.complete(frozen)
    with pytest.raises(Fenced):
        job.step(9)
    with pytest.raises(Fenced):
        job.writer.commit_end()
    with pytest.raises(Fenced):
        job.kept.store(barrier.id, job.root.fs, job.root.path("native/1/a"), [captured(job)])
    assert job.rows() == [1]
    assert [s.id for s in list_manifests(job.root, "job").completed] == [1]
    assert [(a.id, a.reason) for a in job.state.aborted] == [(2, "run-ended")]


def captured(job: SmallJob) -> Any:
    from spark_abs.snapshots.capture import CapturedFile

    file = Path(job.root.path("native/1/a/late"))
    file.write_text("late")
    info = job.root.fs.get_file_info(str(file))
    return CapturedFile("late", info.size, info.mtime_ns)


def test_killed_at_every_point_the_same_command_goes_on(job: SmallJob) -> None:
    """One job history walks all points: killed at each, `start` refused, the same restore finishes."""
    job.checkpoint(1)
    job.checkpoint(2)
    job.step(3)
    points = points_of(job, "1")
    assert len(points) > 15
    for number, point in enumerate(points):
        begun = "before" not in point or "BeginAttempt" not in point
        attempts = len(job.state.attempts)
        with pytest.raises(Killed):
            with_failpoint(job.root.uri, kill_at(point)).restore(1)
        done = point == points[-1]
        if begun and not done:
            with pytest.raises(AttemptNotReady, match=r"restore\(1\)"):
                job.start()
        if not done:
            assert spark_abs.open(job.root.uri).restore(1).plan.continues is begun
        assert job.rows() == [1], point
        assert len(job.state.attempts) == attempts + 1, point
        assert restored_events(job) == [a.id for a in job.state.attempts[1:]], point
        assert job.native(job.state.attempt.id, "a")["offsets/0"] == offsets_of("a", 0), point
        job.start()
        job.step(100 + number)
        assert job.rows() == [1, 100 + number], point


def test_another_target_gives_the_unfinished_restore_up(job: SmallJob) -> None:
    """Killed when the sink was back at checkpoint 1, a restore to 2 takes it forward again."""
    job.checkpoint(1)
    job.checkpoint(2)
    job.step(3)
    (point,) = [p for p in points_of(job, "1") if p.endswith("RestoreSink.after")]
    with pytest.raises(Killed):
        with_failpoint(job.root.uri, kill_at(point)).restore(1)
    assert job.rows() == [1]
    plan = spark_abs.open(job.root.uri).restore(2).plan
    assert (plan.attempt, plan.continues) == (3, False)
    assert job.rows() == [1, 2]
    job.start()
    job.step(4)
    assert job.rows() == [1, 2, 4]


def test_a_repeat_by_latest_finds_the_unfinished_one(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    with pytest.raises(Killed):
        with_failpoint(job.root.uri, kill_at("restore.2.FenceRoot.after")).restore(1)
    assert spark_abs.open(job.root.uri).restore("latest").plan.checkpoint == 1


def test_commands_that_nobody_answered_are_answered(job: SmallJob) -> None:
    from spark_abs.protocol import control as ledger
    from spark_abs.store.control import Control

    job.checkpoint(1)
    command = ledger.Command("c", ledger.CommandKind.STOP, None, 0)
    Control.open(job.root).update(lambda s: ledger.ask(s, command))
    spark_abs.open(job.root.uri).restore(1)
    (answered,) = job.state.commands
    assert (answered.answered, answered.ok) == (True, False)


def test_changes_of_others_to_a_sink_are_not_undone_unasked(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.step(2)
    DeltaTable(job.table).optimize.compact()
    write_deltalake(job.table, pa.table({"n": pa.array([77], pa.int64())}), mode="append")
    version = DeltaTable(job.table).version()
    with pytest.raises(Refused, match=rf"version {version}; .*pass force=\['rows'\] to accept that"):
        spark_abs.open(job.root.uri).restore(1)
    assert "pass --force rows to accept that" in cli("restore", "--to", "1", "--yes", exits=1).stderr
    with pytest.raises(Refused, match=r"pass force=\['rows'\]"):
        spark_abs.open(job.root.uri).restore(1)  # the command is over: a program is spoken to again
    assert job.state.attempt.id == 1
    spark_abs.open(job.root.uri).restore(1, force=True)
    assert job.rows() == [1]


def test_a_change_of_others_that_comes_while_it_goes_back_is_not_undone_either(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stood in the plan is looked at again, and the option is named again."""
    job.checkpoint(1)
    job.step(2)
    asked = DeltaSink.restore_to

    def late(sink: DeltaSink, *arguments: Any) -> None:
        write_deltalake(job.table, pa.table({"n": pa.array([77], pa.int64())}), mode="append")
        asked(sink, *arguments)

    monkeypatch.setattr(DeltaSink, "restore_to", late)
    said = cli("restore", "--to", "1", "--yes", exits=1).stderr
    assert "which a restore would undo; say --force rows if it may: version" in said
    assert job.rows() == [1, 2, 77]


def test_optimize_is_no_change(job: SmallJob) -> None:
    job.checkpoint(1)
    job.step(2)
    DeltaTable(job.table).optimize.compact()
    spark_abs.open(job.root.uri).restore(1)
    assert job.rows() == [1]


def test_a_sink_whose_old_files_are_gone_is_seen_before_anything_is_changed(job: SmallJob) -> None:
    job.checkpoint(1)
    DeltaTable(job.table).delete()
    for file in Path(job.table).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(DamageError, match="1 files of version"):
        spark_abs.open(job.root.uri).restore(1, force=True)
    assert job.state.attempt.id == 1


def test_a_sink_that_the_job_got_later_goes_back_to_where_it_was(job: SmallJob) -> None:
    from dataclasses import replace

    barrier = job.claim()
    version = Version(job.step(1, barrier=barrier))
    whole = job.manifest(barrier, version)
    without = replace(whole, stages=(whole.stages[0], replace(whole.stages[1], outputs=())))
    job.checkpoints.complete(without)
    job.checkpoint(2)
    spark_abs.open(job.root.uri).restore(1)
    assert job.rows() == []


def test_damage_is_refused_and_fallback_takes_the_newest_intact(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    job.checkpoint(3)
    manifest = next(Path(job.root.path("checkpoints")).glob("00000003-*.parquet"))
    data = bytearray(manifest.read_bytes())
    data[60] ^= 0xFF
    manifest.write_bytes(bytes(data))
    with pytest.raises(DamageError):
        spark_abs.open(job.root.uri).restore(3)
    with pytest.raises(DamageError):
        spark_abs.open(job.root.uri).restore("latest")
    assert job.state.attempt.id == 1
    plan = spark_abs.open(job.root.uri).restore("latest", fallback=True).plan
    assert plan.checkpoint == 2
    assert any("restores 2, the newest intact" in note for note in plan.notes)
    assert job.rows() == [1, 2]
    assert [f.name for f in Path(job.root.path("checkpoints/_damaged")).iterdir()] == [manifest.name]
    job.start()
    assert job.checkpoint(4) == 4
    assert [s.id for s in list_manifests(job.root, "job").completed] == [1, 2, 4]


def test_a_fallback_never_goes_forward(job: SmallJob) -> None:
    """What was wrong since the savepoint would come back with a later checkpoint."""
    job.checkpoint(1)
    job.checkpoint(2, name="before-release")
    job.checkpoint(3)
    manifest = next(Path(job.root.path("checkpoints")).glob("00000002-*.parquet"))
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:60] + bytes([whole[60] ^ 0xFF]) + whole[61:])
    for to in (2, "before-release"):
        with pytest.raises(DamageError):
            prepare(job.root, to)
        assert prepare(job.root, to, fallback=True).plan.checkpoint == 1
    manifest.write_bytes(whole)
    first = next(Path(job.root.path("checkpoints")).glob("00000001-*.parquet"))
    first.write_bytes(first.read_bytes()[:60])
    with pytest.raises(DamageError, match="no checkpoint before it"):
        prepare(job.root, 1, fallback=True)


def test_rows_of_two_roots_in_one_file_are_refused_before_anything_is_changed(
    job: SmallJob, tmp_path: Path
) -> None:
    job.checkpoint(1)
    job.step(2)
    other = SmallJob(tmp_path / "other", table=job.table)
    other.step(3)
    job.step(4)
    DeltaTable(job.table).optimize.compact()
    before = job.state
    for force in (False, True):
        with pytest.raises(Refused, match=r"b/totals .*as OPTIMIZE does.*newer than that"):
            spark_abs.open(job.root.uri).restore(1, force=force)
    assert (job.state, job.rows()) == (before, [1, 2, 3, 4])


def test_a_table_that_was_deleted_can_be_left_behind(job: SmallJob) -> None:
    job.checkpoint(1)
    job.step(2)
    shutil.rmtree(job.table)
    with pytest.raises(Refused, match=r"has lost its table.*rows"):
        spark_abs.open(job.root.uri).restore(1)
    plan = spark_abs.open(job.root.uri).restore(1, force=["rows"]).plan
    assert (plan.checkpoint, job.state.attempt.ready) == (1, True)


def test_nothing_intact_is_said(job: SmallJob) -> None:
    job.checkpoint(1)
    for pack in Path(job.root.path("state")).glob("pack-*.parquet"):
        pack.unlink()
    with pytest.raises(DamageError, match="no checkpoint before it on the current path is intact"):
        spark_abs.open(job.root.uri).restore(1, fallback=True)


def test_a_plan_is_void_when_the_job_has_moved_on(job: SmallJob) -> None:
    from spark_abs.restore.apply import apply

    job.checkpoint(1)
    prepared = prepare(job.root, 1)
    job.start()
    with pytest.raises(Refused, match="plan it again"):
        apply(job.root, prepared)


def test_the_newest_checkpoint_of_before_a_moment(job: SmallJob, cli: Cli) -> None:
    """Of the current path only: the abandoned checkpoint 2 was cut before 3, and does not count."""
    for value in (1, 2):
        job.checkpoint(value)
    spark_abs.open(job.root.uri).restore(1)
    job.start()
    for value in (3, 4):
        job.checkpoint(value)
    cut = {int(m.id): datetime.fromtimestamp(m.acked_ms / 1000, UTC) for m in job.checkpoints.load_all()}
    handle, just_before = spark_abs.open(job.root.uri), cut[3] - timedelta(milliseconds=1)
    assert handle.restore(cut[3], dry_run=True).plan.checkpoint == 3
    assert handle.restore(just_before.replace(tzinfo=None), dry_run=True).plan.checkpoint == 1
    with pytest.raises(
        CheckpointNotFound, match=r"no checkpoint of before 1970-01-01 .* on the current path"
    ):
        handle.restore(cut[1] - timedelta(milliseconds=1))
    said = cli.json("restore", "--before", cut[3].isoformat(), "--dry-run")
    assert said["plan"]["checkpoint"] == 3
    for wrong in ([], ["--to", "1", "--before", cut[3].isoformat()]):
        assert "give either --to or --before" in cli("restore", *wrong, exits=2).stderr
    assert "is no time such as" in cli("restore", "--before", "yesterday", exits=2).stderr
    cli("restore", "--before", just_before.isoformat(), "--yes")
    assert job.rows() == [1]


def test_unknown_targets(job: SmallJob) -> None:
    for target in (7, "never", "latest"):
        with pytest.raises(CheckpointNotFound):
            spark_abs.open(job.root.uri).restore(target)


def test_the_recorded_version_of_a_sink_is_what_it_held(job: SmallJob) -> None:
    job.checkpoint(1, name="one")
    job.checkpoint(2)
    at = table_at(job.root, "totals", "one")
    assert DeltaTable(at.table, version=at.version).to_pyarrow_table()["n"].to_pylist() == [1]
    spark_abs.open(job.root.uri).restore("one")
    job.start()
    job.checkpoint(3)
    at = table_at(job.root, "totals")
    assert sorted(DeltaTable(at.table, version=at.version).to_pyarrow_table()["n"].to_pylist()) == [1, 3]
    for name in ("mail", "nothing"):
        with pytest.raises(spark_abs.AbsError, match=name):
            table_at(job.root, name)


def test_the_plan_is_shown_and_nothing_changed_without_a_yes(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.step(2)
    for arguments, code in ((["--dry-run"], 0), ([], 2)):
        result = cli("restore", "--to", "1", *arguments, exits=code)
        assert "bring sink b/totals" in result.stdout
        assert "leave sink b/mail" in result.stdout
        plan = cli.json("restore", "--to", "1", *arguments, exits=code)
        assert plan["applied"] is False
        assert plan["plan"]["steps"][0]["says"].startswith("record attempt 2")
    assert (job.state.attempt.id, job.rows()) == (1, [1, 2])


def test_a_yes_carries_it_out(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.step(2)
    result = cli("restore", "--to", "1", "--yes")
    assert "restored to checkpoint 1 as attempt 2" in result.stdout
    assert (result.stdout + result.stderr).count("mark attempt 2 ready") == 1
    assert job.rows() == [1]
    assert cli.json("restore", "--to", "latest", "--yes")["run"] == 3


@pytest.mark.parametrize(("answer", "code", "attempt"), [("y\n", 0, 2), ("n\n", 2, 1)])
def test_at_a_terminal_it_asks(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, attempt: int
) -> None:
    from click.testing import CliRunner

    from spark_abs.cli.main import main

    job.checkpoint(1)
    monkeypatch.setattr(command, "at_terminal", lambda: True)
    result = CliRunner().invoke(main, ["restore", job.root.uri, "--to", "1"], input=answer)
    assert result.exit_code == code, result.output
    assert "Carry out this plan?" in result.stderr
    assert job.state.attempt.id == attempt


def test_refusals_have_their_exit_codes(job: SmallJob, cli: Cli) -> None:
    assert "latest" not in cli("restore", "--to", "9", "--yes", exits=1).stdout
    job.checkpoint(1)
    job.come_alive()
    assert "--force run" in cli("restore", "--to", "1", "--yes", exits=1).stderr
    result = cli("restore", "--to", "1", "--yes", "--output", "json", exits=1)
    assert '"RunAlive"' in result.stderr
    cli("restore", "--to", "1", "--yes", "--force")


def test_a_checkpoint_that_is_retired_after_the_plan_is_refused_and_nothing_is_changed(job: SmallJob) -> None:
    first, _ = job.checkpoint(1), job.checkpoint(2)
    prepared = prepare(job.root, first)
    job.checkpoints.retire((CheckpointId(first),), job.run)
    before = job.state
    with pytest.raises(CheckpointNotFound, match=r"retired while .* nothing was changed"):
        apply(job.root, prepared)
    assert job.state == before


def test_a_checkpoint_that_is_retired_as_its_restore_begins_is_refused_and_another_one_comes_back(
    job: SmallJob,
) -> None:
    """The run that is alive retires it before it is fenced; afterwards it could not any more."""
    first, second = job.checkpoint(1), job.checkpoint(2)
    job.step(3)

    def failpoint(name: str) -> None:
        if name == "restore.1.BeginAttempt.after":
            job.checkpoints.retire((CheckpointId(first),), job.run)

    with pytest.raises(CheckpointNotFound, match=r"retired while .* does not start until"):
        with_failpoint(job.root.uri, failpoint).restore(first)
    assert [attempt.ready for attempt in job.state.attempts] == [True, False]
    assert job.rows() == [1, 2, 3]
    spark_abs.open(job.root.uri).restore(second)
    assert job.state.attempt.ready
    assert job.rows() == [1, 2]


def ahead_of(job: SmallJob) -> list[str]:
    """What was written ahead and lies about."""
    return [p.name for p in Path(job.root.path("native")).glob("ahead-*")]


def test_every_byte_is_read_once_and_before_anything_is_changed(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step finds the native directories written; the restore reads no pack after that."""
    from spark_abs.snapshots.packs import PackReader

    job.checkpoint(1)
    job.step(2)
    (manifest,) = job.checkpoints.load_all()
    pieces, read = PackReader.pieces, list[str]()

    def reading(reader: PackReader, at: Any, sha256: str, size: int) -> Any:
        read.append(sha256)
        return pieces(reader, at, sha256, size)

    def failpoint(name: str) -> None:
        if name == "restore.1.BeginAttempt.before":
            assert sorted(read) == sorted(
                f.sha256 for s in manifest.stages for f in s.files if f.path != "metadata"
            )
            assert (job.state.attempt.id, job.rows(), len(ahead_of(job))) == (1, [1, 2], 1)
            read.clear()

    monkeypatch.setattr(PackReader, "pieces", reading)
    with_failpoint(job.root.uri, failpoint).restore(1)
    assert (job.rows(), read, ahead_of(job)) == ([1], [], [])


def test_killed_while_it_copies_nothing_has_happened_and_the_next_run_clears_up(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_abs.restore import prepare as module

    job.checkpoint(1)
    job.step(2)

    def dies(*args: Any, **kwargs: Any) -> None:
        materialise(*args, **kwargs)
        raise Killed

    monkeypatch.setattr("spark_abs.restore.restoring.Prestaged.discard", lambda _: None)
    monkeypatch.setattr(module, "materialise", dies)
    with pytest.raises(Killed):
        spark_abs.open(job.root.uri).restore(1)
    monkeypatch.undo()
    assert (job.state.attempt.id, job.state.attempt.ready, job.rows()) == (1, True, [1, 2])
    assert len(ahead_of(job)) == 1
    natives = job.root.place("native")
    clear_ahead(natives, job.run)
    assert len(ahead_of(job)) == 1  # somebody may be at work on it
    job.start()
    clear_ahead(natives, job.run)
    assert ahead_of(job) == []


def test_rows_that_an_earlier_restore_has_undone_are_not_said_to_go_again(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.step(2)
    job.step(3)
    shown = cli("restore", "--to", "1", "--dry-run").stdout
    assert "2 rows of this job go" in shown
    spark_abs.open(job.root.uri).restore(1)
    shown = cli("restore", "--to", "1", "--dry-run").stdout
    assert "0 rows of this job go" in shown


def test_a_dry_run_shows_its_plan_beside_a_run_that_is_alive(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    shown = cli("restore", "--to", "1", "--dry-run").stdout
    assert re.search(
        r"Note: run 1 is alive .* and goes on; to carry the plan out, stop it with `spark-abs", shown
    )
    (note,) = spark_abs.open(job.root.uri).restore(1, dry_run=True).plan.notes
    assert "run.stop() where it was started" in note
    assert "force=['run']" in note
    assert "will be fenced" in cli("restore", "--to", "1", "--dry-run", "--force", "run").stdout
    with pytest.raises(RunAlive):
        spark_abs.open(job.root.uri).restore(1)
    assert (job.state.attempt.id, len(job.state.runs)) == (1, 1)


def test_a_plan_that_is_not_carried_out_copies_nothing(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    before = sorted(Path(job.root.uri).rglob("*"))
    spark_abs.open(job.root.uri).restore(1, dry_run=True)
    cli("restore", "--to", "1", exits=2)
    assert sorted(Path(job.root.uri).rglob("*")) == before


def test_bytes_that_are_damaged_are_found_before_anything_is_changed(job: SmallJob) -> None:
    """Both ways end the same: an error that names the checkpoint, or the one before it."""
    job.checkpoint(1)
    job.checkpoint(2)
    manifests = job.checkpoints.load_all()
    first, second = ({f.at.pack for s in m.stages for f in s.files} for m in manifests)
    for pack in second - first:
        path = Path(job.root.path(f"state/{pack}"))
        data = bytearray(path.read_bytes())
        data[data.index(b'"batch": 1')] ^= 1
        path.write_bytes(bytes(data))
    with pytest.raises(DamageError, match=r"checkpoint 2 is damaged: state/pack.*verify ROOT 2"):
        spark_abs.open(job.root.uri).restore(2)
    assert (job.state.attempt.id, job.rows(), ahead_of(job)) == (1, [1, 2], [])
    assert spark_abs.open(job.root.uri).restore("latest", fallback=True).plan.checkpoint == 1
    assert (job.state.attempt.id, job.rows(), ahead_of(job)) == (2, [1], [])


def test_what_sweeping_moves_while_a_restore_copies_is_not_damage(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is alive goes on while it is about to be fenced."""
    from spark_abs.restore import prepare as module

    job.checkpoint(1)
    calls: list[int] = []

    def once(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise DamageError("moved")
        materialise(*args, **kwargs)

    monkeypatch.setattr(module, "materialise", once)
    spark_abs.open(job.root.uri).restore(1)
    assert len(calls) > 1
    assert job.state.attempt.ready
