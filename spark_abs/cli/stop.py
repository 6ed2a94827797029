"""`spark-abs stop`: stop a running job in order."""

from __future__ import annotations

import click

from spark_abs.cli.ask import ask_job, wait_for_end
from spark_abs.cli.verb import Context, verb
from spark_abs.errors import Refused, UsageError
from spark_abs.protocol.control import CommandKind
from spark_abs.restore.target import check_savepoint_name
from spark_abs.store.root import Root


@click.command
@verb
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
    if name is not None:
        check_savepoint_name(name)
    elif drain:
        raise UsageError("--drain ends with a savepoint: give --savepoint NAME")
    with ctx.out.waiting("waiting for the job to stop" + (f" with savepoint {name!r}" if name else "")):
        answer = ask_job(ctx, root, CommandKind.STOP, name, drain=drain)
        how = wait_for_end(ctx, root)
    if how == "killed":
        raise Refused("the job was killed before it had stopped in order")
    if how.startswith("failed"):
        raise Refused(f"the job {how}")
    taken = f"; savepoint {name!r} is checkpoint {answer.checkpoint}" if name else ""
    stopped = how if how.startswith("stopped") else "stopped"
    ctx.out.result(answer, lambda out: out.line(f"{stopped}{taken}"))
