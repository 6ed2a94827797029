"""Damage is bytes that are missing or wrong: a store that does not answer is another error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spark_abs.errors import DamageError
from spark_abs.model import CheckpointId, checked_relative
from spark_abs.store.root import Root
from spark_abs.store.table import Table


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of the table of manifests, as its log has it."""

    path: str
    """Relative to the root."""
    least: CheckpointId | None
    """The first id in it; None if the log does not say."""
    most: CheckpointId | None

    def may_have(self, checkpoint: CheckpointId | None) -> bool:
        """Say whether the row of a checkpoint may be in it; any row, for None."""
        if checkpoint is None or self.least is None or self.most is None:
            return True
        return self.least <= checkpoint <= self.most


def row_files(table: Table, relative: str) -> tuple[RowFile, ...]:
    """List the files of the table of manifests, which lies at `relative` below the root."""
    actions = pa.table(table.delta.get_add_actions(flatten=True)).to_pylist()
    return tuple(
        RowFile(f"{relative}/{checked_relative(a['path'])}", a.get("min.id"), a.get("max.id"))
        for a in actions
    )


def read_rows(root: Root, path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read the bytes of a file, then the rows in them: Arrow alone does not say which of the two failed.

    Raises:
        DamageError: it is missing, or its bytes are no rows.
        OSError: the store cannot be read now.
    """
    data = root.read_whole(path)
    if data is None:
        raise DamageError(f"{path}: missing")
    try:
        table = pq.read_table(pa.BufferReader(data), columns=list(columns)).select(list(columns))
        rows: list[dict[str, Any]] = table.to_pylist()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamageError(f"{path}: {error}") from error
    return rows
