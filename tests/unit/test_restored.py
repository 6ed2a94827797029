"""What stateful functions are told of the past of their stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spark_abs.compatibility.restored import functions_before
from spark_abs.manifest import StateFunction
from spark_abs.model import StageId, Version
from spark_abs.protocol import attempt_changes
from spark_abs.protocol import control as ledger
from spark_abs.state.declared import NOTHING, Before
from spark_abs.store.control import Control
from tests.root_support import SmallJob


def test_what_a_repartitioning_has_left_in_one_partition_is_known_in_later_attempts_too(
    tmp_path: Path,
) -> None:
    """As of a checkpoint that was taken before the next batch had ended: of all records one is left in it."""
    form, job, stage = StateFunction("f", 2, ("k: int64",), ("n: int64",), "none"), SmallJob(tmp_path), "b"
    barrier = job.claim()
    manifest = job.manifest(barrier, Version(job.step(1, barrier=barrier)))
    graph = tuple(replace(s, functions=(form,)) if s.stage == stage else s for s in manifest.graph)
    assert job.checkpoints.complete(replace(manifest, graph=graph))
    control, found = Control.open(job.root), []
    ctx: Any = SimpleNamespace(
        root=job.root, job=manifest.job, native=lambda name: job.root.native("native", job.attempt, name)
    )
    for partitions in ({}, {stage: 5}, {}):
        state = control.state

        def restored(state: ledger.ControlState, wanted: dict[str, int] = partitions) -> ledger.ControlState:
            parent = state.attempt.id
            state = attempt_changes.begin_attempt(
                state, parent, checkpoint=barrier.id, plan="", host="", pid=0, now_ms=0, partitions=wanted
            )
            return attempt_changes.finish_attempt(state, state.attempt.id)

        control.update(restored)
        assert control.state.attempt.id == state.attempt.id + 1
        found.append(functions_before(ctx, control, StageId(stage)))
    known = Before(0, {"f": form})
    assert found == [NOTHING, known, known]
