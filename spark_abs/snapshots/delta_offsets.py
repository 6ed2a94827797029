"""Offsets of Delta sources: the table, and how far of its log a stage has read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spark_abs.snapshots.layout import parse_offsets, with_offsets

DELTA = "delta"
"""The name of Delta's source, as a `SourceShape` has it."""
FEED = "changes"
"""The value of `SourceShape.at` for a source that reads the change data feed."""
_BEFORE_ALL = -100
"""The index before all files of a version; sources of version 1 write -1."""


@dataclass(frozen=True, slots=True)
class DeltaOffset:
    """Where a stage resumes in a table: after file `index` of a version."""

    table_id: str
    version: int
    index: int
    """The last file that was read; below 0 if no file of the version was read."""
    initial: bool
    """Whether `index` counts all files of the table at the version, and not only the files that the version
    added. A query that starts with the table's present rows begins with such an offset."""

    @property
    def commit(self) -> int:
        """The first commit that is not yet read to its end."""
        return self.version + 1 if self.initial else self.version

    def unread(self, is_last: Callable[[int, int], bool]) -> int | None:
        """Return the first version that is not read; None if a version is read in part.

        `is_last` says of a version and an index whether the version has no file left to read.
        """
        if self.initial:  # its index counts all files of the table; after the last Delta leaves the version
            return None
        if self.index < 0:
            return self.version
        return self.version + 1 if is_last(self.version, self.index) else None


def delta_offset(offset: str | None) -> DeltaOffset | None:
    """Parse a source's line of an offset file; None if the source is not Delta."""
    try:
        plain: Any = json.loads(offset or "")
        found = plain["reservoirId"], plain["reservoirVersion"], plain["index"], plain["isStartingVersion"]
    except (ValueError, TypeError, KeyError):
        return None
    table, version, index, initial = found
    if type(version) is not int or type(index) is not int:
        return None
    return DeltaOffset(str(table), version, _BEFORE_ALL if index == -1 else index, bool(initial))


def jumped(text: str, jumps: Mapping[str, int]) -> str:
    """Return the text of an offset file in which Delta sources begin at the start of a later version.

    Args:
        text: the content of `offsets/<b>`.
        jumps: source, as `OffsetFile.offsets` names it, to the version.
    """
    offsets = parse_offsets(text).offsets
    return with_offsets(text, {s: _start_of(offsets[s], v) for s, v in jumps.items() if s in offsets})


def _start_of(offset: str, version: int) -> str:
    """Return the offset of a Delta source at the start of a version; another source's stays."""
    if delta_offset(offset) is None:
        return offset
    plain = {**json.loads(offset), "reservoirVersion": version, "isStartingVersion": False}
    # -1 stands for the start of a version in sources of version 1, -100 in later ones.
    plain["index"] = -1 if plain.get("sourceVersion", 1) == 1 else -100
    return json.dumps(plain, separators=(",", ":"))
