"""Change data capture: how several changes of one key become a row, or its history.

The words are those of Databricks' AUTO CDC. `arrive` and `versions` are their meaning: a sink applies changes
in columns, by a MERGE or in SQL, and must end with what these functions end with. Changes arrive one after
another; how they are cut into batches never counts, so a repeat that cuts them otherwise has the same rows.

The order of arrival is that of the batches, and within one that of the rows in its files. With `sequence_by`
it decides only between changes of one sequence: the later one wins. A change whose sequence is null is
refused, and the message names its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spark_abs.errors import UsageError

START_AT, END_AT = "__START_AT", "__END_AT"
"""From and until which sequence a row of a history counts; until null: it is the newest of its key."""

TWO_DAYS_MS = 2 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """How the rows that come for a key are applied; all defaults: the last that arrives takes its place."""

    sequence_by: tuple[str, ...] = ()
    """Columns whose values order the changes of a key; without, they count in the order of arrival."""
    apply_as_deletes: str = ""
    """A predicate in SQL over the columns of the rows: those that meet it delete their key. Null is false."""
    ignore_null_updates: bool = False
    """Whether a null keeps the value that is there."""
    scd_type: int = 1
    """1: a row for each key. 2: all rows that it has had, with `START_AT` and `END_AT`."""
    except_columns: tuple[str, ...] = ()
    """Columns of the rows that the table does not have."""
    tombstones_ms: int = TWO_DAYS_MS
    """For how long at least a deleted key is remembered, so that a change from before it is known as late."""

    @property
    def keeps_tombstones(self) -> bool:
        """Whether a change may be older than a delete that was applied before it."""
        return bool(self.sequence_by and self.apply_as_deletes)

    def stored(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return which of the columns of the rows the table has."""
        left_out = {column.casefold() for column in self.except_columns}
        return tuple(column for column in columns if column.casefold() not in left_out)


LAST_WINS = ChangeOptions()


def listed(columns: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return columns that a user gives as one name, several, or none."""
    return () if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)


def change_options(who: str, key: Sequence[str], options: ChangeOptions) -> ChangeOptions:
    """Return options that a sink can follow.

    Args:
        who: the table, for messages.
        key: the columns of its key.
        options: as the user gives them.

    Raises:
        UsageError: they contradict each other.
    """
    if options != replace(LAST_WINS, tombstones_ms=options.tombstones_ms) and not key:
        raise UsageError(f"{who}: changes are applied by key: name its columns with key=")
    for field in ("sequence_by", "except_columns"):
        named = getattr(options, field)
        if len({column.casefold() for column in named}) < len(named):
            raise UsageError(f"{who}: {field} names a column twice: {', '.join(named)}")
    if options.scd_type not in (1, 2):
        raise UsageError(f"{who}: scd_type={options.scd_type!r} is neither 1 nor 2")
    if options.scd_type == 2 and not options.sequence_by:
        raise UsageError(
            f"{who}: scd_type=2 needs sequence_by=: its values are {START_AT} and {END_AT} of the rows"
        )
    if options.scd_type == 2 and options.ignore_null_updates:
        raise UsageError(
            f"{who}: ignore_null_updates does not go with scd_type=2: a late change would alter all rows of "
            "its key after it"
        )
    if options.tombstones_ms <= 0:
        raise UsageError(f"{who}: tombstones_for=0: a deleted key must be remembered for some time")
    needed = {column.casefold() for column in (*key, *(() if options.scd_type == 2 else options.sequence_by))}
    if lost := [column for column in options.except_columns if column.casefold() in needed]:
        raise UsageError(
            f"{who}: except_columns names {', '.join(lost)}, and the table needs the columns of "
            f"{'key' if options.scd_type == 2 else 'key and sequence_by'}: leave them out of except_columns"
        )
    return options


@dataclass(frozen=True, slots=True)
class Change:
    """A row that arrives for a key."""

    sequence: tuple[Any, ...]
    """Its values of `sequence_by`, none of them null; empty without it."""
    values: Mapping[str, Any] | None
    """Its columns; None: it deletes the key."""


@dataclass(frozen=True, slots=True)
class Newest:
    """What is known of a key after its changes, for `scd_type=1`."""

    sequence: tuple[Any, ...]
    values: Mapping[str, Any] | None
    """The row; None: the key is deleted, this is its tombstone."""


def arrive(known: Newest | None, change: Change, options: ChangeOptions) -> Newest:
    """Apply a change to what is known of its key.

    A change with a lower sequence than the known one is late: all of it is ignored. Of two changes with one
    sequence, the one that arrives last wins.
    """
    if known is not None and change.sequence < known.sequence:
        return known
    values = change.values
    if values is not None and options.ignore_null_updates and known is not None and known.values is not None:
        values = {**values, **{k: v for k, v in known.values.items() if values.get(k) is None}}
    return Newest(change.sequence, values)


History = Mapping[tuple[Any, ...], Mapping[str, Any] | None]
"""The changes of a key by their sequence, for `scd_type=2`: its columns, None where it was deleted."""


def enter(history: History, change: Change) -> History:
    """Enter a change into the history of its key, late or not; the later one of a sequence wins."""
    return {**history, change.sequence: change.values}


def versions(history: History) -> list[dict[str, Any]]:
    """Return the rows of a history: each counts from its own sequence until that of the next change."""
    order = sorted(history)
    found = []
    for start, end in zip(order, [*order[1:], None], strict=False):
        values = history[start]
        if values is not None:
            found.append({**values, START_AT: start, END_AT: end})
    return found
