"""`spark-abs dispose`: do without a savepoint from now on."""

from __future__ import annotations

import click

from spark_abs.cli.restore import confirmed
from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import UsageError
from spark_abs.restore.dispose import dispose_savepoint
from spark_abs.store.root import Root


@click.command
@root_command
@click.argument("savepoint", metavar="ID|NAME")
@click.option("--yes", is_flag=True, help="Do not ask.")
def dispose(ctx: Context, root: Root, savepoint: str, yes: bool) -> None:
    """Remove a savepoint: nobody can go back to it any more. The job may run.

    What only it needed, of state and of channels, goes with the next clean-up of a run. Do not use its name
    again: the tag that it has in an Iceberg table stays.
    """
    if not (yes or confirmed(ctx.out, f"Remove savepoint {savepoint!r} for good?")):
        raise UsageError("nothing was changed: give --yes to remove it")
    gone = dispose_savepoint(root, savepoint, ctx.now_ms)
    ctx.out.result(
        {"checkpoint": gone.id, "name": gone.name},
        lambda out: out.line(f"savepoint {gone.name!r}, checkpoint {gone.id}, is removed"),
    )
