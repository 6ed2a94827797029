"""Refuse the first start of a sink on a table with rows of others, unless `existing=` allows it."""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress

from spark_abs.model import RunId, run_app_id
from spark_abs.plan.specs import JobSpec, SinkSpec
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.outside import Owner
from spark_abs.sinks.delta.others import refuse_others, rows_there
from spark_abs.sinks.registry import made_again
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_NO_ROOT = "none yet"
"""The identity of a root that does not exist: no commit has it."""


def refuse_rows_of_others(job: JobSpec, sink: SinkSpec, root: Root, state: ControlState | None) -> None:
    """Refuse the first start of a sink on a table with rows of other writers, unless `existing=` allows them.

    Changes nothing. A sink is not new if the root has recorded it or has committed to its table: so a start
    that was killed after the sink's first commit is not refused.

    Args:
        job: the job of the sink.
        sink: the sink.
        root: the root of the job, or the root that it is compared with.
        state: the state of its `control/`; None for a new root.

    Raises:
        Refused: names the rows and the possible declarations.
    """
    if sink.existing is not None:
        return
    if sink.table is not None:
        with suppress(FileNotFoundError):
            table = Table.open(root.storage.place(sink.table))
            if state is None or not (is_recorded(state, sink, table.id) or is_marked(state, sink, table)):
                refuse_others(sink.name, f"table {table.uri}", rows_there(table))
    elif sink.outside is not None and not (state is not None and _is_outside(state, sink)):
        owner = Owner(_NO_ROOT if state is None else state.root, job.name, sink.name, RunId(0))
        # That of a run may be at work, in another thread.
        look = made_again(sink.kind, sink.settings, root, lambda: job.spark)
        target = "its target" if sink.epoch_table is None else f"table {sink.epoch_table}"
        with nullcontext(sink.outside) if look is None else closing(look) as at:
            refuse_others(sink.name, target, at.rows_of_others(owner))


def is_recorded(state: ControlState, sink: SinkSpec, table_id: str) -> bool:
    """Say whether a root has recorded the table of a sink."""
    return any(table_id == known.table_id or sink.table == known.table for known in state.sinks)


def is_marked(state: ControlState, sink: SinkSpec, table: Table) -> bool:
    """Say whether a root has committed to a table.

    A start may be killed between this commit and its record.
    """
    writer = state.writer(state.attempt, sink.source.stage, sink.name)
    return any(table.transaction(app) is not None for app in (run_app_id(writer.owner), writer.app))


def _is_outside(state: ControlState, sink: SinkSpec) -> bool:
    return any(known.sink == sink.name for known in state.outside)
