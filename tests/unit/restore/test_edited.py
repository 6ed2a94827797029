"""An edited savepoint among the others: one commit makes it, no path leads over it before a restore."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import CheckpointNotFound, CommitStateUnknown, DamageError, Fenced, Refused, RunAlive
from spark_abs.manifest import Manifest, Origin, StageSnapshot
from spark_abs.manifests.find import lookup
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_ATTEMPT, CheckpointKind, RunId, StageId
from spark_abs.observe.listing import checkpoint_rows
from spark_abs.observe.progress import SILENT
from spark_abs.observe.verification import require_intact
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.restore import edit as module
from spark_abs.restore.edit import StageChange, write_edited
from spark_abs.snapshots.materialise import make_directory, passing_place, put
from spark_abs.store.control import Control
from spark_abs.store.history import History
from spark_abs.store.storage import Place
from tests.root_support import SmallJob

SESSION: Any = SimpleNamespace(sparkContext=SimpleNamespace(master="local[1]"))


def same(*_: Any, snapshot: object, **__: Any) -> StageSnapshot:
    """Stands in for Spark: the state stays what it is."""
    assert isinstance(snapshot, StageSnapshot)
    return replace(snapshot, size_new=1)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallJob:
    monkeypatch.setattr(module, "rewrite_stage", same)
    return SmallJob(tmp_path)


def edited(job: SmallJob, of: int, name: str = "corrected") -> int:
    manifest = lookup(job.root, of).manifest
    changes = {StageId("a"): StageChange({0: None}, {}, {})}
    return int(
        write_edited(SESSION, job.root, manifest=manifest, changes=changes, name=name, progress=SILENT)
    )


def test_what_a_killed_edit_has_left_is_swept_by_the_next_edit_and_by_a_restore(job: SmallJob) -> None:
    """Also among native checkpoints that are elsewhere by now."""
    first = job.checkpoint(1)
    natives, elsewhere = job.root.place("native"), Place(f"{job.root.uri}-elsewhere/natives")

    def leave(place: Place) -> Path:
        left = passing_place(place, job.state.runs[-1].id)
        make_directory(left, "target")
        put(left, "target/metadata", [b"x"])
        return Path(left.path)

    left = leave(natives)
    edited(job, first)
    assert not left.exists()
    here, there = leave(natives), leave(elsewhere)
    moved = Control.open(job.root)
    moved.update(lambda s: replace(s, attempts=(replace(s.attempt, natives=elsewhere.uri),)))
    spark_abs.open(job.root.uri).restore(first, native_root="")
    assert (here.exists(), there.exists()) == (False, False)


def test_it_is_a_savepoint_and_on_no_path(job: SmallJob) -> None:
    first, second = job.checkpoint(1), job.checkpoint(2)
    written = edited(job, first)
    manifest = lookup(job.root, "corrected").manifest
    assert (manifest.id, manifest.attempt, manifest.kind) == (written, NO_ATTEMPT, CheckpointKind.SAVEPOINT)
    assert manifest.edited == Origin(job.attempt, lookup(job.root, first).manifest.id)
    assert [s.size_new for s in manifest.stages] == [1, 0]
    assert lookup(job.root, "latest").manifest.id == second
    assert [(r.id, r.abandoned, r.edited) for r in checkpoint_rows(job.root, 0)] == [
        (first, False, False),
        (second, False, False),
        (written, False, True),
    ]
    shown = CliRunner().invoke(main, ["list", job.root.uri])
    assert shown.stdout.splitlines()[-1].endswith("edited")
    shown = CliRunner().invoke(main, ["show", job.root.uri, "corrected"])
    assert f"made from checkpoint {first} of attempt 1 by an edit" in shown.stdout
    assert job.state.claims == ()
    told = [(r["event"], r["checkpoint"]) for r in History(job.root).read().to_pylist()]
    assert told[-2:] == [("triggered", written), ("completed", written)]


def test_the_job_goes_on_beside_it_as_if_it_were_not_there(job: SmallJob) -> None:
    first = job.checkpoint(1)
    written, batch = edited(job, first), job.batch
    job.start()
    job.batch = batch
    third = job.checkpoint(3)
    assert third == written + 1
    assert lookup(job.root, "latest").manifest.id == third
    spark_abs.open(job.root.uri).restore("latest")
    assert job.rows() == [1, 3]


def test_a_restore_goes_to_it_and_the_path_leads_over_it_from_then_on(job: SmallJob) -> None:
    """Checkpoints between the original and the edit are left behind, although their ids are lower."""
    first, second = job.checkpoint(1), job.checkpoint(2)
    written = edited(job, first)
    plan = spark_abs.open(job.root.uri).restore("corrected").plan
    assert (plan.parent, plan.checkpoint, plan.abandons) == (1, written, (second,))
    assert (job.state.attempt.base, job.rows()) == (first, [1])
    assert lookup(job.root, "latest").manifest.id == written
    job.start()
    third = job.checkpoint(3)
    assert job.rows() == [1, 3]
    marks = {int(r.id or 0): r.abandoned for r in checkpoint_rows(job.root, 0)}
    assert marks == {first: False, second: True, written: False, third: False}
    # An edit of an edit has the cut of the first.
    again = lookup(job.root, edited(job, written, "again")).manifest
    assert again.edited == lookup(job.root, written).manifest.edited
    spark_abs.open(job.root.uri).restore("again")
    assert (job.state.attempt.parent, job.state.attempt.base, job.rows()) == (1, first, [1])
    spark_abs.open(job.root.uri).restore(second)
    assert job.rows() == [1, 2]


def test_a_job_that_runs_is_left_alone(job: SmallJob) -> None:
    first = job.checkpoint(1)
    job.come_alive()
    before = job.state
    with pytest.raises(RunAlive, match="stop the job"):
        edited(job, first)
    assert job.state == before
    job.checkpoint(2)


def test_a_name_is_given_once(job: SmallJob) -> None:
    first = job.checkpoint(1, name="mine")
    with pytest.raises(Refused, match="has a savepoint 'mine'"):
        edited(job, first, "mine")


def test_what_fails_leaves_an_aborted_id_and_nothing_else(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> StageSnapshot:
        raise OSError("no power")

    first = job.checkpoint(1)
    monkeypatch.setattr(module, "rewrite_stage", fails)
    with pytest.raises(OSError, match="no power"):
        edited(job, first)
    assert [(a.id, a.detail) for a in job.state.aborted] == [
        (first + 1, "the edit failed: OSError: no power")
    ]
    told = [(r["event"], r["checkpoint"], r["reason"]) for r in History(job.root).read().to_pylist()]
    assert told[-1] == ("aborted", first + 1, "declined")
    with pytest.raises(CheckpointNotFound):
        lookup(job.root, "corrected")
    monkeypatch.setattr(module, "rewrite_stage", same)
    assert edited(job, first) == first + 2


def test_an_edit_that_was_replaced_writes_nothing(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*given: Any, **named: Any) -> StageSnapshot:
        job.start()
        return same(*given, **named)

    first = job.checkpoint(1)
    monkeypatch.setattr(module, "rewrite_stage", meanwhile)
    with pytest.raises(Fenced):
        edited(job, first)
    with pytest.raises(CheckpointNotFound):
        lookup(job.root, "corrected")
    assert job.checkpoint(2) == first + 2


def test_a_killed_edit_is_cleared_away_by_the_next_run(job: SmallJob) -> None:
    first = job.checkpoint(1)
    control = Control.open(job.root)
    run = control.update(lambda s: ledger.begin_run(s, "here", 1, 0)).runs[-1].id
    control.update(
        lambda s: ledger.claim(s, RunId(run), kind=CheckpointKind.SAVEPOINT, name="corrected", now_ms=0)[0]
    )
    job.start()
    assert (job.state.claims, [a.id for a in job.state.aborted]) == ((), [first + 1])
    assert [s.id for s in Checkpoints.open(job.root, job.state.job).summaries()] == [first]


def test_a_damaged_original_is_not_edited(job: SmallJob) -> None:
    first = job.checkpoint(1)
    for pack in Path(job.root.uri, "state").glob("pack-*"):
        pack.write_bytes(pack.read_bytes()[:-40])
    before = job.state
    with pytest.raises(DamageError, match="is damaged"):
        edited(job, first)
    assert job.state == before


def test_a_job_that_begins_while_rows_are_computed_goes_on(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: Any) -> None:
        job.start()
        require_intact(*given)

    first = job.checkpoint(1)
    monkeypatch.setattr(module, "require_intact", meanwhile)
    with pytest.raises(Refused, match=f"run {job.run + 1} .* has begun meanwhile"):
        edited(job, first)
    assert job.checkpoint(2) == first + 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, CommitStateUnknown])
def test_a_manifest_that_is_in_is_not_called_aborted(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    complete = Checkpoints.complete

    def unheard(self: Checkpoints, manifest: Manifest) -> bool:
        complete(self, manifest)
        raise error

    first = job.checkpoint(1)
    monkeypatch.setattr(Checkpoints, "complete", unheard)
    with suppress(KeyboardInterrupt):
        assert edited(job, first) == first + 1
    assert lookup(job.root, "corrected").manifest.id == first + 1
    assert (job.state.claims, job.state.aborted) == ((), ())


def test_what_was_asked_of_an_edit_is_not_left_to_the_job(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*given: Any, **named: Any) -> StageSnapshot:
        stop = Command("stop it", CommandKind.STOP, None, 0)
        Control.open(job.root).update(lambda s: ledger.ask(s, stop))
        return same(*given, **named)

    first = job.checkpoint(1)
    before = Command("before", CommandKind.SAVEPOINT, "mine", 0)
    Control.open(job.root).update(lambda s: ledger.ask(s, before))
    monkeypatch.setattr(module, "rewrite_stage", asked)
    edited(job, first)
    assert [(c.id, c.answered, c.ok) for c in job.state.commands] == [
        ("before", False, False),
        ("stop it", True, False),
    ]


def test_an_edit_that_the_path_leads_over_is_not_left_behind(job: SmallJob) -> None:
    first = job.checkpoint(1)
    written = edited(job, first)
    spark_abs.open(job.root.uri).restore("corrected")
    job.start()
    second, third = job.checkpoint(2), job.checkpoint(3)
    assert spark_abs.open(job.root.uri).restore(second, dry_run=True).plan.abandons == (third,)
    assert spark_abs.open(job.root.uri).restore(first, dry_run=True).plan.abandons == (written, second, third)
