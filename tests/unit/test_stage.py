"""What a stage does with barriers that it is offered, without Spark: a source that is idle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spark_abs.model import NO_BATCH, NO_EPOCH, Barrier, CheckpointId, CheckpointKind, StageId
from spark_abs.runtime.outputs import IdleCut
from spark_abs.runtime.stage import StageRunner
from spark_abs.store.probe import no_probe
from spark_abs.store.root import Root


class IdleSource:
    """The runner of a source that has run no batch, and what goes out of it."""

    def __init__(self, root: Root) -> None:
        ctx: Any = SimpleNamespace(
            floor=NO_EPOCH,
            bounded=False,
            probe=no_probe,
            native=lambda stage: root.native("native", 1, stage),
        )
        outputs: Any = SimpleNamespace(
            commit_barrier=lambda barrier, last: IdleCut(NO_BATCH, {}), versions=lambda *_: ()
        )
        self.taken: list[int] = []
        snapshots: Any = SimpleNamespace(submit=lambda taken: self.taken.append(taken.barrier.id))
        self.runner = StageRunner(ctx, StageId("clicks"), outputs, (), snapshots)

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
