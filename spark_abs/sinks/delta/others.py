"""The rows of others that a sink finds when it first comes to a table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from spark_abs.errors import Refused
from spark_abs.store.table import Table


def rows_there(table: Table) -> str:
    """Describe the rows of a table as of the version read; empty if it has none.

    Reads the list of its files.
    """
    counts: list[Any] = pa.table(table.delta.get_add_actions(flatten=True))["num_records"].to_pylist()
    filled = [rows for rows in counts if rows != 0]
    if not filled:
        return ""
    known = [rows for rows in filled if rows is not None]
    many = _counted(sum(known), "row") if len(known) == len(filled) else "rows"
    return f"{many} in {_counted(len(filled), 'file')} at version {int(table.version)}"


def refuse_others(sink: str, target: str, there: str) -> None:
    """Refuse a sink that first comes to a target with rows, unless `existing=` allows it.

    Args:
        sink: its name.
        target: where it writes, as messages name it.
        there: what the target has, for a person; nothing is refused if that is empty.

    Raises:
        Refused: the target has rows; names the ways to continue.
    """
    if not there:
        return
    raise Refused(
        f"sink {sink!r}: {target} has {there} that this root has not written. The sink would write beside "
        "them, and rows of inputs that were read before would be there twice. Say existing='append' if that "
        "is meant; existing='take_over' if this root replaces the one that has written them (Delta tables); "
        "adopt=CHECKPOINT of the stage to go on where the query was that has written them; or name another "
        "table"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
