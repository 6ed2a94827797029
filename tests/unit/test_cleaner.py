"""Cleaning up after a checkpoint: what each call reads of the manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.codec import from_json
from spark_abs.model import NO_EPOCH
from spark_abs.protocol.attempt import NATIVES
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from tests.channel_support import JOB
from tests.root_support import SmallJob


def cleaner_of(job: SmallJob, **settings: object) -> CheckpointCleaner:
    resolved = Settings.resolve(None, {}, {}, settings)
    version = Control.open(job.root).version
    ctx = RunContext(
        job.root, JOB, job.attempt, NATIVES, job.run, NO_EPOCH, version, resolved, 100, False, no_failpoint
    )
    return CheckpointCleaner(ctx, {}, job.kept)


def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many savepoints there are, a call reads what is new."""
    job = SmallJob(tmp_path)
    cleaner = cleaner_of(job, keep=2)
    read: list[int] = []

    def reading(kind: type[Any], text: str) -> Any:
        manifest = from_json(kind, text)
        read.append(int(manifest.id))
        return manifest

    monkeypatch.setattr("spark_abs.manifests.manifest_table.from_json", reading)
    for name in ("one", "two"):
        job.checkpoint(1, name=name)
    cleaner()
    assert sorted(read) == [1, 2]
    for number in range(3, 7):
        read.clear()
        job.checkpoint(number)
        cleaner()
        assert read == [number]
    assert [s.id for s in job.checkpoints.summaries()] == [1, 2, 5, 6]
    cleaner_of(job, keep=1)()
    read.clear()
    cleaner()
    assert read == []
    assert [s.id for s in job.checkpoints.summaries()] == [1, 2, 6]
