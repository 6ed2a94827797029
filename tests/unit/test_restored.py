"""What a job may leave behind when it goes on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spark_abs.codec import from_json
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest
from spark_abs.model import NO_BATCH, StageId
from spark_abs.runtime.graph import JobGraph, StageDecl
from spark_abs.runtime.restored import require_stages

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
