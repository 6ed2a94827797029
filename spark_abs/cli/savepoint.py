"""`spark-abs savepoint`: ask a running job for a savepoint."""

from __future__ import annotations

import click

from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import UsageError
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.observe.client import ask_run, new_command
from spark_abs.protocol.control import CommandKind
from spark_abs.quantities import duration_ms
from spark_abs.store.root import Root


@click.command
@root_command
@click.argument("name")
@click.option(
    "--timeout", metavar="DURATION", help="How long to wait, e.g. 5m; by default until the job ends."
)
def savepoint(ctx: Context, root: Root, name: str, timeout: str | None) -> None:
    """Take a savepoint of the running job, and wait until it is complete.

    Exit code 4: that took longer than the timeout, and it may still complete.
    """
    check_savepoint_name(name)
    patience_s = None if timeout is None else _seconds(timeout)
    with ctx.out.waiting(f"waiting for savepoint {name!r}"):
        command = new_command(CommandKind.SAVEPOINT, ctx.now_ms(), name)
        answer = ask_run(root, command, ctx.now_ms, ctx.pause, patience_s)
    said = f"savepoint {name!r} is checkpoint {answer.checkpoint}{answer.message.removeprefix('completed')}"
    ctx.out.result(answer, lambda out: out.line(said))


def _seconds(timeout: str) -> float:
    try:
        return duration_ms(timeout) / 1000
    except ValueError as error:
        raise UsageError(f"--timeout {timeout!r}: {error}") from None
