"""From a manifest to what the page compares."""

from __future__ import annotations

import json

import pytest

from spark_abs.codec import to_json
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, RunId
from spark_abs.report.cuts import read_manifest
from tests import report_support


def body(number: int = 7) -> str:
    graph = report_support.shapes(12)
    return to_json(report_support.manifest(number, graph, AttemptId(1), RunId(1)))


def test_a_cut_has_batches_sizes_versions_and_positions() -> None:
    manifest, cut = read_manifest(1, body())
    assert (cut.checkpoint, len(cut.stages)) == (7, 12)
    first = cut.stages[0]
    assert (first.batch, first.size_full, first.files, first.partitions) == (7, 1_007_000, 1, 2)
    assert [(s.stage, s.source, s.position) for s in cut.sources][:1] == [("stage-00", "0", "file batch 21")]
    assert [(s.stage, s.sink, s.version) for s in cut.sinks][-1] == ("stage-11", "totals", 3)
    assert len(manifest.graph) == 12


def test_files_are_counted_and_not_kept() -> None:
    assert all(not stage.files for stage in read_manifest(1, body())[0].stages)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"stages":[1]}', '{"stages":[{"files":[{"size":"x"}]}]}'])
def test_what_is_no_manifest_is_damage(text: str) -> None:
    with pytest.raises(DamageError):
        read_manifest(1, text)


def test_a_newer_format_is_damage_and_offsets_that_cannot_be_read_are_said() -> None:
    with pytest.raises(DamageError, match="format 99"):
        read_manifest(99, body())
    plain = json.loads(body())
    plain["stages"][0]["offsets"] = "v9\n{}"
    assert "cannot be read" in read_manifest(1, json.dumps(plain))[1].sources[0].position
