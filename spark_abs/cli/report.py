"""`spark-abs report`: a root as one page for a browser."""

from __future__ import annotations

from pathlib import Path

import click

from spark_abs.cli.output import size
from spark_abs.cli.root_command import Context, root_command
from spark_abs.report.encoding import plain_report
from spark_abs.report.page import page_of
from spark_abs.report.reading import RootReader
from spark_abs.store.root import Root


@click.command
@root_command
@click.option(
    "-o",
    "--out",
    "target",
    type=click.Path(dir_okay=False, allow_dash=True),
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The file to write; an existing one is replaced. `-` is stdout.",
)
def report(ctx: Context, root: Root, target: str) -> None:
    """Write a page that shows the job: graph, checkpoints, sizes, attempts, and what a restore would undo.

    The page is one file and loads nothing: open it in a browser, or send it. It has no rows and no state of
    the job; passwords and tokens in locations and settings are not in it.
    """
    with ctx.out.waiting(f"reading {root.uri}", told=False):
        found = RootReader(root).read(ctx.now_ms())
        text = page_of(plain_report(found))
    if target == "-":
        click.echo(text, nl=False)
        return
    data = text.encode()
    Path(target).write_bytes(data)
    written = {"report": target, "bytes": len(data), "problems": found.problems}
    ctx.out.result(written, lambda out: out.line(f"{target}: {size(len(data))}, open it in a browser"))
