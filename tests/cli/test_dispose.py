"""Savepoints that are removed: what is left, what is refused, and what a clean-up then frees."""

from __future__ import annotations

from functools import partial

import pytest

import spark_abs
from spark_abs.errors import CheckpointNotFound, Refused
from spark_abs.manifests.find import list_manifests
from spark_abs.model import ChannelId, CheckpointId
from spark_abs.snapshots.retention import channel_floors
from spark_abs.snapshots.sweep import sweep
from spark_abs.store.history import History
from tests.channel_support import JOB
from tests.cli.conftest import Cli
from tests.root_support import CHANNEL, SmallJob


def left(job: SmallJob) -> list[int]:
    return [s.id for s in list_manifests(job.root, JOB).completed]


def floor(job: SmallJob) -> int:
    return channel_floors(job.checkpoints.load_all(), {ChannelId(CHANNEL): ()})[CHANNEL]


def test_a_savepoint_is_removed_and_what_only_it_needed_with_it(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1, name="old")
    job.checkpoint(2)
    for number in (1, 2):
        job.kept.unpin(CheckpointId(number), completed=True)
    assert sweep(job.kept, job.checkpoints.load_all).packs == 0
    before = floor(job)
    assert "nothing was changed" in cli("dispose", "old", exits=2).stderr
    assert cli.json("dispose", "old", "--yes") == {"checkpoint": 1, "name": "old"}
    assert left(job) == [2]
    assert floor(job) > before
    assert sweep(job.kept, job.checkpoints.load_all).packs > 0
    rows = History(job.root).read().to_pylist()
    assert [(r["event"], r["checkpoint"], r["name"]) for r in rows][-1] == ("retired", 1, "old")
    assert "no checkpoint 'old'" in cli("dispose", "old", "--yes", exits=1).stderr
    assert job.checkpoint(3) == 3  # the run goes on


def test_what_the_job_may_need_is_not_removed(job: SmallJob) -> None:
    root = spark_abs.open(job.root.uri)
    job.checkpoint(1)
    job.checkpoint(2, name="kept")
    with pytest.raises(Refused, match="1 is a checkpoint and no savepoint"):
        root.dispose(1)
    with pytest.raises(Refused, match="2 is the newest checkpoint of the job"):
        root.dispose("kept")
    with pytest.raises(CheckpointNotFound):
        root.dispose("never")
    job.checkpoint(3)
    restore = partial(spark_abs.open(job.root.uri).restore, "kept")
    restore()
    with pytest.raises(Refused, match="newest checkpoint of the job"):  # the attempt rests on it
        root.dispose("kept")
    job.start()
    job.checkpoint(4)
    assert root.dispose("kept") == 2
    assert left(job) == [1, 3, 4]
