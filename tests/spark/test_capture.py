"""A cut copied from a running query brings it back: same output as the run that never stopped."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from spark_abs.model import BatchId, CheckpointId, RunId
from spark_abs.snapshots.layout import StateFile, StateFileKind, state_file
from spark_abs.snapshots.materialise import fresh_query_id, materialise
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.take import StageCopy, snapshot_stage
from spark_abs.snapshots.verify import verify_native
from spark_abs.spark.local_disk import local_disk_conf
from spark_abs.stages.queries import session_conf
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

STATE = "spark.sql.streaming.stateStore"
PACKAGE = "org.apache.spark.sql.execution.streaming.state"
ROCKSDB = {f"{STATE}.providerClass": f"{PACKAGE}.RocksDBStateStoreProvider"}
HDFS = {f"{STATE}.providerClass": f"{PACKAGE}.HDFSBackedStateStoreProvider"}
CHANGELOG = {f"{STATE}.rocksdb.changelogCheckpointing.enabled": "true"}
NO_CHANGELOG = {f"{STATE}.rocksdb.changelogCheckpointing.enabled": "false"}
FORMAT_2 = {f"{STATE}.checkpointFormatVersion": "2"}
STORES = {
    "rocksdb": ROCKSDB | NO_CHANGELOG,
    "rocksdb-changelog": ROCKSDB | CHANGELOG,
    "rocksdb-2": ROCKSDB | NO_CHANGELOG | FORMAT_2,
    "rocksdb-changelog-2": ROCKSDB | CHANGELOG | FORMAT_2,
    "rocksdb-changelog-2-zstd": ROCKSDB | CHANGELOG | FORMAT_2 | {f"{STATE}.compression.codec": "zstd"},
    "rocksdb-changelog-2-snappy": ROCKSDB | CHANGELOG | FORMAT_2 | {f"{STATE}.compression.codec": "snappy"},
    "hdfs": HDFS,
    "hdfs-offsets-2": HDFS | {"spark.sql.streaming.offsetLog.formatVersion": "2"},
}


@pytest.fixture(autouse=True, scope="module")
def quick_snapshots(spark: SparkSession) -> Iterator[None]:
    """Snapshots are due after two batches; the first query of a process sets how often Spark looks."""
    settings = {f"{STATE}.maintenanceInterval": "100ms", f"{STATE}.minDeltasForSnapshot": "2"}
    for key, value in settings.items():
        spark.conf.set(key, value)
    yield
    for key in settings:
        spark.conf.unset(key)


@dataclass
class Input:
    """A directory of JSON files, one file a batch; event time goes on by 20 seconds a file."""

    spark: SparkSession
    directory: Path
    files: int = 0
    wrong: bool = False

    def feed(self, count: int = 1) -> None:
        self.directory.mkdir(exist_ok=True)
        for _ in range(count):
            start = 1_700_000_000 + self.files * 20
            lines = [
                json.dumps({"k": (row * 5 + self.files) % 7, "v": row + 1000 * self.wrong, "ts": start + row})
                for row in range(20)
            ]
            written = self.directory.parent / "next"
            written.write_text("\n".join(lines))
            written.rename(self.directory / f"{self.files:04}.json")
            self.files += 1

    def stream(self) -> DataFrame:
        read = self.spark.readStream.schema("k long, v long, ts long").option("maxFilesPerTrigger", 1)
        return read.json(str(self.directory)).withColumn("ts", F.timestamp_seconds("ts"))


def window(source: Input) -> tuple[DataFrame, str]:
    late = source.stream().withWatermark("ts", "10 seconds")
    sums = late.groupBy(F.window("ts", "15 seconds"), "k").agg(F.sum("v").alias("n"))
    return sums.selectExpr("window.start AS w", "k", "n"), "append"


def deduplicate(source: Input) -> tuple[DataFrame, str]:
    late = source.stream().withWatermark("ts", "45 seconds")
    return late.dropDuplicatesWithinWatermark(["k"]).select("k", "v", "ts"), "append"


def outer_join(source: Input) -> tuple[DataFrame, str]:
    left = source.stream().withWatermark("ts", "10 seconds").alias("l")
    right = source.stream().where("k < 3").withWatermark("ts", "10 seconds").alias("r")
    near = F.expr("l.k = r.k AND r.ts BETWEEN l.ts AND l.ts + INTERVAL 25 SECONDS AND r.v > l.v")
    return left.join(right, near, "leftOuter").selectExpr("l.k", "l.ts", "l.v", "r.ts AS rts"), "append"


def chained(source: Input) -> tuple[DataFrame, str]:
    """Two operators, the second fed by what the first lets go late."""
    joined = outer_join(source)[0].groupBy(F.window("ts", "15 seconds")).agg(F.count("*").alias("n"))
    return joined.selectExpr("window.start AS w", "n"), "append"


def first_rows(source: Input) -> tuple[DataFrame, str]:
    """An operator of one partition, whatever its metadata says."""
    return source.stream().select("k", "v", "ts").limit(150), "append"


def _sum(key: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    before = state.getOption
    total = (before[0] if before else 0) + sum(int(frame.v.sum()) for frame in frames)
    state.update((total,))
    yield pd.DataFrame({"k": [*key], "n": [total]})


def group_state(source: Input) -> tuple[DataFrame, str]:
    schema = "k long, n long"
    sums = (
        source.stream()
        .groupBy("k")
        .applyInPandasWithState(_sum, schema, "n long", "update", GroupStateTimeout.NoTimeout)
    )
    return sums, "update"


class Inactivity(StatefulProcessor):
    """Sums per key, and says so 30 seconds of event time after the last row of a key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.sum = handle.getValueState("sum", StructType([StructField("n", LongType())]))

    def handleInputRows(self, key, rows, timerValues):  # type: ignore[no-untyped-def] # noqa: N802, N803
        rows = list(rows)
        (before,) = self.sum.get() or (0,)
        total = before + sum(row.v for row in rows)
        self.sum.update((total,))
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(int(max(row.ts for row in rows).timestamp() * 1000) + 30_000)
        yield Row(k=key[0], n=total, expired=False)

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):  # type: ignore[no-untyped-def] # noqa: N802, N803
        (total,) = self.sum.get() or (0,)
        yield Row(k=key[0], n=total, expired=True)
        self.sum.clear()

    def close(self) -> None:
        pass


def timers(source: Input) -> tuple[DataFrame, str]:
    # Each key is heard of for 40 seconds or so, then falls silent for minutes.
    heard = source.stream().where("pmod(k - (unix_seconds(ts) - 1700000000) div 40, 7) < 2")
    grouped = heard.withWatermark("ts", "5 seconds").groupBy("k")
    schema = "k long, n long, expired boolean"
    return grouped.transformWithState(Inactivity(), schema, "append", "EventTime"), "append"


Shape = Callable[[Input], tuple[DataFrame, str]]


@dataclass
class Run:
    """One query, and the rows that each of its batches gave."""

    query: StreamingQuery
    rows: dict[int, list[Row]]

    def after(self, batch: int) -> Counter[Row]:
        return Counter(row for b, rows in self.rows.items() if b > batch for row in rows)


def start(shape: Shape, source: Input, checkpoint: Path) -> Run:
    rows: dict[int, list[Row]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        rows[number] = batch.collect()

    frame, mode = shape(source)
    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(checkpoint))
    with session_conf(frame.sparkSession, local_disk_conf(frame.sparkSession)):
        return Run(writer.foreachBatch(keep).start(), rows)


def wait_for(condition: Callable[[], object], query: StreamingQuery) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert query.exception() is None, query.exception()
        assert time.monotonic() < deadline, "waited a minute"
        time.sleep(0.02)


def last_batch(checkpoint: Path) -> int:
    return max((int(p.name) for p in (checkpoint / "commits").glob("[0-9]*")), default=-1)


@dataclass
class Story:
    """Run a query, copy a cut in the middle while it goes on, lose it, bring the cut back, go on."""

    spark: SparkSession
    tmp: Path
    shape: Shape

    def __post_init__(self) -> None:
        self.native = self.tmp / "native"
        self.root = Root(str(self.tmp / "root"))
        self.source = Input(self.spark, self.tmp / "in")

    def tell(self) -> tuple[StageCopy, Counter[Row], Counter[Row]]:
        """Return the copy, and the rows after the cut: of the run that never stopped, of the restored one."""
        self.source.feed(4)
        whole = start(self.shape, self.source, self.native)
        try:
            whole.query.processAllAvailable()
            self.source.feed(2)
            cut = last_batch(self.native) + 1
            wait_for(lambda: last_batch(self.native) >= cut, whole.query)
            copy = self.copy(cut)
            self.source.feed(3)
            whole.query.processAllAvailable()
        finally:
            whole.query.stop()
        # Moved away first: a snapshot that Spark still uploads to the old place must not stop the removal.
        shutil.rmtree(self.native.rename(self.tmp / "lost"))
        restored = self.tmp / "restored"
        materialise(self.root, copy.files, target=Place(str(restored)), query_id=fresh_query_id())
        assert verify_native(Place(str(restored)), copy.files) == ()
        run = start(self.shape, self.source, restored)
        try:
            run.query.processAllAvailable()
        finally:
            run.query.stop()
        assert min(run.rows) == cut + 1
        return copy, whole.after(cut), run.after(cut)

    def copy(self, cut: int) -> StageCopy:
        kept = StateStorage.open(self.root, "job", RunId(1))
        return snapshot_stage(kept, CheckpointId(1), Place(str(self.native)), BatchId(cut))


CASES = [
    (window, "rocksdb"),
    (window, "rocksdb-changelog-2-zstd"),
    (window, "hdfs-offsets-2"),
    (deduplicate, "rocksdb-changelog"),
    (outer_join, "rocksdb-changelog-2"),
    (outer_join, "hdfs"),
    (chained, "rocksdb-changelog-2"),
    (first_rows, "rocksdb-changelog"),
    (group_state, "rocksdb-changelog-2-snappy"),
    (timers, "rocksdb-2"),
]
"""Every operator, and every kind of store."""
LONG = [
    (window, "rocksdb-2"),
    (deduplicate, "hdfs"),
    (outer_join, "rocksdb-changelog"),
    (group_state, "hdfs"),
    (timers, "rocksdb-changelog"),
]
"""The other pairs of them that differ."""
PAIRS = [
    *(pytest.param(shape, stores, id=f"{shape.__name__}-{stores}") for shape, stores in CASES),
    *(
        pytest.param(shape, stores, id=f"{shape.__name__}-{stores}", marks=pytest.mark.long)
        for shape, stores in LONG
    ),
]


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[dict[str, str]], None]]:
    before: dict[str, str | None] = {}

    def change(values: dict[str, str]) -> None:
        for key, value in values.items():
            before.setdefault(key, spark.conf.get(key, None))
            spark.conf.set(key, value)

    yield change
    for key, value in before.items():
        if value is None:
            spark.conf.unset(key)
        else:
            spark.conf.set(key, value)


@pytest.mark.parametrize(("shape", "stores"), PAIRS)
def test_a_cut_brings_the_query_back(
    spark: SparkSession, tmp_path: Path, conf: Callable[[dict[str, str]], None], shape: Shape, stores: str
) -> None:
    """Copied at batch N while the query goes on, restored under another id with the original gone."""
    conf(STORES[stores])
    copy, whole, restored = Story(spark, tmp_path, shape).tell()
    assert sum(whole.values()) > 0
    assert shape is not timers or any(row.expired for row in whole)
    assert restored == whole
    assert max(file.version for file in versioned(copy)) == copy.cut_batch + 1


def versioned(copy: StageCopy) -> list[StateFile]:
    return [f for f in (state_file(file.path.rpartition("/")[2]) for file in copy.files) if f is not None]


def test_a_snapshot_and_the_changes_after_it(
    spark: SparkSession, tmp_path: Path, conf: Callable[[dict[str, str]], None]
) -> None:
    """The newest snapshot of state is taken and the changes after it, nothing before and nothing later."""
    conf(STORES["rocksdb-2"])
    story = Story(spark, tmp_path, window)
    in_pieces(window, story.source, story.native, 2)
    newest = last_batch(story.native) + 1
    conf(CHANGELOG | {f"{STATE}.minDeltasForSnapshot": "100"})
    in_pieces(window, story.source, story.native, 3)
    cut = last_batch(story.native) - 1
    kinds = {StateFileKind.SNAPSHOT: {newest}, StateFileKind.CHANGES: set(range(newest + 1, cut + 2))}
    found = versioned(story.copy(cut))
    assert {kind: {f.version for f in found if f.kind is kind} for kind in kinds} == kinds


def snapshots(native: Path) -> set[int]:
    """Return the versions of the snapshots that Spark has written."""
    return {f.version for p in native.rglob("*.zip") if (f := state_file(p.name))}


def test_a_snapshot_that_is_kept_and_the_changes_after_it_bring_the_query_back(
    spark: SparkSession, tmp_path: Path, conf: Callable[[dict[str, str]], None]
) -> None:
    """Though Spark has made a newer one since: that is not in the restored directory, nor missed there."""
    conf(STORES["rocksdb"])
    story = Story(spark, tmp_path, window)
    kept = StateStorage.open(story.root, "job", RunId(1))

    def copy() -> tuple[StageCopy, set[int]]:
        cut = BatchId(last_batch(story.native))
        taken = snapshot_stage(kept, CheckpointId(1), Place(str(story.native)), cut)
        return taken, {f.version for f in versioned(taken) if f.kind is StateFileKind.SNAPSHOT}

    in_pieces(window, story.source, story.native, 3)
    _, bases = copy()
    assert bases
    conf(CHANGELOG | {f"{STATE}.minDeltasForSnapshot": "2"})
    run = start(window, story.source, story.native)
    try:
        for _ in range(2):
            story.source.feed()
            run.query.processAllAvailable()
        wait_for(lambda: max(snapshots(story.native)) > max(bases), run.query)
    finally:
        run.query.stop()
    taken, same = copy()
    assert same <= bases
    expected = in_pieces(window, story.source, story.native, 2)
    story.native.rename(tmp_path / "lost")
    materialise(story.root, taken.files, target=Place(str(tmp_path / "restored")), query_id=fresh_query_id())
    run = start(window, story.source, tmp_path / "restored")
    try:
        run.query.processAllAvailable()
    finally:
        run.query.stop()
    assert sum(expected.values()) > 0
    assert run.after(-1) == expected


def in_pieces(shape: Shape, source: Input, checkpoint: Path, files: int) -> Counter[Row]:
    """Feed file by file, each to a query that starts from disk: what lies there is what is read."""
    rows: Counter[Row] = Counter()
    for _ in range(files):
        source.feed()
        run = start(shape, source, checkpoint)
        try:
            run.query.processAllAvailable()
        finally:
            run.query.stop()
        rows += run.after(-1)
    return rows


def test_nothing_of_an_abandoned_future_comes_back(
    spark: SparkSession, tmp_path: Path, conf: Callable[[dict[str, str]], None]
) -> None:
    """Wrong files after the cut, and the state they led to, leave no trace in what is restored.

    Had capture kept the newer state files, they would be read in silence: the last line sees that.
    """
    conf(STORES["rocksdb"])
    story = Story(spark, tmp_path, window)
    source, right = story.source, Input(spark, tmp_path / "right")
    in_pieces(window, source, story.native, 3)
    cut, files = last_batch(story.native), source.files
    source.wrong = True
    in_pieces(window, source, story.native, 2)
    copy = story.copy(cut)
    # From here on versions give changes only, so that what they leave of older snapshots stays.
    conf(STORES["rocksdb-changelog"] | {f"{STATE}.minDeltasForSnapshot": "100"})
    in_pieces(window, right, tmp_path / "never", 3)
    expected = in_pieces(window, right, tmp_path / "never", 2)

    def restore(name: str, spoil: Callable[[Path], None]) -> Counter[Row]:
        for path in sorted(source.directory.iterdir())[files:]:
            path.unlink()
        source.wrong, source.files = False, files
        materialise(story.root, copy.files, target=Place(str(tmp_path / name)), query_id=fresh_query_id())
        spoil(tmp_path / name)
        return in_pieces(window, source, tmp_path / name, 2)

    def keep_newer(restored: Path) -> None:
        for store in (story.native / "state/0").glob("[0-9]*"):
            shutil.copytree(store, restored / "state/0" / store.name, dirs_exist_ok=True)

    assert restore("clean", lambda _: None) == expected
    assert restore("spoilt", keep_newer) != expected
