"""State moves between the providers of Spark: the query goes on as the one that never stopped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from spark_abs.errors import UsageError
from spark_abs.job import Job
from spark_abs.manifest import StageSnapshot
from spark_abs.model import PROVIDER_KEY, CheckpointId, Provider, RunId, StageId
from spark_abs.restore.hdfs_store import loaded
from spark_abs.restore.rewrite import rewrite_stage
from spark_abs.snapshots.materialise import fresh_query_id, materialise
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.take import StageCopy
from spark_abs.store.storage import Place
from tests.spark.test_capture import (
    STORES,
    Input,
    Shape,
    Story,
    chained,
    conf,
    deduplicate,
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
    """Feed files to a query that starts from disk and ends after them; return what came out."""
    source.feed(files)
    run = start(shape, source, checkpoint)
    try:
        run.query.processAllAvailable()
    finally:
        run.query.stop()
    return run.after(-1)


def snapshot_of(copy: StageCopy) -> StageSnapshot:
    """Return what a manifest has of a copy."""
    return StageSnapshot(
        StageId("query"),
        copy.cut_batch,
        offsets=copy.offsets,
        operators=copy.operators,
        provider=copy.provider,
        files=copy.files,
    )


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
    kept = StateStorage.open(story.root, "job", RunId(1))
    snapshot = snapshot_of(copy)
    moved = rewrite_stage(
        spark,
        kept,
        checkpoint=CheckpointId(2),
        snapshot=snapshot,
        scratch=Place(str(tmp_path / "on")),
        changes={},
        provider=provider,
    )
    assert (moved.provider, moved.operators[0].partitions) == (provider, copy.operators[0].partitions)
    materialise(story.root, moved.files, target=Place(str(tmp_path / "restored")), query_id=fresh_query_id())
    assert sum(expected.values()) > 0
    assert ran(shape, story.source, tmp_path / "restored", 0) == expected


def test_state_in_the_hdfs_backed_store_is_emptied_where_it_is_and_on_its_way_to_rocksdb(
    spark: SparkSession, tmp_path: Path, conf: Callable[[dict[str, str]], None]
) -> None:
    conf(STORES["hdfs"])
    story = Story(spark, tmp_path, deduplicate)
    ran(deduplicate, story.source, story.native, 2)
    snapshot = snapshot_of(story.copy(last_batch(story.native)))
    kept = StateStorage.open(story.root, "job", RunId(1))
    for number, provider in enumerate((None, Provider.ROCKSDB), 2):
        scratch, native = Place(str(tmp_path / f"on{number}")), tmp_path / f"emptied{number}"
        changed = rewrite_stage(
            spark,
            kept,
            checkpoint=CheckpointId(number),
            snapshot=snapshot,
            scratch=scratch,
            changes={0: None},
            provider=provider,
        )
        assert changed.provider == (provider or Provider.HDFS)
        materialise(story.root, changed.files, target=Place(str(native)), query_id=fresh_query_id())
        state = spark.read.format("statestore").option("batchId", int(changed.cut_batch))
        assert state.load(str(native)).isEmpty()
    files = {f.name: f.read_bytes() for f in (tmp_path / "emptied2/state/0/0").glob("*.snapshot")}
    assert loaded(files, "zstd") == {}


def test_the_state_store_of_databricks_is_refused_with_the_setting_of_sparks_own(
    spark: SparkSession, tmp_path: Path
) -> None:
    own, theirs = spark.newSession(), "com.databricks.sql.streaming.state.RocksDBStateStoreProvider"
    own.conf.set(PROVIDER_KEY, theirs)
    job = Job("theirs", root=str(tmp_path / "root"), spark=own)
    job.sink("out", job.source("ticks", own.readStream.format("rate").load()), table=str(tmp_path / "out"))
    wanted = f"{re.escape(theirs)}.* set {re.escape(f'{PROVIDER_KEY} to {Provider.ROCKSDB}')}"
    for ask in (job.check, job.explain, job.start):
        with pytest.raises(UsageError, match=wanted):
            ask()
    assert not (tmp_path / "root").exists()
