"""Cleaning up after a checkpoint: what each call reads of the manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from spark_abs.checkpointing.cleaner import CheckpointCleaner
from spark_abs.codec import from_json
from spark_abs.manifests.manifest_table import read_rows
from spark_abs.model import NO_EPOCH, ChannelId, CheckpointMode, Position, StageId, Version
from spark_abs.protocol.attempt import NATIVES
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.snapshots.packs import Packed, PackReader
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.table import Commit, Table
from tests.channel_support import JOB
from tests.root_support import CHANNEL, SmallJob


def cleaner_of(
    job: SmallJob, reads: Mapping[tuple[StageId, ChannelId], Position] | None = None, **settings: object
) -> CheckpointCleaner:
    resolved = Settings.resolve(None, {}, {}, settings)
    version = Control.open(job.root).version
    ctx = RunContext(
        job.root, JOB, job.attempt, NATIVES, job.run, NO_EPOCH, version, resolved, 100, False, no_failpoint
    )
    given = replace(ctx, starts=reads or {})
    return CheckpointCleaner(given, {stage: [channel] for stage, channel in given.starts}, job.kept)


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


def test_a_checkpoint_that_comes_meanwhile_does_not_keep_the_retired_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one follows another closely, each call would be late otherwise, and nothing would ever go."""
    job, numbers = SmallJob(tmp_path), iter(range(5, 8))
    for number in range(1, 5):
        job.checkpoint(number)
    commit_next = Table.commit_next

    def late(table: Table, commit: Commit) -> Version:
        if commit.removes and table.uri.endswith("/checkpoints") and (number := next(numbers, None)):
            job.checkpoint(number)
        return commit_next(table, commit)

    monkeypatch.setattr(Table, "commit_next", late)
    cleaner_of(job, keep=2)()
    assert [s.id for s in job.checkpoints.summaries()] == [6, 7]


def test_manifests_that_were_put_into_one_file_are_retired(tmp_path: Path) -> None:
    """Nobody has to; a person may run `OPTIMIZE` on every Delta table that there is."""
    job = SmallJob(tmp_path)
    for number in range(1, 6):
        job.checkpoint(number)
    DeltaTable(job.root.path("checkpoints")).optimize.compact()
    job.checkpoint(6)
    cleaner_of(job, keep=2)()
    assert [s.id for s in job.checkpoints.summaries()] == [5, 6]
    assert [m.id for m in job.checkpoints.load_all()] == [5, 6]


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


def overtaken(job: SmallJob, *values: int) -> None:
    """Complete an unaligned checkpoint; the numbers are in flight to the reader, an entry each."""
    before = Position(CHANNEL, job.attempt, job.writer.refresh(), NO_EPOCH, False)
    for value in values[:-1]:
        job.step(value)
    barrier = job.claim()
    made = job.manifest(barrier, Version(job.step(values[-1], barrier=barrier)))
    stages = (s if s.stage == "a" else replace(s, positions=(before,)) for s in made.stages)
    assert job.checkpoints.complete(replace(made, mode=CheckpointMode.UNALIGNED, stages=tuple(stages)))


@pytest.mark.parametrize("ends", [False, True])
def test_rows_in_flight_go_with_their_checkpoint_though_a_savepoint_holds_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The words keep a checkpoint for an hour; a run may end within it, and the next one removes it."""
    job, reads, now = SmallJob(tmp_path), dict[tuple[StageId, ChannelId], Position](), [10_000]
    monkeypatch.setattr("spark_abs.snapshots.tidy.now_ms", lambda: now[0])

    def clean(cleaner: CheckpointCleaner) -> list[int]:
        reads[StageId("b"), CHANNEL] = Position(CHANNEL, job.attempt, job.writer.refresh(), NO_EPOCH, False)
        cleaner()
        rows = Table.open(job.root.place(job.root.channel(CHANNEL))).read()["n"].to_pylist()
        return sorted(rows)

    job.checkpoint(1, name="old")
    job.step(2)
    reads[StageId("b"), CHANNEL] = Position(CHANNEL, job.attempt, Version(0), NO_EPOCH, False)
    cleaner = cleaner_of(job, reads, keep="1 1h:all")
    overtaken(job, 3, 4)
    job.checkpoint(5)
    assert clean(cleaner) == [3, 4, 5]
    job.checkpoint(6)
    assert clean(cleaner) == [3, 4, 6]
    now[0] += 2 * 60 * 60_000
    job.checkpoint(7)
    if ends:
        cleaner = cleaner_of(job, reads, keep="1 1h:all")
    assert clean(cleaner) == [7]
    assert [s.id for s in job.checkpoints.summaries()] == [1, 5]
