"""From a manifest to what the page compares: positions, table versions, sizes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from spark_abs.advice import named
from spark_abs.codec import from_plain, parsed, require_format
from spark_abs.errors import AbsError, DamageError
from spark_abs.manifest import CHANNEL, Manifest, StageSnapshot
from spark_abs.model import FORMAT, positions_of
from spark_abs.observe.sources import readable
from spark_abs.report.model import Cut, SinkCut, SourceCut, StageCut
from spark_abs.report.redaction import redacted
from spark_abs.snapshots.layout import parse_offsets

LONGEST_POSITION = 300


def read_manifest(version: int, body: str) -> tuple[Manifest, Cut]:
    """Read a manifest without the names of its files, which may be tens of thousands.

    Raises:
        DamageError: the text is no manifest, or has a newer format.
    """
    require_format(version, FORMAT, "a checkpoint")
    plain = parsed(body, dict, "a manifest")
    sizes = [_files(stage) for stage in _stages(plain)]
    manifest = from_plain(Manifest, plain)
    return manifest, _cut(manifest, sizes)


def _stages(plain: dict[str, Any]) -> list[dict[str, Any]]:
    stages = plain.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise DamageError("a manifest: expected stages")
    return stages


def _files(stage: dict[str, Any]) -> tuple[int, int]:
    """Take the files out of a stage, and return their number and size."""
    files = stage.pop("files", [])
    try:
        return len(files), sum(int(file["size"]) for file in files)
    except (TypeError, KeyError, ValueError) as error:
        raise DamageError(f"a manifest: files of stage {stage.get('stage')!r}: {error!r}") from error


def _cut(manifest: Manifest, sizes: Iterable[tuple[int, int]]) -> Cut:
    return Cut(
        manifest.id,
        tuple(
            StageCut(
                s.stage,
                s.cut_batch,
                size_full=size,
                files=files,
                partitions=s.shuffle_partitions,
                watermark_ms=s.watermark_ms,
            )
            for s, (files, size) in zip(manifest.stages, sizes, strict=True)
        ),
        tuple(
            SinkCut(s.stage, o.output, o.kind, redacted(named(o.name, o.table)), o.version)
            for s in manifest.stages
            for o in s.outputs
            if o.kind != CHANNEL
        ),
        tuple(source for s in manifest.stages for source in _sources(s)),
        manifest.outside or (),
    )


def _sources(snapshot: StageSnapshot) -> Iterator[SourceCut]:
    if not snapshot.offsets:
        return
    try:
        offsets = parse_offsets(snapshot.offsets).offsets
    except AbsError:
        yield SourceCut(snapshot.stage, "?", "its offsets cannot be read")
        return
    for source, offset in offsets.items():
        if _is_position(offset):
            continue
        text = redacted(readable(offset))
        cut = text if len(text) <= LONGEST_POSITION else f"{text[:LONGEST_POSITION]} …"
        yield SourceCut(snapshot.stage, source, cut)


def _is_position(offset: str) -> bool:
    try:
        return bool(positions_of([offset]))
    except (DamageError, json.JSONDecodeError):
        return True
