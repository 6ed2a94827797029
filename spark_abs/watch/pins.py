"""Which clean-up of a table deletes what a kept cut needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spark_abs.keep import Keep
from spark_abs.quantities import written
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

_CLEAN_UPS = (
    ("delta.deletedFileRetentionDuration", "interval 1 week", "VACUUM may delete files of versions"),
    ("delta.logRetentionDuration", "interval 30 days", "Delta may delete the log of versions"),
)
"""Property of a table, Delta's default, and what may be deleted after that time."""
_MS = {
    "millisecond": 1,
    "second": 1000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 604_800_000,
}
_PART = re.compile(rf"(\d+)\s+({'|'.join(_MS)})s?")


@dataclass(frozen=True, slots=True)
class CleanUp:
    """A clean-up of a table."""

    property: str
    deleted: str
    """What it may delete, as a sentence without its end."""
    after_ms: int


def warnings(tables: Sequence[Place], keep: Keep) -> tuple[str, ...]:
    """Say which tables may lose what a rewind to a kept cut needs, before the cut is too old to be kept."""
    return tuple(said for place in tables for said in _of_table(place, keep))


def _of_table(place: Place, keep: Keep) -> list[str]:
    return [
        f"table {place}: {found.deleted} that are older than {written(found.after_ms)}, and cuts are kept "
        f"up to {written(keep.up_to_ms)}: a rewind to older ones will be refused. Set the property "
        f"{found.property} with ALTER TABLE … SET TBLPROPERTIES, or keep cuts for less"
        for found in clean_ups(place)
        if found.after_ms < keep.up_to_ms
    ]


def clean_ups(place: Place) -> tuple[CleanUp, ...]:
    """Return the clean-ups of a table, without those whose interval cannot be read."""
    given = Table.open(place).delta.metadata().configuration
    return tuple(
        CleanUp(name, deleted, after_ms)
        for name, default, deleted in _CLEAN_UPS
        if (after_ms := interval_ms(given.get(name) or default)) is not None
    )


def interval_ms(text: str) -> int | None:
    """Read an interval such as `interval 7 days`; None for one in other units, as months."""
    rest = text.lower().strip().removeprefix("interval").strip()
    parts = _PART.findall(rest)
    if not parts or _PART.sub("", rest).strip():
        return None
    return sum(int(count) * _MS[unit] for count, unit in parts)
