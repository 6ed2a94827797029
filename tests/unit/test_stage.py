"""What a stage does with barriers that it is offered, without Spark: a source that is idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.alignment.marker import Free
from spark_abs.manifest import OutputVersion, StageSnapshot
from spark_abs.model import NO_EPOCH, AttemptId, Barrier, BatchId, CheckpointId, CheckpointKind, StageId
from spark_abs.snapshots.layout import OffsetFile
from spark_abs.stages.activity import Activity
from spark_abs.stages.barriers import BarrierProgress
from spark_abs.stages.batch import BatchFacts, Planned
from spark_abs.stages.outputs import IdleCut
from spark_abs.stages.snapshotter import Taken
from spark_abs.stages.stage import StageRunner
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root


def commit_barrier(_: Barrier, last_batch: Callable[[], BatchId | None]) -> IdleCut | None:
    """Do what outputs do with a barrier, but for writing it."""
    batch = last_batch()
    return None if batch is None else IdleCut(batch, {})


class IdleSource:
    """The runner of a source that has run no batch, and what goes out of it."""

    def __init__(self, root: Root) -> None:
        self.written_by_others = False
        """Whether a table of its function has a newer version than at the cut."""
        ctx: Any = SimpleNamespace(
            root=root,
            poll_ms=lambda _: 0,
            floor=NO_EPOCH,
            bounded=False,
            failpoint=no_failpoint,
            native=lambda stage: root.native("native", AttemptId(1), stage),
        )
        outputs: Any = SimpleNamespace(
            commit_barrier=commit_barrier,
            versions=self._versions,
            lookup_versions=(),
            end=lambda: None,
            repeated=lambda batch: self.parts.get(batch),
            calls_functions=False,
            stand_at=lambda _: not self.written_by_others,
            progress=BarrierProgress(),
            activity=Activity(),
        )
        self.away = False
        """Whether the log of a table cannot be read."""
        self.taken: list[int] = []
        self.batches: list[int] = []

        self.parts: dict[int, object] = {}
        """What outputs hold of batches."""

        def submit(taken: Taken) -> None:
            self.taken.append(taken.barrier.id)
            self.batches.append(taken.batch)

        snapshots: Any = SimpleNamespace(submit=submit, permits=lambda *_: True)
        credit: Any = SimpleNamespace(waited_ms=0, waits_for=lambda _: None, full=tuple)
        self.paused = False
        self.runner = StageRunner(
            ctx,
            StageId("clicks"),
            outputs=outputs,
            start=(),
            snapshots=snapshots,
            credit=credit,
            paused=lambda: self.paused,
        )

    def _versions(self, *_: object) -> tuple[OutputVersion, ...]:
        if self.away:
            raise OSError("503")
        return ()

    def offer(self, *numbers: int) -> None:
        for number in numbers:
            self.runner.offer(Barrier(CheckpointId(number), CheckpointKind.CHECKPOINT, 0))

    def look(self, times: int) -> list[int]:
        """Let the agent look so many times; returns the barriers taken so far."""
        for _ in range(times):
            self.runner.offer_idle()
        return self.taken


def test_of_several_open_barriers_the_oldest_is_taken_first(tmp_path: Path) -> None:
    """Each once, one at a time (P1: ids increase along a channel)."""
    source = IdleSource(Root(str(tmp_path)))
    source.offer(1, 2, 3)
    assert source.look(1) == [1]
    assert source.look(5) == [1, 2, 3]


def test_a_barrier_whose_checkpoint_was_aborted_is_not_taken(tmp_path: Path) -> None:
    source = IdleSource(Root(str(tmp_path)))
    source.offer(1, 2)
    source.runner.notify(CheckpointId(1), completed=False)
    assert source.look(3) == [2]


def test_a_batch_that_was_planned_and_refused_at_the_end_does_not_keep_the_last_barrier_back(
    tmp_path: Path,
) -> None:
    """The query has stopped: the cut is the last batch that it finished (P10)."""
    native = tmp_path / "native/1/clicks"
    for name in ("offsets/0", "commits/0", "offsets/1"):
        (native / name).parent.mkdir(parents=True, exist_ok=True)
        (native / name).write_text("v1\n{}\n")
    source = IdleSource(Root(str(tmp_path)))
    source.offer(1)
    assert source.look(1) == []
    source.runner.batch_lock.stop()
    assert source.look(1) == []
    source.runner.end()
    assert (source.look(1), source.batches) == ([1], [0])


def planned(native: Path, committed: int, batch: int) -> Planned:
    """Write the logs of a stage that has planned a batch after its last finished one."""
    for name in ("offsets", "commits"):
        (native / name).mkdir(parents=True, exist_ok=True)
    for number in range(batch + 1):
        (native / f"offsets/{number}").write_text("v1\n{}\n")
    for number in range(committed + 1):
        (native / f"commits/{number}").write_text("v1\n{}\n")
    facts, offsets = BatchFacts(BatchId(batch), "", 0), OffsetFile(1, 0, 0, {}, {})
    return Planned(facts, offsets, None, before=(), after=(), emission=Free())


def test_a_paused_source_holds_its_planned_batch_and_barriers_go_ahead_of_it(tmp_path: Path) -> None:
    source = IdleSource(Root(str(tmp_path)))
    batch = planned(tmp_path / "native/1/clicks", 3, 4)
    source.paused = True
    source.offer(1)
    assert source.look(1) == []  # nobody knows yet whether the batch has begun
    source.runner._activity.begin(batch.facts.batch)
    assert not source.runner._admit(batch)
    assert (source.look(2), source.batches) == ([1], [3])
    assert source.runner.activity().what == "the end of its pause"
    source.paused = False
    assert source.runner._admit(batch)
    source.offer(2)
    assert source.look(1) == [1]  # the batch carries it


def test_a_paused_source_finishes_a_batch_of_which_an_output_has_a_part(tmp_path: Path) -> None:
    """A cut before that batch would stand behind its rows."""
    source = IdleSource(Root(str(tmp_path)))
    batch = planned(tmp_path / "native/1/clicks", 3, 4)
    source.paused, source.parts[4] = True, object()
    source.offer(1)
    assert source.runner._admit(batch)
    assert source.look(1) == []


def test_a_paused_source_runs_the_batch_that_it_alone_is_to_run(tmp_path: Path) -> None:
    """A rebuild or a drain needs the batch."""
    source = IdleSource(Root(str(tmp_path)))
    batch = planned(tmp_path / "native/1/clicks", 3, 4)
    source.paused, source.runner.only = True, BatchId(4)
    assert source.runner._admit(batch)


def test_a_cut_whose_table_versions_cannot_be_read_is_not_handed_over(tmp_path: Path) -> None:
    """A stage that is started again makes it once more."""
    source = IdleSource(Root(str(tmp_path)))
    source.offer(1)
    source.away = True
    with pytest.raises(OSError, match="503"):
        source.look(1)
    successor = IdleSource(Root(str(tmp_path)))
    successor.runner.succeed(source.runner)
    successor.offer(1)
    assert successor.look(1) == [1]


def test_a_stage_stands_at_its_cut_until_a_batch_is_planned_or_its_native_checkpoint_is_gone(
    tmp_path: Path,
) -> None:
    """Only then a periodic checkpoint may be skipped."""
    native = tmp_path / "native/1/clicks"
    source = IdleSource(Root(str(tmp_path)))
    first, second = (StageSnapshot(StageId("clicks"), BatchId(b)) for b in (-1, 0))
    assert source.runner.stands_at(first), "it has run no batch"
    for name in ("offsets", "commits"):
        (native / name).mkdir(parents=True)
    (native / "offsets/0").write_text("v1\n{}\n")
    assert not source.runner.stands_at(first), "a batch is planned"
    assert not source.runner.stands_at(second), "its end is not recorded"
    (native / "commits/0").write_text("v1\n{}\n")
    assert source.runner.stands_at(second)
    with source.runner.batch_lock.batch(BatchId(1), lambda: True):
        assert not source.runner.stands_at(second), "a batch is just beginning"
    source.written_by_others = True
    assert not source.runner.stands_at(second), "a restore would undo the rows of the others"
    source.written_by_others = False
    (native / "commits/0").unlink()
    assert not source.runner.stands_at(second), "what a restart needs is gone"
    assert source.taken == []
