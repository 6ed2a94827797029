"""`spark-abs savepoint`: ask a running job for a savepoint."""

from __future__ import annotations

import click

from spark_abs.cli.ask import ask_job
from spark_abs.cli.verb import Context, verb
from spark_abs.protocol.control import CommandKind
from spark_abs.restore.target import check_savepoint_name
from spark_abs.store.root import Root


@click.command
@verb
@click.argument("name")
def savepoint(ctx: Context, root: Root, name: str) -> None:
    """Take a savepoint of the running job, and wait until it is complete."""
    check_savepoint_name(name)
    with ctx.out.waiting(f"waiting for savepoint {name!r}"):
        answer = ask_job(ctx, root, CommandKind.SAVEPOINT, name)
    said = f"savepoint {name!r} is checkpoint {answer.checkpoint}{answer.message.removeprefix('completed')}"
    ctx.out.result(answer, lambda out: out.line(said))
