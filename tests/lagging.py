"""Whether rows lie between a consumer's position and its producer's barrier, read from the log itself."""

from __future__ import annotations

import json
from pathlib import Path

from spark_abs.manifest import Manifest
from spark_abs.model import AttemptId, Position, Version, counts
from spark_abs.protocol.path import channel_path
from spark_abs.store.control import Control
from spark_abs.store.root import Root


def lags_without_rows(root: Path, manifest: Manifest, position: Position, until: Version) -> bool:
    """Say whether a stage stands before a barrier with no rows in between: it took it where it stood."""
    log = root / "channels" / position.channel / "_delta_log"
    path = channel_path(Control.open(Root(str(root))).state, position.channel, manifest.cut.attempt)
    between = [(v, log / f"{v:020}.json") for v in range(position.version + 1, until + 1)]
    return bool(between) and all(
        not _has_rows(file) or not counts(path, _attempt(file), Version(v)) for v, file in between
    )


def _has_rows(file: Path) -> bool:
    return any("add" in json.loads(line) for line in file.read_text().splitlines())


def _attempt(file: Path) -> AttemptId:
    infos = (json.loads(line).get("commitInfo") for line in file.read_text().splitlines())
    texts = [info["userMetadata"] for info in infos if info and info.get("userMetadata")]
    return AttemptId(json.loads(texts[0]).get("attempt", 0) if texts else 0)
