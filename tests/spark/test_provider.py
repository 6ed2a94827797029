"""State moves between Spark's providers: the query goes on as the one that never stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from spark_abs.manifest import StageSnapshot
from spark_abs.model import BatchId, CheckpointId, RunId, StageId
from spark_abs.restore.rewrite import rewrite_stage
from spark_abs.snapshots.kept import KeptState
from spark_abs.snapshots.layout import Provider
from spark_abs.snapshots.materialise import fresh_query_id, materialise
from spark_abs.store.storage import Place
from tests.spark.test_capture import (
    STORES,
    Input,
    Shape,
    Story,
    chained,
    conf,
    last_batch,
    outer_join,
    start,
)

__all__ = ["conf"]

CASES = [
    (chained, "rocksdb-changelog", Provider.HDFS),
    (outer_join, "hdfs", Provider.ROCKSDB),
]


def ran(shape: Shape, source: Input, checkpoint: Path, files: int) -> Counter[Row]:
    """Feed files to a query that starts from disk and ends behind them; return what came out."""
    source.feed(files)
    run = start(shape, source, checkpoint)
    try:
        run.query.processAllAvailable()
    finally:
        run.query.stop()
    return run.after(-1)


@pytest.mark.parametrize(
    ("shape", "stores", "provider"), CASES, ids=[f"{s.__name__}-{c}" for s, c, _ in CASES]
)
def test_a_query_goes_on_with_its_state_in_another_provider(
    spark: SparkSession,
    tmp_path: Path,
    conf: Callable[[dict[str, str]], None],
    shape: Shape,
    stores: str,
    provider: Provider,
) -> None:
    conf(STORES[stores])
    story = Story(spark, tmp_path, shape)
    ran(shape, story.source, story.native, 4)
    cut = last_batch(story.native)
    copy = story.copy(cut)
    expected = ran(shape, story.source, story.native, 3)
    story.native.rename(tmp_path / "lost")
    kept = KeptState.open(story.root, "job", RunId(1))
    snapshot = StageSnapshot(
        StageId("query"),
        BatchId(cut),
        offsets=copy.offsets,
        operators=copy.operators,
        provider=copy.provider,
        files=copy.files,
    )
    moved = rewrite_stage(spark, kept, CheckpointId(2), snapshot, Place(str(tmp_path / "on")), {}, provider)
    assert (moved.provider, moved.operators[0].partitions) == (provider, copy.operators[0].partitions)
    materialise(story.root, moved.files, Place(str(tmp_path / "restored")), fresh_query_id())
    assert sum(expected.values()) > 0
    assert ran(shape, story.source, tmp_path / "restored", 0) == expected
