"""How messages name things: arguments in a program or options at the command line, and tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_at_command_line: ContextVar[bool] = ContextVar("spark_abs.advice.at_command_line", default=False)


@contextmanager
def command_line() -> Iterator[None]:
    """Let messages that are made inside speak of the command."""
    token = _at_command_line.set(True)
    try:
        yield
    finally:
        _at_command_line.reset(token)


def way(program: str, command: str) -> str:
    """Return how something is said in a program, or at the command line if that is where we are."""
    return command if _at_command_line.get() else program


def named(name: str, location: str) -> str:
    """Return how a table is shown: its name in a catalog, if it was declared by one, and where it is."""
    return f"{name}, {location}" if name else location
