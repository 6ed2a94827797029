"""`spark-abs list`: the checkpoints and savepoints of a job."""

from __future__ import annotations

import click

from spark_abs.cli.output import Output, duration, moment, one_line, size, text_of
from spark_abs.cli.root_command import Context, root_command
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows
from spark_abs.store.root import Root

COLUMNS = (
    ("id", True),
    ("kind", False),
    ("name", False),
    ("attempt", True),
    ("completed (UTC)", False),
    ("age", True),
    ("duration", True),
    ("new", True),
    ("full", True),
    ("", False),
)


@click.command("list")
@root_command
def list_checkpoints(ctx: Context, root: Root) -> None:
    """List completed checkpoints and savepoints by id.

    Those that a restore left behind are marked, and those that an edit made.
    """
    rows = checkpoint_rows(root, ctx.now_ms())

    def text(out: Output) -> None:
        if rows:
            out.table(COLUMNS, map(_cells, rows))
        else:
            out.line("no checkpoint was completed yet")

    ctx.out.result(rows, text)


def _cells(row: CheckpointRow) -> tuple[str, ...]:
    said = "abandoned" if row.abandoned else "edited" if row.edited else ""
    mark = f"damaged: {one_line(row.damage)}" if row.damage else said
    return (
        text_of(row.id),
        text_of(row.kind),
        text_of(row.name),
        text_of(row.attempt),
        moment(row.completed_ms),
        duration(row.age_ms),
        duration(row.duration_ms),
        size(row.size_new),
        size(row.size_full),
        mark,
    )
