"""Which query writes under an application id of its own is told by the times of its batches."""

from __future__ import annotations

import json
from pathlib import Path

from spark_abs.rewind.query import read_queries
from tests.plain_queries import World, text_of

_LONG_MS = 10_000


def test_a_long_batch_is_known_as_a_querys_after_a_rewind_that_gave_it_a_new_number(tmp_path: Path) -> None:
    """The query stays at the batch, and its position is moved behind the restore of its source."""
    world = World(tmp_path, "chain", seed=1, files=100)
    bronze, silver, gold = world.queries()
    for query in (bronze, silver, gold):
        query.start()
        assert query.step(50)
    path = gold.checkpoint.below("offsets/0").uri
    lines = text_of(gold.checkpoint, "offsets/0").split("\n")
    metadata = json.loads(lines[1])
    metadata["batchTimestampMs"] -= _LONG_MS  # planned so long before its rows were committed
    Path(path).write_text("\n".join([lines[0], json.dumps(metadata), *lines[2:]]))
    for query in (bronze, silver):
        assert query.step(3)
    assert "gold" in world.rewind({"silver": 0})
    (facts,) = read_queries([gold.checkpoint])
    assert facts.made == {2: 0}
    assert facts.times[0].ended_ms - facts.times[0].begun_ms >= _LONG_MS
    for query in (bronze, silver, gold):
        query.start()
        assert query.step(3)
    assert "gold" in world.rewind({"gold": 2})
    world.is_whole(seed=1)
