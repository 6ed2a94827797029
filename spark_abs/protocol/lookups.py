"""At which version a batch reads a lookup.

The version is chosen when a batch is first evaluated, and the first commit of the batch names it. A repeat
takes it from there; the next batch never goes back behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_abs.errors import DamageError
from spark_abs.model import LookupVersion


def is_due(last: LookupVersion | None, max_age_ms: int | None, now_ms: int) -> bool:
    """Say whether a batch looks for a newer version.

    Args:
        last: what the batch before had; None for the first.
        max_age_ms: for how long batches may go on with a version; None: for ever.
        now_ms: the time. A clock that was put back makes no version last longer.
    """
    if last is None:
        return True
    return max_age_ms is not None and not 0 <= now_ms - last.at_ms < max_age_ms


def following(last: LookupVersion | None, newest: LookupVersion) -> LookupVersion:
    """Return the newest version as the one that a batch reads after the one before it.

    Raises:
        DamageError: it is of another table, or older.
    """
    if last is None:
        return newest
    if last.table_id != newest.table_id:
        raise DamageError(
            f"lookup {newest.lookup!r}: {newest.table} is another table now, {newest.table_id}; batches have "
            f"read {last.table_id} at version {last.version}. If the new one is meant, declare it as a "
            "lookup of another name; or put the table back"
        )
    if newest.version < last.version:
        raise DamageError(
            f"lookup {newest.lookup!r}: {newest.table} is at version {newest.version}, and a batch has read "
            f"version {last.version}: an older copy was put in its place. Put the newer one back, or declare "
            "a lookup of another name"
        )
    return newest


def version_of(name: str, table: str, found: Iterable[LookupVersion]) -> LookupVersion | None:
    """Return what is recorded of a lookup, None if nothing is: it may be new, or lead to another place."""
    return next((v for v in found if (v.lookup, v.table) == (name, table)), None)
