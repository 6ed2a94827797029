"""A process that has imported what gates need in the driver, and forks one whenever Spark starts a gate's.

The planning half imports for 0.6 seconds of CPU and keeps 50 MB to itself, and so does each of the workers
that make a gate and that plan what its tasks read; a forked one does neither. The driver starts this file by
its path, with a listening socket; `sitecustomize` tells it of what Spark starts. A process that Spark has
started then only waits for the forked one, and each ends when the other does.

What is forked is what would have run: same interpreter and flags, working directory, environment, module
path, standard streams. A request that differs in what was imported, or how, is closed unanswered, and the
process imports by itself, as it does where there is no server.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_IMPORTED = (
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "spark_abs.channels.gate",
)
_PATIENCE_S = 2.0
_LENGTH, _CHUNK = 8, 2**16


@dataclass(frozen=True, slots=True)
class Request:
    """What a process that Spark has started says of itself."""

    path: list[str]
    arguments: list[str]
    """Those behind `python -m`."""
    directory: str
    environment: dict[str, str]
    streams: tuple[int, ...]
    """Its standard streams, as file descriptors of this process."""


def serve(listening: socket.socket) -> Request | None:
    """Fork until the driver is gone, whose pipe is the standard input; in a forked process return why."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the driver
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    first: Request | None = None
    while listening in select.select([listening, sys.stdin], [], [])[0]:
        client, _ = listening.accept()
        client.settimeout(_PATIENCE_S)
        with suppress(OSError, ValueError, KeyError):
            request = receive(client)
            if first is None:
                _import_all(request)
                first = request
            if request.path == first.path and os.fork() == 0:
                listening.close()
                become(request, client)
                return request
            for stream in request.streams:
                os.close(stream)
        client.close()
    return None


def receive(client: socket.socket) -> Request:
    """Read a request.

    Raises:
        OSError: it does not come in time.
        ValueError, KeyError: it is none, or is of another interpreter or other flags than this one's.
    """
    begun, streams, _, _ = socket.recv_fds(client, _LENGTH, 3)
    text, length = b"", int.from_bytes(begun)
    while len(text) < length and (more := client.recv(min(length - len(text), _CHUNK))):
        text += more
    said: dict[str, Any] = json.loads(text)
    if (said["executable"], said["flags"]) != (sys.executable, list(sys.flags)):
        raise ValueError(f"{said['executable']} {said['flags']}")
    return Request(said["path"], said["arguments"], said["directory"], said["environment"], tuple(streams))


def _import_all(request: Request) -> None:
    """Import what every planning half does.

    Raises:
        ImportError: it is not there, or not the copy of this package that the driver runs.
    """
    sys.path[:] = _path(request)
    for name in _IMPORTED:
        importlib.import_module(name)
    found = sys.modules["spark_abs"].__file__
    if found is None or not Path(found).parent.samefile(Path(__file__).parents[1]):
        raise ImportError(f"Spark's processes import {found}, the driver another")
    gc.freeze()


def _path(request: Request) -> list[str]:
    """Return the module path as `python -m` has it."""
    return [*([] if sys.flags.safe_path else [request.directory]), *request.path]


def become(request: Request, client: socket.socket) -> None:
    """Make this forked process what Spark has started, and tell the process that asks."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.directory)
    Path("/proc/self/comm").write_text(request.arguments[-1].rpartition(".")[2])  # what `top` shows
    os.environ.clear()
    os.environ.update(request.environment)
    client.settimeout(None)
    threading.Thread(target=_end_with, args=(client,), daemon=True).start()
    client.sendall(b"+")


def _end_with(client: socket.socket) -> None:
    """End this process as Spark does, when the one that Spark has started, and has ended, is no more."""
    with suppress(OSError):
        client.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve on the socket whose number is the argument; in a forked process run the module."""
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        place, server = Path(listening.getsockname()).parent, os.getpid()
        try:
            request = serve(listening)
        finally:
            if os.getpid() == server:
                shutil.rmtree(place, ignore_errors=True)
    if request is not None:
        module, *sys.argv[1:] = request.arguments
        sys.modules.pop(module, None)  # it is to run as if it had not been imported
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
