"""Where sources stand is said so that a person can read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_abs.model import AttemptId, ChannelId, CheckpointId, Position, Version, dumps_position
from spark_abs.observe.sources import readable, source_positions
from spark_abs.snapshots.layout import END_OF_TIME_MS
from tests.cli.conftest import Cli
from tests.unit.observe.test_state_at import Jobs


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        ('{"logOffset":4}', "file batch 4"),
        ('{"sourceVersion":1,"reservoirId":"4f","reservoirVersion":7,"index":2}', "version 7, file 2"),
        ('{"sourceVersion":1,"reservoirId":"4f","reservoirVersion":8,"index":-1}', "version 8"),
        ('{"orders":{"10":3,"2":9},"late":{"0":12}}', "late[0] 12, orders[2] 9, orders[10] 3"),
        ("1763840000", "1763840000"),
        ('{"at":5}', '{"at": 5}'),
        ("text", "text"),
    ],
)
def test_an_offset_is_said_as_one_reads_it(offset: str, said: str) -> None:
    assert readable(offset) == said


def test_show_says_how_far_sources_are_and_which_files_came_last(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    manifest = jobs.checkpoint(("state/0/_metadata/metadata", "v1\n{}"))
    names = [f"file:///in/{n}%20x.json" for n in range(5)]
    entries = [json.dumps({"path": uri, "timestamp": 1, "batchId": 4}) for uri in names]
    older = json.dumps({"path": "file:///in/old.json", "timestamp": 1, "batchId": 3})
    files = jobs.files(("sources/0/4", "\n".join(["v1", *entries])), ("sources/0/3", f"v1\n{older}"))
    gate = dumps_position(Position(ChannelId("a.main"), AttemptId(1), Version(3), CheckpointId(1)))
    offsets = "\n".join(["v1", "{}", '{"logOffset":4}', json.dumps(gate)])
    match = replace(manifest.stages[0], offsets=offsets, files=files, watermark_ms=1_700_000_000_123)
    (found,) = source_positions(jobs.root, match)
    assert (found.source, found.said, found.files) == ("0", "file batch 4", tuple(names))

    # Of a watched query a later compact file may stand for those that Spark has deleted.
    merged = jobs.files(("sources/0/9.compact", "\n".join(["v1", older, *entries])))
    (found,) = source_positions(jobs.root, replace(match, files=merged))
    assert found.files == tuple(names)

    ended = replace(manifest.stages[1], watermark_ms=END_OF_TIME_MS)
    second = replace(manifest, id=CheckpointId(2), stages=(match, ended))
    assert jobs.checkpoints.complete(second)
    cli = Cli(jobs.root.uri)
    text = cli("show", "2").stdout
    for words in (
        "2023-11-14 22:13:20.123",
        "end of time",
        "file batch 4",
        "0 x.json, 1 x.json, 2 x.json and 2 more",
    ):
        assert words in text
    (shown,) = cli.json("show", "2")["sources"]
    assert (shown["offset"], len(shown["files"])) == ('{"logOffset":4}', 5)
