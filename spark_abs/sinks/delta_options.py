"""What a job says of a Delta table beyond its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spark_abs.errors import UsageError

Visible = Literal["batch", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A Delta table to which a sink writes, created as said here if there is none."""

    path: str
    """Where it is."""
    key: Sequence[str] | str = ()
    """Columns by which a batch is merged: a row takes the place of the one with its key, or is new. Nulls are
    equal. A batch may have one row of a key. Without: rows are appended, or, of a stage in the output mode
    `complete`, take the place of all that were there."""
    partition_by: Sequence[str] | str = ()
    """Columns by which the table is partitioned."""
    cluster_by: Sequence[str] | str = ()
    """Columns by which the table has liquid clustering."""
    evolve: bool = False
    """Whether a start adds columns that the rows have and the table lacks."""
    visible: Visible = "batch"
    """When rows are in the table: with each `batch`, or after each `checkpoint`, all rows between two in one
    commit; then the last row of a key counts."""

    def __post_init__(self) -> None:
        """Check the columns.

        Raises:
            UsageError: a column is named twice, there are partitions and clusters, or `visible` is none of
                its values.
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
