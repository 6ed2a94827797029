"""A job whose `state/` loses packs: what the next checkpoints need is in the native checkpoints still."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.errors import DamageError, Refused
from spark_abs.job import Job
from spark_abs.model import StageId
from spark_abs.snapshots.verify import verify_state
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually, manifests, read_table
from tests.spark.conftest import Start


def test_one_checkpoint_is_aborted_and_the_next_copies_a_lost_pack_anew(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """A run that finds packs lost at its start aborts none."""
    root, table, feed = str(tmp_path / "root"), tmp_path / "unique", Feed(spark, tmp_path / "in", "id long")
    passed: list[str] = []

    def job() -> Job:
        job = Job("losing", root=root, spark=spark, interval="1h")
        job.failpoint = passed.append
        numbers = job.source("numbers", feed.stream())
        job.sink(
            "unique", job.stage("unique", [numbers], lambda f: f.dropDuplicates(["id"])), table=str(table)
        )
        return job

    def write() -> None:
        before = 3 * len(feed.files)
        feed.write(*({"id": before + n} for n in range(3)), {"id": 0})
        eventually(run, lambda: read_table(table).num_rows == before + 3, "all rows through")

    def lose(checkpoint: int) -> None:
        """Lose all that a checkpoint has of the stage with state."""
        (manifest,) = (m for m in manifests(root) if m.id == checkpoint)
        snapshot = manifest.stage(StageId("unique"))
        assert snapshot is not None
        for pack in {file.at.pack for file in snapshot.files}:
            Path(root, "state", pack).unlink(missing_ok=True)

    def damaged() -> list[int]:
        return [int(m.id) for m in manifests(root) if verify_state(Root(root), [m])]

    run = start(job())
    write()
    run.savepoint("first")
    eventually(run, lambda: passed.count("tidy.sweep.after") == 1, "the end of a clean-up")
    lose(1)
    write()
    with pytest.raises(Refused, match="state-missing"):
        run.checkpoint()
    (aborted,) = Control.open(Root(root)).state.aborted
    assert aborted.detail.startswith("gone from state/: ")
    assert aborted.detail.endswith(" of unique; see `spark-abs verify`")
    assert run.checkpoint() == 3
    assert damaged() == [1]
    eventually(run, lambda: passed.count("tidy.sweep.after") == 2, "the end of another clean-up")
    run.stop()

    lose(3)
    assert damaged() == [1, 3]
    run = start(job())
    write()
    assert run.checkpoint() == 4
    assert damaged() == [1, 3]
    run.stop()
    with pytest.raises(DamageError, match="spark-abs"):
        spark_abs.open(root).restore(3)
    spark_abs.open(root).restore(4)
    run = start(job())
    write()
    run.stop()
    assert sorted(read_table(table)["id"].to_pylist()) == list(range(3 * len(feed.files)))
