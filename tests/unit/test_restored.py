"""What a job may leave behind when it goes on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.codec import from_json
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest, StateFunction
from spark_abs.model import NO_BATCH, StageId, Version
from spark_abs.protocol import attempts
from spark_abs.protocol import control as ledger
from spark_abs.runtime.graph import JobGraph, StageDecl
from spark_abs.runtime.launch import before
from spark_abs.runtime.restored import require_stages
from spark_abs.state.declared import NOTHING, Before
from spark_abs.store.control import Control
from tests.root_support import SmallJob

EXAMPLE = Path(__file__).parent / "formats" / "manifest-1.json"
FILES = 'v1\n{}\n{"logOffset":4}'


def manifest() -> Manifest:
    return from_json(Manifest, EXAMPLE.read_text())


def job(*names: str) -> JobGraph:
    return JobGraph(tuple(StageDecl(StageId(n), (), has_native=True) for n in names), ())


def test_a_stage_that_is_gone_is_named_with_what_it_has() -> None:
    match = manifest().stages[0]
    reader = replace(match, stage=StageId("files"), operators=(), offsets=FILES, positions=())
    both = replace(manifest(), stages=(match, reader))
    with pytest.raises(Refused, match=r"stage 'match' \(state\), stage 'files' \(positions in its sources\)"):
        require_stages(both, job("other"))
    with pytest.raises(Refused, match=r"has stage 'files' \(positions in its sources\), and"):
        require_stages(both, job("match"))
    require_stages(both, job("match", "files", "new"))


def test_a_stage_without_state_or_source_may_go_and_one_that_never_ran() -> None:
    match = manifest().stages[0]
    require_stages(replace(manifest(), stages=(replace(match, operators=()),)), job("other"))
    idle = replace(match, cut_batch=NO_BATCH, offsets="", positions=())
    require_stages(replace(manifest(), stages=(idle,)), job("other"))


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
    ctx = SimpleNamespace(
        root=job.root, job=manifest.job, native=lambda name: job.root.native("native", job.attempt, name)
    )
    given: Any = SimpleNamespace(ctx=ctx, control=control)
    for partitions in ({}, {stage: 5}, {}):
        state = control.state

        def restored(state: ledger.ControlState, wanted: dict[str, int] = partitions) -> ledger.ControlState:
            parent = state.attempt.id
            state = attempts.begin_attempt(state, parent, barrier.id, "", "", 0, 0, partitions=wanted)
            return attempts.finish_attempt(state, state.attempt.id)

        control.update(restored)
        assert control.state.attempt.id == state.attempt.id + 1
        found.append(before(given, StageId(stage)))
    known = Before(0, {"f": form})
    assert found == [NOTHING, known, known]
