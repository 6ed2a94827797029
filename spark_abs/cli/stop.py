"""`spark-abs stop`: stop a running job in order."""

from __future__ import annotations

import click

from spark_abs.cli.root_command import Context, root_command
from spark_abs.observe.client import stop_run
from spark_abs.store.root import Root


@click.command
@root_command
@click.option(
    "--savepoint", "name", metavar="NAME", help="First take a savepoint, behind which nothing is processed."
)
@click.option(
    "--drain",
    is_flag=True,
    help="Before the savepoint read no more, bring event time to its end and let out every window. Not for "
    "going on with the same event time: rows that come later are late.",
)
def stop(ctx: Context, root: Root, name: str | None, drain: bool) -> None:
    """Stop the running job in order, and wait until it has ended."""
    with ctx.out.waiting("waiting for the job to stop" + (f" with savepoint {name!r}" if name else "")):
        answer, how = stop_run(root, name, drain, ctx.now_ms, ctx.pause)
    taken = f"; savepoint {name!r} is checkpoint {answer.checkpoint}" if name else ""
    stopped = how if how.startswith("stopped") else "stopped"
    ctx.out.result(answer, lambda out: out.line(f"{stopped}{taken}"))
