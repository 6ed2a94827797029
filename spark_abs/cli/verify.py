"""`spark-abs verify`: read what is stored and name what is damaged."""

from __future__ import annotations

import click

from spark_abs.cli.output import Output, one_line, text_of
from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import DamageError
from spark_abs.observe.verification import verify_one, verify_root
from spark_abs.store.root import Root

COLUMNS = (("path", False), ("checkpoint", True), ("stage", False), ("problem", False))


@click.command
@root_command
@click.argument("checkpoint", metavar="[ID|NAME|latest]", required=False)
def verify(ctx: Context, root: Root, checkpoint: str | None) -> None:
    """Read every byte of one checkpoint, or of all and whatever else the job needs; exit code 3 on damage."""
    found = verify_root(root, ctx.out) if checkpoint is None else verify_one(root, checkpoint, ctx.out)

    def text(out: Output) -> None:
        if not found:
            out.line("nothing is damaged")
            return
        rows = ((f.path, text_of(f.checkpoint), text_of(f.stage), one_line(f.problem)) for f in found)
        out.table(COLUMNS, rows)

    ctx.out.result({"findings": found}, text)
    if found:
        click.get_current_context().exit(DamageError.exit_code)
