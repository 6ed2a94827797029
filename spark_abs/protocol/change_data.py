"""Change data capture: several changes of one key become a row, or the history of the row.

The options are named as in Databricks' AUTO CDC. `arrive` and `versions` define their meaning: a sink applies
many changes at once, by a MERGE or in SQL, and must produce the same rows as these functions. Changes arrive
one after another. The borders of batches make no difference, so a repeat with different batches produces the
same rows.

The order of arrival is the order of batches, and within a batch the order of rows in its files. With
`sequence_by` it decides only between changes with the same sequence: the later one wins. A change without a
sequence is refused; the message names its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spark_abs.errors import UsageError

START_AT, END_AT = "__START_AT", "__END_AT"
"""The columns of a history for the first and last sequence of a row.

A null end marks the key's newest row.
"""

TWO_DAYS_MS = 2 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """How changes of a key are applied. With all defaults, the last change replaces the row."""

    sequence_by: tuple[str, ...] = ()
    """Columns that order the changes of a key; without them, changes are ordered by arrival."""
    apply_as_deletes: str = ""
    """An SQL predicate over the columns of a change: if true, the change deletes its key. Null is false."""
    ignore_null_updates: bool = False
    """Whether a null in a change keeps the present value."""
    scd_type: int = 1
    """1: one row for each key. 2: the history of each key, with `START_AT` and `END_AT`."""
    except_columns: tuple[str, ...] = ()
    """Columns of changes that are not written to the table."""
    tombstones_ms: int = TWO_DAYS_MS
    """The least time for which a deleted key is remembered, to recognise late changes from before the delete.
    """

    @property
    def keeps_tombstones(self) -> bool:
        """Whether a change may be older than a delete that was applied already."""
        return bool(self.sequence_by and self.apply_as_deletes)

    def stored(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of changes that are written to the table."""
        left_out = {column.casefold() for column in self.except_columns}
        return tuple(column for column in columns if column.casefold() not in left_out)


LAST_WINS = ChangeOptions()


def listed(columns: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return columns that a user gives as one name, several names, or none."""
    return () if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)


def change_options(who: str, key: Sequence[str], options: ChangeOptions) -> ChangeOptions:
    """Return checked options.

    Args:
        who: the table, for messages.
        key: the columns of its key.
        options: the options as the user gives them.

    Raises:
        UsageError: options contradict each other.
    """
    if options != replace(LAST_WINS, tombstones_ms=options.tombstones_ms) and not key:
        raise UsageError(f"{who}: changes are applied by key: name the key columns with key=")
    for field in ("sequence_by", "except_columns"):
        named = getattr(options, field)
        if len({column.casefold() for column in named}) < len(named):
            raise UsageError(f"{who}: {field} names a column twice: {', '.join(named)}")
    if options.scd_type not in (1, 2):
        raise UsageError(f"{who}: scd_type={options.scd_type!r} is neither 1 nor 2")
    if options.scd_type == 2 and not options.sequence_by:
        raise UsageError(
            f"{who}: scd_type=2 needs sequence_by=: its values become {START_AT} and {END_AT} of the rows"
        )
    if options.scd_type == 2 and options.ignore_null_updates:
        raise UsageError(
            f"{who}: ignore_null_updates cannot be combined with scd_type=2: a late change would alter all "
            "later rows of its key"
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
    """A change of a key."""

    sequence: tuple[Any, ...]
    """The values of the `sequence_by` columns, none of them null; empty without `sequence_by`."""
    values: Mapping[str, Any] | None
    """The columns of the row; None: the change deletes the key."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The state of a key after its changes, for `scd_type=1`."""

    sequence: tuple[Any, ...]
    values: Mapping[str, Any] | None
    """The row; None for a tombstone: the key is deleted."""


def arrive(known: Newest | None, change: Change, options: ChangeOptions) -> Newest:
    """Apply a change to the state of its key.

    A change with a lower sequence than the state is late and ignored. Of two changes with one sequence, the
    later arrival wins.
    """
    if known is not None and change.sequence < known.sequence:
        return known
    values = change.values
    if values is not None and options.ignore_null_updates and known is not None and known.values is not None:
        values = {**values, **{k: v for k, v in known.values.items() if values.get(k) is None}}
    return Newest(change.sequence, values)


History = Mapping[tuple[Any, ...], Mapping[str, Any] | None]
"""The changes of a key by sequence, for `scd_type=2`: the columns of each row, None for a delete."""


def enter(history: History, change: Change) -> History:
    """Add a change, late or not, to the history of its key; of one sequence the later arrival wins."""
    return {**history, change.sequence: change.values}


def versions(history: History) -> list[dict[str, Any]]:
    """Return the rows of a history: each is valid from its sequence until the sequence of the next change."""
    order = sorted(history)
    found = []
    for start, end in zip(order, [*order[1:], None], strict=False):
        values = history[start]
        if values is not None:
            found.append({**values, START_AT: start, END_AT: end})
    return found
