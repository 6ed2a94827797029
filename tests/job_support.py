"""Jobs on real Spark: inputs fed file by file, waiting, and what a root says against batch queries."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pyarrow as pa
from chispa import assert_df_equality
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_abs.job import Job
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import CheckpointId, StageId, channel_id
from spark_abs.plan.frames import build_frames, check_frames, draft_gate
from spark_abs.run.run import Run
from spark_abs.snapshots.verify import verify_state
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent
from spark_abs.store.root import Root
from tests.invariants import Edge, Outcome, consistent_cut, one_outcome, only_completed, require
from tests.lagging import lags_without_rows

EPOCH = 1_700_000_000
"""Second 0 of event time; files have rising modification times from here, so that they are read in order."""

JsonRow = Mapping[str, object]


@dataclass
class Feed:
    """A directory of JSON files for a file source that takes one a batch: n files are offset n-1.

    A column `ts` is given in seconds since `EPOCH` and read as a timestamp.
    """

    spark: SparkSession
    directory: Path
    schema: str = "id long, k long, v long, ts long"
    files: list[list[JsonRow]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)

    def write(self, *rows: JsonRow) -> None:
        """Add one file, seen whole or not at all."""
        number = len(self.files)
        unseen = self.directory.parent / f".{self.directory.name}-{number}"
        unseen.write_text("\n".join(json.dumps(_stamped(row)) for row in rows))
        os.utime(unseen, (EPOCH + number, EPOCH + number))
        self.files.append(list(rows))
        unseen.rename(self.directory / f"{number:05}.json")

    def write_all(self, files: Iterable[Sequence[JsonRow]]) -> None:
        for rows in files:
            self.write(*rows)

    def stream(self) -> DataFrame:
        read = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return _with_time(read.json(str(self.directory)))

    def batch(self) -> DataFrame:
        """Return all rows, with the number of their file."""
        rows = [{**_stamped(row), "file": n} for n, rows in enumerate(self.files) for row in rows]
        return _with_time(self.spark.createDataFrame(rows, f"{self.schema}, file long"))


def _stamped(row: JsonRow) -> JsonRow:
    ts = row.get("ts")
    return {**row, "ts": EPOCH + ts} if isinstance(ts, int) else row


def _with_time(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(*("timestamp_seconds(ts) AS ts" if c == "ts" else c for c in frame.columns))


def checked(job: Job) -> tuple[Mapping[StageId, PlanFacts], tuple[str, ...]]:
    """Check a job's graph as its start does; returns what the plans say, and doubts about watermarks."""
    spec, graph = job.spec(), job.graph()
    return check_frames(
        graph, build_frames(spec, graph, open_gate=lambda _, *given: draft_gate(job.spark, *given))
    )


def eventually(run: Run, condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until a condition holds; an error that ends the job is raised at once."""
    deadline = time.monotonic() + seconds
    while not condition():
        ended = run.await_termination(0.05)
        assert not ended or condition(), f"the job ended before: {what}"
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"


def hold_until(point: str, condition: Callable[[], object], seconds: float = 120) -> Callable[[str], None]:
    """Return a failpoint that holds whoever comes to a point until a condition holds."""
    pause = threading.Event()

    def failpoint(at: str) -> None:
        deadline = time.monotonic() + seconds
        while at == point and not condition():
            assert time.monotonic() < deadline, f"held at {point} for {seconds} s"
            pause.wait(0.02)

    return failpoint


def manifests(root: str) -> tuple[Manifest, ...]:
    at = Root(root)
    return Checkpoints.open(at, Control.open(at).state.job).load_all()


def files_read(manifest: Manifest, source: str) -> int:
    """Return how many files a stage's file source had taken at a checkpoint."""
    snapshot = manifest.stage(StageId(source))
    assert snapshot is not None
    offsets = [json.loads(line) for line in snapshot.offsets.split("\n") if "logOffset" in line]
    return sum(int(offset["logOffset"]) + 1 for offset in offsets)


def caught_up(root: str, feeds: Mapping[str, Feed]) -> bool:
    """Say whether the newest checkpoint is behind everything that was fed."""
    at = Root(root)
    checkpoints = Checkpoints.open(at, Control.open(at).state.job)
    ids = checkpoints.summaries()
    if not ids:
        return False
    newest = checkpoints.load(ids[-1].id)
    return all(files_read(newest, source) == len(feed.files) for source, feed in feeds.items())


def version_of(manifest: Manifest, sink: str) -> int:
    """Return the version of a Delta sink at a checkpoint."""
    outputs = [o for s in manifest.stages for o in s.outputs]
    (version,) = [o.version for o in outputs if o.output == sink and o.kind == "delta"]
    assert version is not None
    return int(version)


def read_table(table: str | Path, version: int | None = None) -> pa.Table:
    return DeltaTable(str(table), version=version).to_pyarrow_table()


def newest_data(table: str | Path) -> int:
    """Return the newest version of a table that added rows, -1 if its log has none any more."""
    commits = Path(table, "_delta_log").glob("*.json")
    return max((int(c.stem) for c in commits if '{"add":' in c.read_text()), default=-1)


def events(root: str, kind: HistoryEvent) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = History(Root(root)).read().to_pylist()
    return [row for row in rows if row["event"] == kind.value]


def assert_tables_at_every_cut(
    spark: SparkSession,
    root: str,
    feeds: Mapping[str, Feed],
    tables: Mapping[str, str],
    where: Path,
) -> tuple[Manifest, ...]:
    """Compare sinks at every checkpoint with batch queries over the inputs at their recorded positions.

    A query sees a view for each feed, with the rows that its source had read at a checkpoint, and a view
    `stages` (checkpoint, stage, watermark). It returns `checkpoint`, then the columns of the table. The
    positions, the outcomes and the stored bytes (invariants 1 and 2) are checked too.

    Args:
        spark: a session.
        root: the job's root.
        feeds: by the name of the source.
        tables: a batch query for each sink.
        where: the directory of the sinks' tables.

    Returns:
        All manifests, by id.
    """
    found = manifests(root)
    assert found, "no checkpoint was completed"
    require(consistent_cut(edge for manifest in found for edge in _edges(Path(root), manifest)))
    require(_outcomes(root, found))
    assert verify_state(Root(root), found) == ()
    for source, feed in feeds.items():
        read = [(int(m.id), files_read(m, source)) for m in found]
        cuts = spark.createDataFrame(read, "checkpoint long, files long")
        feed.batch().join(cuts, F.col("file") < F.col("files")).createOrReplaceTempView(source)
    watermarks = [(int(m.id), str(s.stage), s.watermark_ms) for m in found for s in m.stages]
    stages = spark.createDataFrame(watermarks, "checkpoint long, stage string, ms long")
    stages = stages.selectExpr("checkpoint", "stage", "timestamp_millis(ms) AS watermark")
    stages.createOrReplaceTempView("stages")
    for sink, query in tables.items():
        there = [_at_cut(where / sink, sink, manifest) for manifest in found]
        assert there[-1].num_rows > 0, f"{sink} is empty to the end"
        have = spark.createDataFrame(pa.concat_tables(there).combine_chunks())
        want = spark.sql(query)
        assert_df_equality(have, want, ignore_row_order=True, ignore_nullable=True)
    return found


def _at_cut(table: Path, sink: str, manifest: Manifest) -> pa.Table:
    rows = read_table(table, version_of(manifest, sink))
    return rows.add_column(0, "checkpoint", pa.array([int(manifest.id)] * rows.num_rows, pa.int64()))


def _edges(root: Path, manifest: Manifest) -> Iterator[Edge]:
    outputs = [(s.stage, o) for s in manifest.stages for o in s.outputs if o.kind == "channel"]
    produced = {channel_id(stage, o.output): o.version for stage, o in outputs}
    for snapshot in manifest.stages:
        for position in snapshot.positions:
            version = produced[position.channel]
            assert version is not None
            closed = position.is_closed(manifest.run)
            rowless = lags_without_rows(root, manifest, position, version)
            yield Edge(
                manifest.id, position.channel, snapshot.stage, version, position, closed, rowless=rowless
            )


def _outcomes(root: str, found: Sequence[Manifest]) -> Iterator[str]:
    """Take claims from `history/`, and outcomes from the log of `checkpoints/` as it lies there."""
    job = Control.open(Root(root)).state.job
    outcomes = []
    for path in sorted(Path(root, "checkpoints/_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        ids = [a["txn"]["version"] for a in actions if "txn" in a and a["txn"]["appId"] == job]
        outcomes += [Outcome(number, any("add" in action for action in actions)) for number in ids]
    claimed = [cast("CheckpointId", row["checkpoint"]) for row in events(root, HistoryEvent.TRIGGERED)]
    yield from one_outcome(claimed, outcomes)
    yield from only_completed([manifest.id for manifest in found], outcomes)


def grow_old(table: str) -> None:
    """Let all commits be older than the time for which Delta lets anybody open a version."""
    then = time.time() - 9 * 86_400
    for commit in (Path(table) / "_delta_log").glob("*.json"):
        os.utime(commit, (then, then))
