"""Ports for the servers of tests."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 30_000)
"""Below those that Linux and macOS give whoever asks for any (from 32768 and 49152): of a server that was
stopped clients may be left that try its port again and again, and Spark fails a query when anybody but the
Python process that it has started connects to the port where it waits for that."""


def free_port() -> int:
    """Find a port that nobody has now.

    Raises:
        OSError: there is none.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):  # whatever a test has seeded
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {_PORTS.start} to {_PORTS.stop}")
