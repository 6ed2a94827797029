"""`traces`: a collector receives them, twice the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from spark_abs.cli import traces
from spark_abs.errors import AbortReason
from tests.cli.conftest import Cli
from tests.cli.test_status import abort
from tests.root_support import SmallJob


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP in its JSON form."""

    received: ClassVar[list[tuple[str, Any]]] = []
    answer: ClassVar[int] = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, json.loads(body)))
        self.send_response(self.answer)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[type[Collector]]:
    kind = type("OneCollector", (Collector,), {"received": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kind.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    yield kind
    server.shutdown()
    thread.join()
    server.server_close()


def spans(received: list[tuple[str, Any]]) -> list[Any]:
    return [span for _, body in received for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def test_a_collector_receives_a_trace_for_each_checkpoint_and_the_same_again(
    job: SmallJob, cli: Cli, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "SPANS", 1)
    job.checkpoint(1)
    abort(job, AbortReason.EXPIRED)
    said = cli("traces", "--otlp", collector.url).stdout
    assert said == "2 spans of 2 traces were sent\n"
    assert [path for path, _ in collector.received] == ["/v1/traces"] * 2, "one trace at a time"
    first = spans(collector.received)
    assert [span["name"] for span in first] == ["checkpoint 1", "checkpoint 2"]
    assert first[1]["status"]["message"] == "expired: after 10000 ms without b"
    collector.received.clear()
    cli("traces", "--otlp", f"{collector.url}/v1/traces")
    assert spans(collector.received) == first
    assert spans([("", cli.json("traces"))]) == first


def test_a_collector_that_refuses_or_is_not_there_is_said(job: SmallJob, cli: Cli, collector: Any) -> None:
    job.checkpoint(1)
    collector.answer = 400
    assert "refused the traces: 400" in cli("traces", "--otlp", collector.url, exits=1).stderr
    assert "does not answer" in cli("traces", "--otlp", "http://127.0.0.1:9", exits=1).stderr
    assert "is no URL such as" in cli("traces", "--otlp", "file:///etc", exits=2).stderr
