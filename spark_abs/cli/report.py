"""`spark-abs report` and `spark-abs serve`: a root as one page for a browser."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import click

from spark_abs.cli.health import limits
from spark_abs.cli.output import size
from spark_abs.cli.root_command import Context, root_command
from spark_abs.diagnosis.health import read_health
from spark_abs.errors import UsageError
from spark_abs.observe.metrics import read_metrics
from spark_abs.observe.tally import Tally
from spark_abs.report.encoding import plain_report
from spark_abs.report.page import page_of
from spark_abs.report.reading import RootReader
from spark_abs.report.server import Fresh, PageServer, Served, snapshot
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


LOOPBACK = "127.0.0.1"


@click.command
@root_command
@click.option(
    "--port", type=click.IntRange(0, 65535), default=4180, show_default=True, help="0: any free port."
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default=LOOPBACK,
    show_default=True,
    help="The address to listen on. Whoever reaches another one than this machine's own can see the page.",
)
@limits
def serve(
    ctx: Context, root: Root, port: int, host: str, *, max_age: int | None, max_lag: int | None
) -> None:
    """Serve the page of a root to a browser on this machine, until Ctrl-C; it follows a running job.

    The server only reads the root. It answers GET, and requests that name it by its address. /metrics is for
    Prometheus, /healthz for a probe of this server; /readyz is 200 if the job is healthy by the rules of
    `spark-abs health`, with --max-age and --max-lag as there, and 503 if it is not.
    """
    reader, tally = RootReader(root), Tally(root)
    served = Served(
        Fresh(lambda: snapshot(reader, ctx.now_ms())),
        Fresh(lambda: read_metrics(root, ctx.now_ms(), tally)),
        Fresh(lambda: read_health(root, ctx.now_ms(), max_age, max_lag, tally)),
    )
    served.page.newest()  # a root that cannot be read is told here, not in a browser
    try:
        server = PageServer(host, port, served)
    except OSError as error:
        raise UsageError(
            f"nothing can listen on {host}, port {port}: {error}; choose another --port"
        ) from error
    with server:
        if not _is_loopback(host):
            ctx.out.say(f"warning: everyone who reaches {host} can see the page, there is no password")
        at = {"url": server.url, "root": root.uri}
        ctx.out.result(at, lambda out: out.line(f"{server.url} shows {root.uri}, Ctrl-C ends it"))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            ctx.out.say("ended")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
