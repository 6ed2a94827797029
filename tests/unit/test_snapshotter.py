"""The copies of a run: those that nobody waits for any more are not made."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.model import Barrier, BatchId, CheckpointId, CheckpointKind, StageId
from spark_abs.stages import snapshotter as module
from spark_abs.stages.snapshotter import Snapshotter, StageFacts, Taken
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.storage import Place

STAGE = StageId("match")


def taken(checkpoint: int, batch: int) -> Taken:
    barrier = Barrier(CheckpointId(checkpoint), CheckpointKind.CHECKPOINT, 1_000)
    return Taken(STAGE, barrier, BatchId(batch), (), (), 0, 0, 0, 0)


class Copies:
    """A snapshotter with one thread over a native checkpoint that has the given commit files."""

    def __init__(self, native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.native, self.tried, self.woken = native, list[tuple[int, int]](), threading.Semaphore(0)
        (native / "commits").mkdir(parents=True)
        ctx: Any = SimpleNamespace(
            settings=SimpleNamespace(copy_threads=1, synchronous=False),
            failpoint=no_failpoint,
            native=lambda _: Place(str(native)),
            batches_retained=10,
        )
        kept: Any = SimpleNamespace(unpin=lambda _, completed: None)
        ignore: Any = lambda *_: None  # noqa: E731 - what it is told is not looked at
        self.snapshots = Snapshotter(ctx, kept, lambda: None, ignore, ignore)
        self.snapshots.register(STAGE, StageFacts({}, lambda: 0), self.woken.release)

        def copy(_: object, checkpoint: int, __: object, batch: int) -> None:
            self.tried.append((checkpoint, batch))
            raise OSError("no store")

        monkeypatch.setattr(module, "snapshot_stage", copy)

    def commit(self, batch: int) -> None:
        (self.native / "commits" / str(batch)).write_text("v1\n{}")

    def await_end_of_copies(self, copies: int) -> None:
        for _ in range(copies):
            assert self.woken.acquire(timeout=30)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(tmp_path / "native", monkeypatch)


def test_a_copy_does_not_wait_for_a_commit_that_was_purged_when_its_checkpoint_is_settled(
    copies: Copies,
) -> None:
    copies.snapshots.submit(taken(1, 4))  # waits for commits/4, which never comes again
    copies.snapshots.submit(taken(2, 90))
    copies.commit(90)
    copies.snapshots.settle(CheckpointId(1), completed=False)
    copies.await_end_of_copies(3)  # the release wakes the stage, too
    assert copies.tried == [(2, 90)]
    copies.snapshots.close()


def test_a_queued_copy_of_a_settled_checkpoint_is_not_made(copies: Copies) -> None:
    copies.snapshots.submit(taken(1, 4))
    copies.snapshots.submit(taken(2, 5))
    copies.commit(5)
    copies.snapshots.settle(CheckpointId(2), completed=False)
    copies.commit(4)
    copies.await_end_of_copies(3)
    assert copies.tried == [(1, 4)]
    copies.snapshots.close()


def test_a_batch_that_is_run_again_does_not_wait_for_the_copy_of_its_own_cut(copies: Copies) -> None:
    """The copy waits for the end of that batch: with synchronous copies each would wait for the other."""
    copies.snapshots._ctx.settings.synchronous = True  # type: ignore[misc]  # a plain namespace here
    copies.snapshots.submit(taken(1, 4))
    assert copies.snapshots.permits(STAGE, BatchId(4))
    assert not copies.snapshots.permits(STAGE, BatchId(5))
    copies.snapshots.settle(CheckpointId(1), completed=True)
    assert copies.snapshots.permits(STAGE, BatchId(5))


def test_batches_go_on_while_a_cut_is_copied_until_spark_might_purge_it(copies: Copies) -> None:
    """Of ten batches that Spark keeps, the copy has half to itself (P11)."""
    copies.snapshots.submit(taken(1, 4))
    assert [batch for batch in range(5, 15) if copies.snapshots.permits(STAGE, BatchId(batch))] == [
        5,
        6,
        7,
        8,
        9,
    ]
    copies.snapshots.settle(CheckpointId(1), completed=True)
    assert copies.snapshots.permits(STAGE, BatchId(14))
