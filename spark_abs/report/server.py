"""`spark-abs serve`: the page of a root, its metrics and its health over HTTP. It only reads."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar

from spark_abs.diagnosis.health import Health
from spark_abs.errors import AbsError
from spark_abs.report.encoding import embedded, plain_report
from spark_abs.report.page import page_of, policy
from spark_abs.report.reading import RootReader
from spark_abs.report.redaction import redacted

log = logging.getLogger(__name__)
T = TypeVar("T")

ASK_EVERY_MS = 3000
"""How often a page asks for news."""
READ_EVERY_S = 1.0
"""The root is read at most so often, however many pages ask."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The data of the page at one time; `etag` changes if anything but the time has changed."""

    plain: dict[str, Any]
    etag: str


class Fresh(Generic[T]):
    """A value that is read again after a second, for all requests. Thread-safe: one reads, others wait."""

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """Take what reads the value, and a clock that only advances."""
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        self._known: tuple[float, T] | None = None

    def newest(self) -> T:
        """Return the value of at most a second ago; errors are those of reading it."""
        with self._lock:
            if self._known is None or self._clock() - self._known[0] >= READ_EVERY_S:
                found = self._read()
                self._known = (self._clock(), found)
            return self._known[1]


def snapshot(reader: RootReader, now_ms: int) -> Snapshot:
    """Read the data of the page as of now.

    Raises:
        DamageError: `control/` cannot be read.
        OSError: the store cannot be read now.
    """
    plain = plain_report(reader.read(now_ms))
    timeless = {name: value for name, value in plain.items() if name not in ("made_ms", "heard_ms")}
    digest = hashlib.sha256(json.dumps(timeless, separators=(",", ":")).encode()).hexdigest()
    return Snapshot(plain, f'"{digest[:32]}"')


@dataclass(frozen=True, slots=True)
class Served:
    """All that the server tells of a root."""

    page: Fresh[Snapshot]
    metrics: Fresh[str]
    """In Prometheus' text format."""
    health: Fresh[Health]


def is_allowed(host: str, own: str) -> bool:
    """Say whether a request may name this server so.

    A page elsewhere on the web may let its own name lead here (DNS rebinding): a name is refused unless it is
    `localhost` or the one of this server. An address cannot be rebound.

    Args:
        host: the header `Host` of the request.
        own: the host that the server was started for.
    """
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in ("localhost", own.lower(), socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class PageServer(ThreadingHTTPServer):
    """Answers `/` with the page, `/data.json` with its data, and the paths of probes and of Prometheus."""

    daemon_threads = True

    def __init__(self, host: str, port: int, served: Served) -> None:
        """Listen on a host and a port; 0 is any free port.

        Raises:
            OSError: the address is taken, or is not one of this machine.
        """
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.host, self.served = host, served
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"


_TEXT = "text/plain"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "spark_abs", ""
    timeout = 30
    """Seconds that a connection may be silent."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if is_allowed(self.headers.get("Host", ""), self.server.host):
            status, kind, text, etag = self._found(self.path.partition("?")[0])
        else:
            status, kind, etag = 403, _TEXT, ""
            text = "this server is not known by that name: use its address\n"
        self._send(status, kind, text, with_body, etag)

    def _found(self, path: str) -> tuple[int, str, str, str]:
        """Return status, kind, text and ETag of an answer."""
        served = self.server.served
        try:
            match path:
                case "/":
                    return 200, "text/html", page_of(served.page.newest().plain, ASK_EVERY_MS), ""
                case "/data.json":
                    found = served.page.newest()
                    known = self.headers.get("If-None-Match") == found.etag
                    text = "" if known else embedded(found.plain)
                    return 304 if known else 200, "application/json", text, found.etag
                case "/metrics":
                    return 200, f"{_TEXT}; version=0.0.4", served.metrics.newest(), ""
                case "/healthz":  # of this server: the root is not asked
                    return 200, _TEXT, "alive\n", ""
                case "/readyz":
                    health = served.health.newest()
                    return 200 if health.healthy else 503, _TEXT, f"{redacted(health.line)}\n", ""
        except (AbsError, OSError) as error:
            return 503, _TEXT, f"{redacted(str(error))}\n", ""
        return 404, _TEXT, "there is /, /data.json, /metrics, /healthz and /readyz\n", ""

    def _send(self, status: int, kind: str, text: str, with_body: bool, etag: str = "") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", f"{policy(served=True)}; frame-ancestors 'none'")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        log.debug(format, *args)
