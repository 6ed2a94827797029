"""How many rows the two queries of `recovery` read again, by their offset logs at the moment of the kill.

These are the rows of all batches that were planned by then and are run after it: the one under way, of which
a part may not have been read before, and, where a job goes back to a checkpoint, those after its cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_BATCH, BatchId, ChannelId, StageId, Version, positions_of
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.stages.native import NativeLog
from spark_abs.store.control import Control
from spark_abs.store.log import read_commit, versions_in
from spark_abs.store.root import Root

Offsets = Sequence[str]
"""The lines of an offset file, one for each input; none before the first batch."""


def rows_again(way: str, base: Path) -> int:
    """Return the rows that the queries of a way will read again; of a job, in its first attempt."""
    if way == "plain":
        root = Root(str(base))
        first, second = NativeLog(root.place("c1")), NativeLog(root.place("c2"))
        return _again(first, _committed(first), lambda a, b: _of_files(base / "c1", a, b)) + _again(
            second, _committed(second), lambda a, b: _of_table(root, a, b)
        )
    root = Root(str(base / "root"))
    logs = {stage: NativeLog(root.place(f"native/1/{stage}")) for stage in ("rows", "counts")}
    since = {stage: _committed(log) for stage, log in logs.items()}
    if way == "checkpoint":
        newest = Checkpoints.open(root, Control.open(root).state.job).load_all()[-1]
        for stage in logs:
            snapshot = newest.stage(StageId(stage))
            none = snapshot is None or snapshot.cut_batch == NO_BATCH
            since[stage] = () if snapshot is None or none else parse_offsets(snapshot.offsets).lines
    return _again(
        logs["rows"], since["rows"], lambda a, b: _of_files(base / "root/native/1/rows", a, b)
    ) + _again(logs["counts"], since["counts"], lambda a, b: _of_channel(root, a, b))


def _committed(log: NativeLog) -> Offsets:
    return _lines(log, log.newest_committed())


def _lines(log: NativeLog, batch: BatchId) -> Offsets:
    return () if batch == NO_BATCH else log.offsets(batch).lines


def _again(log: NativeLog, since: Offsets, count: Callable[[Offsets, Offsets], int]) -> int:
    planned = _lines(log, log.newest_planned())
    return count(since, planned) if planned else 0


def _of_files(checkpoint: Path, since: Offsets, until: Offsets) -> int:
    """Count the rows of the files that a source took; every tenth file of its log repeats those before it."""
    first, last = (json.loads(lines[0])["logOffset"] if lines else -1 for lines in (since, until))
    rows = 0
    for number in range(first + 1, last + 1):
        log = checkpoint / "sources/0" / str(number)
        text = log.read_text() if log.exists() else log.with_suffix(".compact").read_text()
        for line in text.splitlines()[1:]:
            entry = json.loads(line)
            if entry["batchId"] == number:
                rows += pq.read_metadata(entry["path"].removeprefix("file://")).num_rows
    return rows


def _of_channel(root: Root, since: Offsets, until: Offsets) -> int:
    first, last = (
        {p.channel: p.version for p in positions_of(lines)}.get(ChannelId("rows.main"), Version(0))
        for lines in (since, until)
    )
    commits = (read_commit(root.fs, root.path("channels/rows.main"), v) for v in range(first + 1, last + 1))
    return sum(file.rows for commit in commits if commit is not None for file in commit.adds)


def _of_table(root: Root, since: Offsets, until: Offsets) -> int:
    """Count the rows of a Delta table between two offsets of Delta's source: a version, a file in it."""
    first, last = (_delta_offset(lines) for lines in (since, until))
    path, rows = root.path("rows"), 0
    for version in versions_in(root.fs, path):
        commit = read_commit(root.fs, path, version)
        for index, file in enumerate(() if commit is None else commit.adds):
            rows += file.rows if first < (version, index) <= last else 0
    return rows


def _delta_offset(lines: Offsets) -> tuple[int, int]:
    if not lines:
        return -1, -1
    offset = json.loads(lines[0])
    return int(offset["reservoirVersion"]), int(offset["index"])
