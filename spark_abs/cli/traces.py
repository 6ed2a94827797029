"""The command `traces`: events of `history/` to a collector of OpenTelemetry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import click

from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import StoreFailed, UsageError
from spark_abs.observe.listing import event_rows
from spark_abs.observe.traces import Span, otlp, spans_of
from spark_abs.store.control import Control
from spark_abs.store.root import Root

PATH = "/v1/traces"
SPANS = 2000
"""So many spans, and those of the trace of the last, are sent at a time."""
_PATIENCE_S = 10.0


@click.command
@root_command
@click.option("--otlp", "collector", metavar="URL", help="Send them, e.g. http://localhost:4318.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N events.")
def traces(ctx: Context, root: Root, collector: str | None, limit: int | None) -> None:
    """Print the checkpoints, restores and ended runs of a job as traces of OpenTelemetry, or send them.

    A trace is one checkpoint, with a span for each stage and each phase. Ids depend only on the root and the
    number of the checkpoint: to send one again changes nothing, so cron may send the newest events.
    """
    state = Control.open(root).state
    spans = spans_of(state.root or root.uri, event_rows(root, limit))
    if collector is None:
        click.echo(json.dumps(otlp(state.job, spans)))
        return
    for part in _parts(spans):
        _send(collector, json.dumps(otlp(state.job, part)).encode())
    sent = {"spans": len(spans), "traces": len({span.trace for span in spans})}
    ctx.out.result(sent, lambda out: out.line(f"{sent['spans']} spans of {sent['traces']} traces were sent"))


def _parts(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Divide spans, never those of one trace."""
    part: list[Span] = []
    for span in spans:
        if len(part) >= SPANS and span.trace != part[-1].trace:
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def _send(collector: str, body: bytes) -> None:
    """Post to a collector.

    Raises:
        UsageError: it is no URL of HTTP.
        StoreFailed: it did not take the spans.
    """
    url, port = urlsplit(collector), None
    try:
        port = url.port
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"--otlp {collector!r} is no URL such as http://localhost:4318")
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    path = url.path.rstrip("/")
    path = path if path.endswith(PATH) else path + PATH
    try:
        connection = kind(url.hostname, port, timeout=_PATIENCE_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read(500).decode(errors="replace")
        finally:
            connection.close()
    except (OSError, HTTPException) as error:
        raise StoreFailed(f"the collector at {collector} does not answer: {error}") from error
    if answer.status // 100 != 2:
        raise StoreFailed(f"the collector at {collector} refused the traces: {answer.status} {said}")
