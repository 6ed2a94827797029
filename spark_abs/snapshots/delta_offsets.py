"""Offsets of Delta sources: the table, and how far of its log a stage has read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DELTA = "delta"
"""The name of Delta's source, as a `SourceShape` has it."""
FEED = "changes"
"""What `SourceShape.at` says of a source that reads the change data feed."""
_BEFORE_ALL = -100
"""The index before all files of a version; sources of version 1 write -1."""


@dataclass(frozen=True, slots=True)
class DeltaOffset:
    """Where a stage goes on in a table: after file `index` of a version."""

    table_id: str
    version: int
    index: int
    """Of the last file that was read; below 0 if none of the version was."""
    initial: bool
    """Whether it is among all files that the table had at the version, and not among those that the version
    has added: so a query begins that reads a table from its present rows on."""

    @property
    def commit(self) -> int:
        """The first commit that is still to be read."""
        return self.version + 1 if self.initial else self.version


def delta_offset(offset: str | None) -> DeltaOffset | None:
    """Read a source's line of an offset file; None if it is of no Delta source."""
    try:
        plain: Any = json.loads(offset or "")
        found = plain["reservoirId"], plain["reservoirVersion"], plain["index"], plain["isStartingVersion"]
    except (ValueError, TypeError, KeyError):
        return None
    table, version, index, initial = found
    if type(version) is not int or type(index) is not int:
        return None
    return DeltaOffset(str(table), version, _BEFORE_ALL if index == -1 else index, bool(initial))
