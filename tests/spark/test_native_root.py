"""Native checkpoints on a disk of their own: lost, old, moved, and not seen by executors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.job import Job
from spark_abs.plan.specs import Restart
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.job_support import Feed, read_table

ROWS = 4


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    feed = Feed(spark, tmp_path / "in", "id long, k long")
    feed.write_all([{"id": 2 * n, "k": 0}, {"id": 2 * n + 1, "k": 1}] for n in range(ROWS))
    return feed


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, feed: Feed) -> Callable[..., Job]:
    """Declares the job: rows pass a channel and are counted by key."""

    def declare(native_root: Path | None = tmp_path / "disk") -> Job:
        made = Job(
            "counts",
            root=str(tmp_path / "root"),
            spark=spark,
            native_root=None if native_root is None else str(native_root),
        )
        rows = made.source("rows", feed.stream())
        made.sink(
            "counts",
            made.stage("counts", [rows], lambda f: f.groupBy("k").count(), output_mode="update"),
            table=str(tmp_path / "counts"),
        )
        return made

    return declare


def run(job: Job, restart: Restart = "native") -> None:
    job.start(available_now=True, restart=restart).await_termination()


def counts(tmp_path: Path) -> dict[int, int]:
    """Return the last count of each key: counts only grow."""
    rows = read_table(tmp_path / "counts").to_pylist()
    return {row["k"]: row["count"] for row in sorted(rows, key=lambda row: int(row["count"]))}


def test_a_lost_disk_an_old_one_and_another_one(job: Callable[..., Job], feed: Feed, tmp_path: Path) -> None:
    disk, root = tmp_path / "disk", Root(str(tmp_path / "root"))
    run(job())
    (natives,) = disk.iterdir()
    assert natives.name.startswith("counts-")
    assert Control.open(root).state.attempt.natives == str(natives)
    assert sorted(p.name for p in (natives / "1").iterdir()) == ["counts", "rows"]
    assert not (tmp_path / "root" / "native").exists()
    assert CliRunner().invoke(main, ["verify", root.uri]).exit_code == 0

    old = shutil.copytree(disk, tmp_path / "old")
    feed.write({"id": 100, "k": 0})
    run(job())
    assert counts(tmp_path) == {0: ROWS + 1, 1: ROWS}

    shutil.rmtree(disk)
    with pytest.raises(DamageError, match=r"(?s)is missing.*restart='checkpoint'"):
        run(job())
    shutil.rmtree(disk)
    shutil.copytree(old, disk)
    with pytest.raises(DamageError, match=r"(?s)it is an old copy.*restart='checkpoint'"):
        run(job())

    shutil.rmtree(disk)
    with pytest.raises(Refused, match="cannot be seen from this machine"):
        spark_abs.open(root.uri).restore(to="latest")
    feed.write({"id": 101, "k": 1})
    run(job(), "checkpoint")
    assert counts(tmp_path) == {0: ROWS + 1, 1: ROWS + 1}
    assert [p.name for p in natives.iterdir()] == ["2"]

    with pytest.raises(
        UsageError, match=r"(?s)attempt 2 are in .*disk.*native_root is now native: give native_root"
    ):
        run(job(None))
    other = tmp_path / "other"
    spark_abs.open(root.uri).restore(to="latest", native_root=str(other))
    feed.write({"id": 102, "k": 0})
    run(job(other))
    assert counts(tmp_path) == {0: ROWS + 2, 1: ROWS + 1}
    assert [p.name for p in (other / natives.name).iterdir()] == ["3"]

    feed.write({"id": 103, "k": 1})
    run(job(None), "checkpoint")
    assert counts(tmp_path) == {0: ROWS + 2, 1: ROWS + 2}
    assert (tmp_path / "root" / "native" / "4" / "counts").is_dir()


@pytest.fixture
def seen_by_the_driver_only(tmp_path: Path) -> Iterator[Path]:
    """A directory under a name that means something else, or nothing, in every other process."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    opened = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
    yield Path(f"/proc/self/fd/{opened}")
    os.close(opened)


def test_a_disk_that_executors_do_not_see_is_refused(
    job: Callable[..., Job], seen_by_the_driver_only: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"is not on a shared disk: executors on .* cannot read"):
        run(job(seen_by_the_driver_only / "natives"))
    assert not (tmp_path / "root").exists()
    assert list((tmp_path / "hidden" / "natives").iterdir()) == []
    run(job(tmp_path / "disk"))
    assert counts(tmp_path) == {0: ROWS, 1: ROWS}


def test_a_place_that_cannot_be_written_is_refused(job: Callable[..., Job]) -> None:
    with pytest.raises(UsageError, match="the driver cannot write to /proc/"):
        run(job(Path("/proc/natives")))


def test_wrapped_queries_have_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="native_root is for jobs"):
        spark_abs.foreach_batch(print, root=str(tmp_path), stage="a", native_root="/disk")
