"""The positions of a stage's sources at a checkpoint, as text for a person. No JVM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spark_abs.manifest import StageSnapshot, StoredFile
from spark_abs.model import StageId, positions_of
from spark_abs.snapshots.layout import file_source_offset, parse_offsets, source_entries, source_log_file
from spark_abs.snapshots.operators import stored_texts
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """How far a stage has read one of its native sources."""

    stage: StageId
    source: str
    """Its index among the stage's inputs, or its name."""
    offset: str
    """The offset as Spark has written it."""
    said: str
    """The offset for a person."""
    files: tuple[str, ...] = ()
    """The input files of its last batch, if it reads files."""


def source_positions(root: Root, snapshot: StageSnapshot) -> tuple[SourcePosition, ...]:
    """Return the positions of the native sources of a stage, without those of its channels.

    Raises:
        DamageError: bytes are missing from `state/` or altered.
    """
    if not snapshot.offsets:
        return ()
    found = []
    for source, offset in parse_offsets(snapshot.offsets).offsets.items():
        if positions_of([offset]):
            continue
        last = file_source_offset(offset)
        files = () if last is None else _files(root, snapshot, source, last)
        found.append(SourcePosition(snapshot.stage, source, offset, readable(offset), files))
    return tuple(found)


def readable(offset: str) -> str:
    """Return the offset of files, a Delta table or Kafka topics for a person, any other unchanged.

    {"logOffset":4}                 file batch 4
    {"reservoirVersion":7,...}      version 7, file 2
    {"orders":{"1":9,"0":12}}       orders[0] 12, orders[1] 9
    """
    try:
        plain = json.loads(offset)
    except ValueError:
        return offset
    if not isinstance(plain, dict):
        return str(plain)
    if (number := file_source_offset(offset)) is not None:
        return f"file batch {number}"
    if "reservoirVersion" in plain:
        index = plain.get("index", -1)
        file = f", file {index}" if isinstance(index, int) and index >= 0 else ""
        return f"version {plain['reservoirVersion']}{file}"
    if plain and all(isinstance(parts, dict) for parts in plain.values()):
        return ", ".join(
            f"{topic}[{part}] {at}" for topic in sorted(plain) for part, at in _parts(plain[topic])
        )
    return json.dumps(plain, separators=(", ", ": "))


def _parts(partitions: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(partitions.items(), key=lambda part: (len(part[0]), part[0]))


def _files(root: Root, snapshot: StageSnapshot, source: str, batch: int) -> tuple[str, ...]:
    """Return the files of a batch, from the log of a file source: a file has one batch, or all up to it."""
    logs: dict[tuple[bool, int], StoredFile] = {}
    for file in snapshot.files:
        directory, _, name = file.path.rpartition("/")
        log = source_log_file(name)
        if directory != f"sources/{source}" or log is None:
            continue
        if log.number == batch or (log.compact and log.number > batch):
            logs[log.compact, log.number] = file
    if not logs:
        return ()
    file = logs[min(logs)]
    entries = source_entries(stored_texts(root, [file])[file.path])
    return tuple(entry.path for entry in entries if entry.batch == batch)
