"""`spark-abs stop`: stop a running job in order."""

from __future__ import annotations

import click

from spark_abs.cli.ask import ask_job, wait_for_end
from spark_abs.cli.verb import Context, verb
from spark_abs.model import checked_name
from spark_abs.protocol.control import CommandKind
from spark_abs.store.root import Root


@click.command
@verb
@click.option(
    "--savepoint", "name", metavar="NAME", help="First take a savepoint, behind which nothing is processed."
)
def stop(ctx: Context, root: Root, name: str | None) -> None:
    """Stop the running job in order, and wait until it has ended."""
    if name is not None:
        checked_name(name, "savepoint")
    with ctx.out.waiting("waiting for the job to stop" + (f" with savepoint {name!r}" if name else "")):
        answer = ask_job(ctx, root, CommandKind.STOP, name)
        wait_for_end(ctx, root)
    taken = f"; savepoint {name!r} is checkpoint {answer.checkpoint}" if name else ""
    ctx.out.result(answer, lambda out: out.line(f"stopped{taken}"))
