"""A process with the imports of gates, which forks a process whenever Spark starts one for a gate.

The planning process of a gate spends 0.6 seconds of CPU on imports and takes 50 MB of its own, and so does
each worker that creates a gate or plans its tasks' reads. A forked process saves both. The driver starts this
file by its path, with a listening socket; `sitecustomize` sends it a request for each process that Spark
starts. The process that Spark has started then only waits for the forked one, and each ends when the other
does. Linux only.

The forked process equals the original: same interpreter and flags, working directory, environment, module
path, standard streams. If the imports of a request would differ, the server closes it without an answer, and
the process imports by itself, as without a server.
"""

from __future__ import annotations

import fcntl
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
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

_IMPORTED = (
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "spark_abs.channels.gate",
)
_LENGTH, _CHUNK = 8, 2**16
_PATIENCE_S = 1.0
_LOOK_MS = 10_000
"""Seconds between checks that the driver is alive: a process forked by the driver may hold its pipe open."""


@dataclass(frozen=True, slots=True)
class Request:
    """The description that a process started by Spark sends of itself."""

    path: list[str]
    arguments: list[str]
    """The arguments after `python -m`."""
    directory: str
    environment: dict[str, str]
    streams: list[int]
    """Its standard streams, as file descriptors in this process."""


def serve(listening: socket.socket) -> Request | None:
    """Fork for each request until the driver's pipe, the standard input, closes; return in a forked process.

    The first request only triggers the imports: a process that waited for them could be too late for Spark.

    Raises:
        RuntimeError, ImportError: this process cannot fork safely.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the driver,
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and so is this: the end of the driver is heard of
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    driver, path, poll = os.getppid(), list[str](), select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(sys.stdin, select.POLLIN)
    while os.getppid() == driver:
        ready = [number for number, _ in poll.poll(_LOOK_MS)]
        if sys.stdin.fileno() in ready:
            break
        if not ready:
            continue
        client, _ = listening.accept()
        with client, ExitStack() as opened:
            request = receive(client, opened)
            if request is not None and not path:
                client.close()
                opened.close()
                _import_all(request)
                path = request.path
            elif request is not None and request.path == path and _is_forked():
                listening.close()
                become(request, client)
                return request
    return None


def receive(client: socket.socket, opened: ExitStack) -> Request | None:
    """Read a request; None if it is not valid, or from an interpreter or flags other than this one's.

    The streams are closed with `opened`.
    """
    client.settimeout(_PATIENCE_S)
    try:
        begun, streams, _, _ = socket.recv_fds(client, _LENGTH, 3)
        for stream in streams:
            opened.callback(os.close, stream)
        text, length = b"", int.from_bytes(begun)
        while len(text) < length and (more := client.recv(min(length - len(text), _CHUNK))):
            text += more
        said = json.loads(text)
        if (said.pop("executable"), said.pop("flags")) != (sys.executable, list(sys.flags)):
            return None
        return Request(**said, streams=streams) if len(streams) == 3 else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_forked() -> bool:
    """Fork; say whether this is the forked process."""
    try:
        return os.fork() == 0
    except OSError:  # no more processes: who asks imports by itself, or fails as it would have
        return False


def _import_all(request: Request) -> None:
    """Import the modules that each process of a gate imports.

    Raises:
        ImportError: a module is missing, or this package is not the driver's copy.
        RuntimeError: an import started a thread, which a forked process would not have.
    """
    sys.path[:] = _path(request)
    for name in _IMPORTED:
        importlib.import_module(name)
    found = sys.modules["spark_abs"].__file__
    if found is None or not Path(found).parent.samefile(Path(__file__).parents[2]):
        raise ImportError(f"Spark's processes import {found}, the driver a different copy")
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a thread was started")
    gc.freeze()


def _path(request: Request) -> list[str]:
    """Return the module path as under `python -m`."""
    return [*([] if sys.flags.safe_path else [request.directory]), *request.path]


def become(request: Request, client: socket.socket) -> None:
    """Replace the process that Spark started by this forked process, and end when that process ends."""
    waits = False
    try:
        for number, stream in enumerate(request.streams):
            os.dup2(stream, number)
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environment)
        time.tzset()
        sys.path[:] = _path(request)
        with suppress(OSError):  # what `top` shows
            Path("/proc/self/comm").write_text(request.arguments[-1].rpartition(".")[2])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        client.sendall(b"+")
        waits = bool(client.recv(1))  # it has not given up meanwhile
    finally:
        if not waits:
            os._exit(1)
    _end_with(client.detach())


def _end_with(client: int) -> None:
    """Let the kernel send SIGTERM, as Spark does, when the other end of a socket is closed.

    A waiting thread would not do, since this process may fork, as pyspark's daemon does.
    """
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(client, fcntl.F_SETFL, os.O_ASYNC)
    poll = select.poll()
    poll.register(client)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):  # it was closed before that
        os._exit(1)


def main() -> None:
    """Serve on the socket with the descriptor in the argument; in a forked process run the module."""
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
