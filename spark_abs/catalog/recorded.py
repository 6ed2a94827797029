"""Whether a name still leads to the table that was recorded under it."""

from __future__ import annotations

from collections.abc import Iterable

from spark_abs.catalog.target import TableTarget, same_place
from spark_abs.errors import DamageError, Refused
from spark_abs.model import AttemptId
from spark_abs.protocol.control import AttachedSink
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table


def refuse_other_table(
    what: str,
    target: TableTarget,
    *,
    records: Iterable[AttachedSink],
    attempt: AttemptId,
    storage: Storage,
    otherwise: str,
    at_cut: Iterable[AttachedSink] = (),
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
        at_cut: what the newest checkpoint says of the tables of a function.

    Raises:
        Refused: it leads elsewhere, or to another table at the same place.
    """
    mine = [r for r in records if _is_of(target, r)]
    if target.name is None or not mine:
        return
    newest = mine[-1]
    now, before = table_id(storage, target.uri), newest.table_id
    for record in (newest, *(r for r in at_cut if _is_of(target, r))):
        if same_place(target.uri, record.table) and (
            record.table_id in (now, "") or _was_replaced(storage, record)
        ):
            return
    found = table_id(storage, newest.table)
    there = found == before if before else bool(found)
    if not there and newest.attempt != attempt:
        return
    place = "" if same_place(target.uri, newest.table) else f" at {target.uri}"
    by_path = f"declare it by its path, {newest.table}; " if there else ""
    raise Refused(
        f"{what}: {target.name} led to the table {before or 'of the job'} at {newest.table}, and now leads "
        f"to {f'table {now}' if now else 'no table'}{place}: the table was dropped, renamed or recreated, "
        "and its rows do not match the recorded positions. Put the recorded table back under the name; "
        f"{by_path}or, if the other table is meant, {otherwise}"
    )


def _is_of(target: TableTarget, record: AttachedSink) -> bool:
    """Say whether a record is of an existing table of this name."""
    return record.name.casefold() == target.said.casefold() and bool(
        record.table_id or record.version is None
    )


def _was_replaced(storage: Storage, record: AttachedSink) -> bool:
    """Say whether a function has replaced its table by `CREATE OR REPLACE`: its log goes on."""
    if record.version is None:
        return False
    try:
        return Table.open(storage.place(record.table)).was(record.table_id, record.version)
    except (FileNotFoundError, DamageError):
        return False


def table_id(storage: Storage, uri: str) -> str:
    """Return the id of the table at a place, empty if there is none that can be read."""
    try:
        return Table.open(storage.place(uri)).id
    except (FileNotFoundError, DamageError):
        return ""
