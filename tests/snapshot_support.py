"""Files in `state/` without Spark, and manifests around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyarrow import fs

from spark_abs.manifest import Manifest, OutputVersion, StageShape, StageSnapshot, StoredFile
from spark_abs.model import (
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    Position,
    RunId,
    StageId,
    Version,
    producer,
)
from spark_abs.snapshots.capture import CapturedFile
from spark_abs.snapshots.state_storage import StateStorage, Stored
from spark_abs.store.root import Root

LOCAL = fs.LocalFileSystem()


def captured(directory: Path, **contents: bytes) -> list[CapturedFile]:
    """Write files and list them as a capture does."""
    directory.mkdir(exist_ok=True)
    for name, data in contents.items():
        if not (directory / name).exists():
            (directory / name).write_bytes(data)
    infos = LOCAL.get_file_info([str(directory / name) for name in contents])
    return [CapturedFile(i.base_name, i.size, i.mtime_ns) for i in infos]


def store(kept: StateStorage, checkpoint: CheckpointId, directory: Path, **contents: bytes) -> Stored:
    return kept.store(checkpoint, LOCAL, str(directory), captured(directory, **contents))


def packs_in(root: Root) -> list[str]:
    return sorted(p.name for p in Path(root.uri, "state").glob("*.parquet"))


def manifest_of(
    checkpoint: int,
    files: Sequence[StoredFile] = (),
    *,
    kind: CheckpointKind = CheckpointKind.CHECKPOINT,
    attempt: int = 1,
    reads: Mapping[str, int | None] | None = None,
    writes: Mapping[str, int] | None = None,
) -> Manifest:
    """A stage that names `files` and has read its channels so far, and the stages that write channels."""
    stage = StageId("match")
    read = {ChannelId(c): v for c, v in (reads or {}).items()}
    snapshot = StageSnapshot(
        stage=stage,
        cut_batch=BatchId(checkpoint),
        positions=tuple(
            Position(c, AttemptId(attempt), Version(v), CheckpointId(checkpoint), True)
            for c, v in read.items()
            if v is not None
        ),
        outputs=(),
        files=tuple(files),
    )
    writers = (
        replace(
            snapshot,
            stage=producer(ChannelId(c)),
            positions=(),
            outputs=(OutputVersion(c.partition(".")[2], "channel", f"channels/{c}", "id", Version(v)),),
            files=(),
        )
        for c, v in (writes or {}).items()
    )
    return Manifest(
        id=CheckpointId(checkpoint),
        attempt=AttemptId(attempt),
        run=RunId(1),
        job="job",
        kind=kind,
        name=None,
        triggered_ms=1,
        acked_ms=2,
        completed_ms=3,
        graph=(StageShape(stage, tuple(read), {}, {}, {}),),
        stages=(snapshot, *writers),
    )
