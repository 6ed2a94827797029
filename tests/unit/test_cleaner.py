"""Cleaning up after a checkpoint: what each call reads of the manifests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.codec import from_json
from spark_abs.manifests.manifest_table import read_rows
from spark_abs.model import NO_EPOCH
from spark_abs.protocol.attempt import NATIVES
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.snapshots.packs import Packed, PackReader
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
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


def test_tables_are_trimmed_by_checkpoints_and_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call may follow many checkpoints, and the next one may come late."""
    job, now, trimmed = SmallJob(tmp_path), [0], list[int]()
    monkeypatch.setattr("spark_abs.checkpointing.cleaner.TRIM_EVERY", 3)
    monkeypatch.setattr("spark_abs.checkpointing.cleaner.steady_ms", lambda: now[0])
    monkeypatch.setattr(
        "spark_abs.checkpointing.cleaner.trim_tables",
        lambda _: trimmed.append(int(job.checkpoints.summaries()[-1].id)),
    )
    cleaner = cleaner_of(job, keep=1)
    for calls, checkpoints, minutes in ((1, 1, 0), (2, 1, 0), (1, 1, 0), (1, 5, 0), (1, 1, 29), (2, 1, 1)):
        now[0] += minutes * 60_000
        for _ in range(checkpoints):
            job.checkpoint(1)
        for _ in range(calls):
            cleaner()
    assert trimmed == [1, 8, 10]


def test_captures_do_not_wait_for_the_reading_of_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause there are many manifests and packs to read, and the store may be slow."""
    job = SmallJob(tmp_path)
    for number in range(1, 6):
        job.checkpoint(number)
    may_capture: dict[str, bool] = {}

    def try_lock() -> bool:
        if taken := job.kept.lock.acquire(blocking=False):
            job.kept.lock.release()
        return taken

    def look(name: str) -> None:
        with ThreadPoolExecutor(1) as other:
            may_capture[name] = other.submit(try_lock).result()

    def reading(root: Root, path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        look(path)
        return read_rows(root, path, columns)

    class Reading(PackReader):
        def index(self, pack: str) -> dict[str, Packed]:
            look(pack)
            return super().index(pack)

    monkeypatch.setattr("spark_abs.manifests.manifest_table.read_rows", reading)
    monkeypatch.setattr("spark_abs.snapshots.state_storage.PackReader", Reading)
    packs = set(job.kept.active())
    cleaner_of(job, keep=9)()
    assert len(packs) > 1
    assert packs < may_capture.keys()
    assert len(may_capture) == len(packs) + 5
    assert all(may_capture.values())
