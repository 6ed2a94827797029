"""The log in which Delta tracks the schema of a source, within a native checkpoint. Written for Delta 4.4.

An entry is the schema of the table from a version on. It names its source by the source's absolute path in
the checkpoint. After the batch that reads up to a schema change, Delta writes an entry and ends the query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spark_abs.codec import parsed
from spark_abs.errors import DamageError, Refused
from spark_abs.snapshots.delta_offsets import delta_offset

SCHEMA_LOGS = "schema_tracking"
"""The directory of all logs within a native checkpoint: the value of `schemaTrackingLocation`."""
_CHANGE = -20
"""The index of a schema change in a version: it comes before all files."""
_ENTRY = re.compile(rf"{SCHEMA_LOGS}/[^/]+/\d+")
_SOURCE = re.compile(r".*/sources/([^/]+)")


@dataclass(frozen=True, slots=True)
class SchemaEntry:
    """An entry: the version from which its schema holds, and the source's name in `sources/`."""

    version: int
    source: str


def is_schema_entry(path: str) -> bool:
    """Say whether a file of a native checkpoint is an entry of a schema log."""
    return _ENTRY.fullmatch(path) is not None


def schema_entry(text: str) -> SchemaEntry:
    """Read an entry.

    Raises:
        Refused: a newer version of the entry.
        DamageError: the entry does not have Delta's format.
    """
    plain = _plain(text)
    version, match = plain.get("deltaCommitVersion"), _SOURCE.fullmatch(str(plain.get("sourceMetadataPath")))
    if type(version) is not int or match is None:
        raise DamageError(f"schema tracking log: the version or the source is missing in {text[:200]!r}")
    return SchemaEntry(version, match[1])


def entries_at(
    entries: Mapping[int, Callable[[], str]], offset: Callable[[str], str | None]
) -> frozenset[int]:
    """Return the entries of a log that existed when its source had read up to an offset.

    Args:
        entries: number to reader of the entry. They are read from the newest back to one that holds at the
            offset.
        offset: source to its line in the offset file of the cut.
    """
    for number in sorted(entries, reverse=True):
        entry = schema_entry(entries[number]())
        at = delta_offset(offset(entry.source))
        if at is not None and (entry.version, _CHANGE) <= (at.version, at.index):
            return frozenset(n for n in entries if n <= number)
    return frozenset()


def relocate_entry(text: str, native: str, source: str) -> str:
    """Move an entry to another native checkpoint, where its source may have another name.

    Args:
        text: the file as Delta wrote it.
        native: the other checkpoint as Spark names it, `file:/…` for a local one.
        source: the name of the source in the new checkpoint.
    """
    head, _, _ = text.partition("\n")
    plain = {**_plain(text), "sourceMetadataPath": f"{native}/sources/{source}"}
    return f"{head}\n{json.dumps(plain, separators=(',', ':'))}"


def _plain(text: str) -> dict[str, Any]:
    head, _, body = text.partition("\n")
    if head != "v1":
        raise Refused(f"schema tracking log: version {head[:20]!r} is not supported")
    return parsed(body, dict, "schema tracking log")
