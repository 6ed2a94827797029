"""`spark-abs history`: what happened to every checkpoint."""

from __future__ import annotations

import click

from spark_abs.cli.output import duration, moment, one_line, size, text_of
from spark_abs.cli.root_command import Context, root_command
from spark_abs.observe.events import event_rows
from spark_abs.store.history import HistoryRow
from spark_abs.store.root import Root

COLUMNS = (
    ("time (UTC)", False),
    ("event", False),
    ("id", True),
    ("attempt", True),
    ("run", True),
    ("stage", False),
    ("duration", True),
    ("new", True),
    ("full", True),
    ("", False),
)


@click.command
@root_command
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Show only the newest N events.")
def history(ctx: Context, root: Root, limit: int | None) -> None:
    """List the events of all checkpoints, oldest first, also of those that are gone."""
    rows = event_rows(root, limit)
    ctx.out.result(rows, lambda out: out.table(COLUMNS, map(_cells, rows)))


def _cells(row: HistoryRow) -> tuple[str, ...]:
    return (
        moment(row.at_ms),
        row.event.value,
        text_of(row.checkpoint),
        text_of(row.attempt),
        text_of(row.run),
        row.stage or "",
        duration(row.duration_ms),
        size(row.size_new),
        size(row.size_full),
        one_line(": ".join(part for part in (row.name, row.reason, row.detail) if part)),
    )
