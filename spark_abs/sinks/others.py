"""Whether a sink that first comes to a table finds rows there: of others, since it has written none yet."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from spark_abs.errors import Refused
from spark_abs.store.table import Table


def rows_there(table: Table) -> str:
    """Say for a person which rows a table has as of the version read, empty if it has none.

    Costs what its list of files costs: only for a sink that first comes to it.
    """
    counts: list[Any] = pa.table(table.delta.get_add_actions(flatten=True))["num_records"].to_pylist()
    filled = [rows for rows in counts if rows != 0]
    if not filled:
        return ""
    known = [rows for rows in filled if rows is not None]
    many = f"{sum(known)} rows" if len(known) == len(filled) else "rows"
    return f"{many} in {len(filled)} files at version {int(table.version)}"


def refuse_others(sink: str, target: str, there: str) -> None:
    """Refuse a sink that first comes to a target with rows, where nobody has said that they are meant.

    Args:
        sink: its name.
        target: where it writes, as messages name it.
        there: what the target has, for a person; nothing is refused if that is empty.

    Raises:
        Refused: says the ways on.
    """
    if not there:
        return
    raise Refused(
        f"sink {sink!r}: {target} has {there} that this root has not written; the rows of the job would come "
        "on top of them, also those of inputs that were read before. Say existing='append' if the sink is "
        "meant to write beside them; existing='take_over' if another root has written them whose place this "
        "one takes (Delta tables); adopt=CHECKPOINT of job.source to go on with the query that has written "
        "them; or name another table"
    )
