"""The version of a lookup that a batch reads.

The version is chosen when a batch is first evaluated, and the first commit of the batch names it. A repeat of
the batch reads the version in this commit; later batches never read an older version.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_abs.errors import DamageError
from spark_abs.model import LookupVersion


def is_due(last: LookupVersion | None, max_age_ms: int | None, now_ms: int) -> bool:
    """Say whether a batch checks for a newer version.

    Args:
        last: the version in the batch before; None for the first batch.
        max_age_ms: for how long batches may use a version; None: for ever.
        now_ms: the time. A clock that was set back does not prolong the use of a version.
    """
    if last is None:
        return True
    return max_age_ms is not None and not 0 <= now_ms - last.at_ms < max_age_ms


def following(last: LookupVersion | None, newest: LookupVersion) -> LookupVersion:
    """Return the newest version for a batch, checked against the version of the batch before.

    Raises:
        DamageError: the newest version belongs to a different table, or is older.
    """
    if last is None:
        return newest
    if last.table_id != newest.table_id:
        raise DamageError(
            f"lookup {newest.lookup!r}: {newest.table} was replaced: its table id is {newest.table_id}, but "
            f"earlier batches have read the table with id {last.table_id} at version {last.version}. Put "
            "the old table back; or, to use the new table, declare the lookup under a new name"
        )
    if newest.version < last.version:
        raise DamageError(
            f"lookup {newest.lookup!r}: {newest.table} is at version {newest.version}, but a batch has read "
            f"version {last.version}: the table was replaced by an older copy. Put the newer copy back, or "
            "declare the lookup under a new name"
        )
    return newest


def version_of(name: str, table: str, found: Iterable[LookupVersion]) -> LookupVersion | None:
    """Return the recorded version of a lookup; None if the lookup is new or its place has changed."""
    return next((v for v in found if (v.lookup, v.table) == (name, table)), None)
