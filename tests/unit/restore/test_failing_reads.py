"""A store that does not answer is not damage: no checkpoint is lost for it, and none is taken for another."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path

import pytest

import spark_abs
from spark_abs.errors import DamageError, StoreFailed
from spark_abs.manifests.find import list_manifests, lookup
from spark_abs.restore.apply import apply
from spark_abs.restore.prepare import prepare
from spark_abs.restore.steps import SetAside
from tests.channel_support import JOB
from tests.failing_storage import fail_reads
from tests.root_support import SmallJob


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    """A job with three checkpoints, of which the second is a savepoint."""
    made = SmallJob(tmp_path)
    made.checkpoint(1)
    made.checkpoint(2, name="kept")
    made.checkpoint(3)
    return made


def row_of(job: SmallJob, checkpoint: int) -> Path:
    """Return the file of a manifest."""
    (found,) = Path(job.root.path("checkpoints")).glob(f"{checkpoint:08}-*.parquet")
    return found


def completed(job: SmallJob) -> list[int]:
    return [s.id for s in list_manifests(job.root, JOB).completed]


@pytest.mark.parametrize(("to", "checkpoint"), [("kept", 2), ("latest", 3)])
def test_one_read_of_a_manifest_that_fails_loses_no_checkpoint(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, to: str, checkpoint: int
) -> None:
    """Whichever of the reads of the second manifest it is, and whichever checkpoint is wanted."""
    ends = []
    for number in count(1):
        reads = 0

        def fails(path: str, number: int = number) -> bool:
            nonlocal reads
            mine = "/checkpoints/00000002-" in path
            reads += mine
            return mine and reads == number

        with monkeypatch.context() as patched:
            fail_reads(patched, fails)
            try:
                ends.append(str(spark_abs.open(job.root.uri).restore(to, fallback=True).plan.checkpoint))
            except StoreFailed as error:
                ends.append(str(error).partition(": ")[0])
        assert completed(job) == [1, 2, 3], f"read {number}"
        if reads < number:
            break
    assert set(ends) == {str(checkpoint), "nothing was changed, try again"}
    assert not Path(job.root.path("checkpoints/_damaged")).exists()


@pytest.mark.parametrize("for_good", [False, True])
def test_a_restore_goes_to_no_other_checkpoint_because_a_read_has_failed(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    """Each read in turn, once and from then on; without `control/` nothing is chosen."""
    for number in count(1):
        reads = 0

        def fails(path: str, number: int = number) -> bool:
            nonlocal reads
            reads += "/control/" not in path
            return "/control/" not in path and (reads >= number if for_good else reads == number)

        with monkeypatch.context() as patched:
            fail_reads(patched, fails)
            try:
                prepared = prepare(job.root, "kept", fallback=True, writing=True)
            except StoreFailed:
                pass
            else:
                assert prepared.plan.name == "kept", f"read {number}"
                assert not any(isinstance(step, SetAside) for step in prepared.plan.steps), f"read {number}"
                assert prepared.prestaged is not None
                prepared.prestaged.discard()
        if reads < number:
            break
    assert number > 15


@pytest.mark.parametrize("table", ["control", "checkpoints", "state", "channels/a.main", "../lake/totals"])
def test_a_log_that_cannot_be_read_is_not_a_damaged_one(job: SmallJob, table: str) -> None:
    log = Path(job.root.path(table), "_delta_log", f"{2:020}.json")
    kept = log.rename(log.with_name("kept"))
    log.symlink_to(log)
    with pytest.raises(StoreFailed, match="nothing was changed, try again"):
        spark_abs.open(job.root.uri).restore("latest", fallback=True)
    log.unlink()
    if table != "../lake/totals":
        with pytest.raises(DamageError):
            spark_abs.open(job.root.uri).restore("latest")
    kept.rename(log)
    assert spark_abs.open(job.root.uri).restore("latest", fallback=True).plan.checkpoint == 3


def test_what_is_whole_when_it_would_be_set_aside_stays(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever was read when the restore was planned."""
    second, third = row_of(job, 2), row_of(job, 3)
    data = second.read_bytes()
    for row in (second, third):
        row.write_bytes(row.read_bytes()[:-30])
    prepared = prepare(job.root, 1)
    assert sum(isinstance(step, SetAside) for step in prepared.plan.steps) == 2
    second.write_bytes(data)
    with caplog.at_level(logging.WARNING, "spark_abs"):
        apply(job.root, prepared)
    assert f"checkpoints/{second.name} is no longer damaged: it stays where it is" in caplog.messages
    assert completed(job) == [1, 2]
    assert [file.name for file in second.parent.joinpath("_damaged").iterdir()] == [third.name]
    assert spark_abs.open(job.root.uri).restore("kept").plan.checkpoint == 2


def test_damage_of_one_manifest_does_not_hide_another(job: SmallJob) -> None:
    row_of(job, 3).write_bytes(row_of(job, 3).read_bytes()[:-30])
    assert lookup(job.root, "kept").manifest.id == 2
    (damaged,) = list_manifests(job.root, JOB).damaged
    assert damaged.id == 3
    with pytest.raises(DamageError, match="checkpoint 3 is damaged"):
        lookup(job.root, 3)
    row_of(job, 3).unlink()
    (damaged,) = list_manifests(job.root, JOB).damaged
    assert (damaged.id, damaged.error) == (3, "missing")
