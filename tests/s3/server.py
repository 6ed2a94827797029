"""An S3-compatible server in a process of its own; its access log counts the requests."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

from spark_abs.store.storage import Storage
from tests.ports import free_port

BUCKET = "bucket"
SECRET = "a-secret-that-nobody-may-see"
_PATIENCE_S = 60.0
_REQUEST = re.compile(r'"(?:\x1b\[[0-9;]*m)*([A-Z]+) (\S+) HTTP')


class Server:
    """moto's server; what it holds is gone with it."""

    def __init__(self, scratch: Path) -> None:
        port = free_port()
        self._log = scratch / "server.log"
        with self._log.open("wb") as output:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.endpoint = f"http://127.0.0.1:{port}"
        self._await(port)
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def storage(self) -> Storage:
        return Storage(self.endpoint, "us-east-1", "tests", SECRET, allow_http=True)

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {
            "SPARK_ABS_STORAGE_ENDPOINT": self.endpoint,
            "SPARK_ABS_STORAGE_REGION": "us-east-1",
            "SPARK_ABS_STORAGE_ACCESS_KEY_ID": "tests",
            "SPARK_ABS_STORAGE_SECRET_ACCESS_KEY": SECRET,
            "SPARK_ABS_STORAGE_ALLOW_HTTP": "true",
        }

    def mark(self) -> int:
        """Return a moment, to count from."""
        return self._log.stat().st_size

    def requests(self, since: int, below: str) -> Counter[str]:
        """Count requests by method and first directory below a prefix; listings by the prefix they name."""
        found: Counter[str] = Counter()
        for method, url in _REQUEST.findall(self._log.read_bytes()[since:].decode(errors="replace")):
            path, _, query = unquote(url).partition("?")
            named = dict(p.partition("=")[::2] for p in query.split("&")).get("prefix", "")
            key = path.removeprefix(f"/{BUCKET}").lstrip("/") or named
            if key.startswith(f"{below}/"):
                found[f"{method} {key.removeprefix(f'{below}/').partition('/')[0]}"] += 1
        return found

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, "the server does not answer"
            else:
                return
