"""`spark-abs serve`: the page of a root over HTTP, which follows a running job. It only reads."""

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
from typing import Any

from spark_abs.errors import AbsError
from spark_abs.report.encoding import embedded, plain_report
from spark_abs.report.page import page_of, policy
from spark_abs.report.reading import RootReader
from spark_abs.report.redaction import redacted

log = logging.getLogger(__name__)

ASK_EVERY_MS = 3000
"""How often a page asks for news."""
READ_EVERY_S = 1.0
"""The root is read at most so often, however many pages ask."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The data of the page at one time; `etag` changes if anything but the time has changed."""

    plain: dict[str, Any]
    etag: str


class Following:
    """The newest data of a root for all requests. Thread-safe: one thread reads, others wait for it."""

    def __init__(
        self, reader: RootReader, now_ms: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the reader of a root, the wall clock, and a clock that only advances."""
        self._reader, self._now_ms, self._clock = reader, now_ms, clock
        self._lock = threading.Lock()
        self._read: tuple[float, Snapshot] | None = None

    def newest(self) -> Snapshot:
        """Return the data of at most a second ago.

        Raises:
            DamageError: `control/` cannot be read.
            OSError: the store cannot be read now.
        """
        with self._lock:
            if self._read is None or self._clock() - self._read[0] >= READ_EVERY_S:
                plain = plain_report(self._reader.read(self._now_ms()))
                timeless = {
                    name: value for name, value in plain.items() if name not in ("made_ms", "heard_ms")
                }
                digest = hashlib.sha256(json.dumps(timeless, separators=(",", ":")).encode()).hexdigest()
                self._read = (self._clock(), Snapshot(plain, f'"{digest[:32]}"'))
            return self._read[1]


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
    """Answers `/` with the page and `/data.json` with its data."""

    daemon_threads = True

    def __init__(self, host: str, port: int, following: Following) -> None:
        """Listen on a host and a port; 0 is any free port.

        Raises:
            OSError: the address is taken, or is not one of this machine.
        """
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.host, self.following = host, following
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"


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
        if not is_allowed(self.headers.get("Host", ""), self.server.host):
            self._send(
                403, "text/plain", "this server is not known by that name: use its address\n", with_body
            )
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._send(404, "text/plain", "there is / and /data.json\n", with_body)
            return
        try:
            found = self.server.following.newest()
        except (AbsError, OSError) as error:
            self._send(503, "text/plain", f"{redacted(str(error))}\n", with_body)
            return
        if path == "/":
            self._send(200, "text/html", page_of(found.plain, ASK_EVERY_MS), with_body)
        elif self.headers.get("If-None-Match") == found.etag:
            self._send(304, "application/json", "", with_body, found.etag)
        else:
            self._send(200, "application/json", embedded(found.plain), with_body, found.etag)

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
