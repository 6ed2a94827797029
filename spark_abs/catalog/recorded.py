"""Whether a name still leads to the table that was recorded under it."""

from __future__ import annotations

from collections.abc import Iterable

from spark_abs.catalog.target import TableTarget, same_place
from spark_abs.errors import DamageError, Refused
from spark_abs.model import AttemptId
from spark_abs.protocol.control import AttachedSink
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table


def refuse_moved(
    what: str,
    target: TableTarget,
    records: Iterable[AttachedSink],
    attempt: AttemptId,
    storage: Storage,
    otherwise: str,
) -> None:
    """Refuse a name that leads elsewhere than the newest record under it says.

    A table that is gone is no obstacle in an attempt that has not come to it: the restore that made the
    attempt was told to leave it (`--force rows`).

    Args:
        what: whose table it is, for the message.
        target: where the name leads now.
        records: those of the same sink or query.
        attempt: the newest attempt.
        storage: how object stores are reached.
        otherwise: how somebody begins with the other table on purpose.

    Raises:
        Refused: it leads elsewhere, or to another table at the same place.
    """
    said = target.said.casefold()
    mine = [r for r in records if r.name.casefold() == said and (r.table_id or r.version is None)]
    if target.name is None or not mine:
        return
    newest = mine[-1]
    now, before = table_id(storage, target.uri), newest.table_id
    if same_place(target.uri, newest.table) and before in (now, ""):
        return
    found = table_id(storage, newest.table)
    there = found == before if before else bool(found)
    if not there and newest.attempt != attempt:
        return
    place = "" if same_place(target.uri, newest.table) else f" at {target.uri}"
    by_path = f"declare it by its path, {newest.table}; " if there else ""
    raise Refused(
        f"{what}: {target.name} led to the table {before or 'of the job'} at {newest.table}, and leads to "
        f"{f'table {now}' if now else 'no table'}{place} now: it was dropped, renamed or made anew, and its "
        f"rows are not those that belong to the recorded positions. Put the recorded table back under the "
        f"name; {by_path}or, if the other table is meant, {otherwise}"
    )


def table_id(storage: Storage, uri: str) -> str:
    """Return the id of the table at a place, empty if there is none that can be read."""
    try:
        return Table.open(storage.place(uri)).id
    except (FileNotFoundError, DamageError):
        return ""
