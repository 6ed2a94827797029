"""`spark-abs set`: change settings of a running job."""

from __future__ import annotations

import click

from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import UsageError
from spark_abs.observe.client import set_live
from spark_abs.store.root import Root


@click.command("set")
@root_command
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1)
def set_settings(ctx: Context, root: Root, changes: tuple[str, ...]) -> None:
    """Change settings of the running job, e.g. interval=30s mode=unaligned.

    They hold at once and until the run ends: at its next start the job takes its own configuration again.
    """
    given: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise UsageError(f"{change!r} is not KEY=VALUE, such as interval=30s")
        given[key.strip()] = value
    with ctx.out.waiting("waiting for the job to take the settings"):
        answer = set_live(root, given, ctx.now_ms, ctx.pause)
    ctx.out.result(answer, lambda out: out.line(answer.message))
