"""What a job says of a Delta table beyond its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spark_abs.errors import UsageError
from spark_abs.protocol.change_data import LAST_WINS, ChangeOptions, change_options, listed
from spark_abs.quantities import duration_ms

Visible = Literal["batch", "checkpoint"]


@dataclass(frozen=True, slots=True)
class EpochTable:
    """The record in `control/` from which a sink with rows visible after checkpoints is made again."""

    path: str
    """Where the table is."""
    key: tuple[str, ...] = ()
    """Columns by which rows are merged."""
    take_over: bool = False
    """Whether all other roots that have written to the table are fenced there."""
    changes: ChangeOptions = LAST_WINS
    """How changes of one key are applied."""
    name: str = ""
    """The name in a catalog that led to it; empty if the sink was declared by its path."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A Delta table to which a sink writes, created with these options if there is none."""

    path: str
    """Its path, URI, or name in a catalog, such as `schema.table`."""
    key: Sequence[str] | str = ()
    """Columns by which a batch is merged: a row replaces the row with its key, or is new. Nulls are equal.
    Without a key rows are appended; those of a stage in the output mode `complete` replace all rows.
    """
    partition_by: Sequence[str] | str = ()
    """Columns by which the table is partitioned."""
    cluster_by: Sequence[str] | str = ()
    """Columns by which the table has liquid clustering."""
    evolve: bool = False
    """Whether a start adds columns that the rows have and the table lacks."""
    visible: Visible = "batch"
    """When rows are in the table: with each `batch`, or after each `checkpoint`, all rows between two in one
    commit."""
    sequence_by: Sequence[str] | str | None = None
    """Columns by which the changes of a key are ordered: the newest wins, late changes lose, and of two
    changes with one sequence the later to arrive wins. Without them, the last to arrive wins.
    """
    apply_as_deletes: str | None = None
    """A predicate in SQL over the columns of the rows: rows that meet it delete the row of their key."""
    ignore_null_updates: bool = False
    """Whether a null in a row keeps the value that is in the table; not with `scd_type=2`."""
    scd_type: int = 1
    """1: a row for each key. 2: all rows that a key has had, each from `__START_AT` until `__END_AT`, which
    are values of `sequence_by`; the newest ends at null."""
    except_columns: Sequence[str] | str = ()
    """Columns of the rows that are not written to the table. Key columns must be, and with `scd_type` 1 those
    of `sequence_by`.
    """
    tombstones_for: str = "2d"
    """With `sequence_by` and `apply_as_deletes`: for how long at least a deleted key is remembered, so that a
    late change does not bring it back."""
    location: str = ""
    """Where a table with a name is created if there is none. Without it, the catalog chooses the place."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: a column is named twice, an option has an unknown value, or two options contradict
            each other.
        """
        if self.visible not in get_args(Visible):
            raise UsageError(f"{self.path}: visible={self.visible!r} is not one of {get_args(Visible)}")
        for field in ("key", "partition_by", "cluster_by"):
            given = getattr(self, field)
            columns = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, field, columns)
            if len({column.casefold() for column in columns}) < len(columns):
                raise UsageError(f"{self.path}: {field} names a column twice: {', '.join(columns)}")
        if self.partition_by and self.cluster_by:
            raise UsageError(f"{self.path}: a table has either partitions or clusters, not both")
        try:
            duration_ms(self.tombstones_for)
        except ValueError as error:
            raise UsageError(f"{self.path}: tombstones_for={self.tombstones_for!r}: {error}") from None
        change_options(self.path, self.key, self.changes)

    @property
    def changes(self) -> ChangeOptions:
        return ChangeOptions(
            listed(self.sequence_by),
            self.apply_as_deletes or "",
            self.ignore_null_updates,
            self.scd_type,
            except_columns=listed(self.except_columns),
            tombstones_ms=duration_ms(self.tombstones_for),
        )

    def after_checkpoints(self, uri: str, name: str, take_over: bool) -> EpochTable | None:
        """Return what makes the sink again if its rows are visible after checkpoints, else None.

        Args:
            uri: where the path or name of the table leads.
            name: its name in a catalog, if it was declared by that.
            take_over: whether other roots are fenced there.
        """
        if self.visible != "checkpoint":
            return None
        return EpochTable(uri, tuple(self.key), take_over, self.changes, name)
