"""`spark-abs stop`: stop a running job in order."""

from __future__ import annotations

import click

from spark_abs.cli.root_command import Context, root_command
from spark_abs.codec import to_plain
from spark_abs.observe.client import stop_run
from spark_abs.store.root import Root


@click.command
@root_command
@click.option(
    "--savepoint",
    "name",
    metavar="NAME",
    help="Take a savepoint first; nothing after its barrier is processed.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Before the savepoint, stop the sources, advance the watermark to its end and emit every open "
    "window. Not for resuming with the same event time: rows that come later count as late.",
)
def stop(ctx: Context, root: Root, name: str | None, drain: bool) -> None:
    """Stop the running job gracefully, and wait until it has ended."""
    with ctx.out.waiting("waiting for the job to stop" + (f" with savepoint {name!r}" if name else "")):
        answer, how = stop_run(root, name, drain, ctx.now_ms, ctx.pause)
    taken = f"; savepoint {name!r} is checkpoint {answer.checkpoint}" if name else ""
    stopped = how if how.startswith("stopped") else "stopped"
    ctx.out.result({**to_plain(answer), "ended": how}, lambda out: out.line(f"{stopped}{taken}"))
