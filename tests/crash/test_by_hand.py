"""What somebody does to tables and input by hand, while the job runs or before it goes back.

| what                                      | promised                                                      |
|-------------------------------------------|---------------------------------------------------------------|
| OPTIMIZE; VACUUM that keeps what is young | nothing changes: the job goes on, every checkpoint comes back |
| VACUUM that keeps nothing, of a sink      | the job goes on; a restore after it is refused, files named  |
| … of a channel with unread entries        | the stage fails and names the file; the newest checkpoint     |
|                                           | comes back, since sources repeat what the channel has lost    |
| rows written to a sink                    | they stay; a restore that would undo them is refused unless   |
|                                           | forced                                                        |
| input files deleted                       | a restore that would read them again is refused unless forced |
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

import spark_abs
from spark_abs.errors import DamageError, Refused
from spark_abs.manifest import Manifest
from tests.crash.expected import Event, file_of
from tests.crash.facts import SINKS, check, check_complete, table
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

KEEP_ALL = {"keep": "100"}
CHANNELS = ("events.main", "events.orders", "pair.main")


@pytest.fixture
def job(first: DriverProcess, tmp_path: Path) -> Small:
    """A job that runs and has checkpoints."""
    small = Small(tmp_path)
    small.start(first, checkpoint=KEEP_ALL)
    small.run_until(first, lambda: len(small.completed()) >= 2, "checkpoints")
    return small


def tables(job: Small) -> list[Path]:
    return [*(job.base / s for s in SINKS), *(job.base / "root" / "channels" / c for c in CHANNELS)]


def more_checkpoints(job: Small, driver: DriverProcess) -> None:
    before = len(job.completed())
    job.run_until(driver, lambda: len(job.completed()) >= before + 2, "checkpoints after it")


def optimize(place: Path) -> None:
    """Rewrite small files into large ones; the job may commit meanwhile, then again."""
    while True:
        try:
            DeltaTable(str(place)).optimize.compact()
        except CommitFailedError:
            continue
        return


def files_of(place: Path) -> set[str]:
    return {file.name for file in place.rglob("*.parquet")}


def operations(place: Path) -> list[str]:
    return [commit["operation"] for commit in DeltaTable(str(place)).history()]


def vacuum(place: Path) -> None:
    DeltaTable(str(place)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


@pytest.mark.long
def test_tables_that_are_optimized_and_vacuumed_with_care_change_nothing(
    job: Small, first: DriverProcess
) -> None:
    """All of them by deltalake, and then a sink and a channel by Spark."""
    target = job.completed()[-1]
    sink, channel = job.base / "arrivals", job.base / "root" / "channels" / "events.main"
    for place in tables(job):
        optimize(place)
        DeltaTable(str(place)).vacuum(dry_run=False)
    more_checkpoints(job, first)
    for place in (sink, channel):
        while "oncurrent" in str(refused := first.sql(f"OPTIMIZE delta.`{place}`")):
            pass
        assert refused is None
        assert first.sql(f"VACUUM delta.`{place}`") is None
    for place in (sink, channel):
        assert [kind for kind in operations(place) if kind == "OPTIMIZE"] == ["OPTIMIZE"] * 2
    more_checkpoints(job, first)
    job.stop(first)
    check(job.base)
    spark_abs.open(job.root.uri).restore(target.id)
    assert job.rows() == job.rows(target)
    job.finish(first)
    check_complete(job.base, job.files)


def test_a_sink_vacuumed_to_the_bone_goes_on_and_a_restore_behind_it_is_refused(
    job: Small, first: DriverProcess
) -> None:
    job.stop(first)
    target = job.completed()[-1]
    optimize(job.base / "arrivals")
    vacuum(job.base / "arrivals")
    with pytest.raises(DamageError, match=r"sink events/arrivals .*: \d+ files of version \d+ are gone, as "):
        spark_abs.open(job.root.uri).restore(target.id)
    job.start(first, checkpoint=KEEP_ALL)
    more_checkpoints(job, first)
    job.stop(first)
    newest = job.completed()[-1]
    spark_abs.open(job.root.uri).restore(newest.id)
    job.finish(first)
    check_complete(job.base, job.files)


def test_a_channel_that_loses_unread_entries_is_named_and_the_newest_checkpoint_comes_back(
    first: DriverProcess, tmp_path: Path
) -> None:
    """The join has planned a batch and is about to read it."""
    job = Small(tmp_path)
    job.start(first, points=["batch.pair.files.before@later"])
    job.run_until(first, lambda: bool(first.at(tmp_path)), "a batch of the join that is planned")
    channel = tmp_path / "root" / "channels" / "events.main"
    held = files_of(channel)
    optimize(channel)
    vacuum(channel)
    first.go()
    assert job.end(first) == "StageFailed"
    said = first.message(tmp_path)
    assert "stage 'pair' failed in batch" in said
    assert "channels/events.main/data/" in said
    assert "spark-abs verify" in said

    job.finish(first, restart="checkpoint")
    check_complete(tmp_path, job.files, gone=held - files_of(channel))


def test_rows_that_somebody_wrote_to_a_sink_stay_and_a_restore_that_undoes_them_is_refused(
    job: Small, first: DriverProcess
) -> None:
    target = job.completed()[-1]
    strange = Event(-1, "stranger", "click", 0)
    place = str(job.base / "arrivals")
    write_deltalake(place, pa.Table.from_pylist([{**strange._asdict(), "token": ""}]), mode="append")
    more_checkpoints(job, first)
    job.stop(first)
    assert strange in table(job.base, "arrivals")
    with pytest.raises(Refused, match="others have changed rows since the checkpoint, in version"):
        spark_abs.open(job.root.uri).restore(target.id)
    assert strange in table(job.base, "arrivals")

    spark_abs.open(job.root.uri).restore(target.id, force=True)
    assert job.rows() == job.rows(target)
    job.finish(first, checkpoint={"keep": "1"})  # those that have the row are not kept
    check_complete(job.base, job.files)


def test_a_restore_that_would_read_deleted_input_again_is_refused(job: Small, first: DriverProcess) -> None:
    target = job.completed()[-1]
    more_checkpoints(job, first)
    job.stop(first)
    newest = job.completed()[-1]
    gone = job.base / "input" / f"{files_at(job, newest) - 1:06d}.json"
    assert files_at(job, target) < files_at(job, newest)
    kept = gone.rename(job.base / gone.name)
    with pytest.raises(Refused, match=f"input files read since checkpoint {target.id} .*{gone.name}"):
        spark_abs.open(job.root.uri).restore(target.id)
    # What was read before a checkpoint is not needed again.
    assert gone.name not in str(spark_abs.open(job.root.uri).restore(newest.id, dry_run=True).plan.notes)
    planned = spark_abs.open(job.root.uri).restore(target.id, dry_run=True, force=True).plan
    assert any(gone.name in note for note in planned.notes)

    kept.rename(gone)
    spark_abs.open(job.root.uri).restore(target.id)
    job.finish(first)
    check_complete(job.base, job.files)


def files_at(job: Small, manifest: Manifest) -> int:
    """Return how many files the source had read at a checkpoint."""
    at = {o.output: o.version for s in manifest.stages for o in s.outputs}
    return 1 + max(map(file_of, table(job.base, "arrivals", at["arrivals"])), default=-1)
