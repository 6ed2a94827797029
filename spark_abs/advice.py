"""How messages spell an argument (of a function, or of the command) and a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_at_command_line: ContextVar[bool] = ContextVar("spark_abs.advice.at_command_line", default=False)


@contextmanager
def command_line() -> Iterator[None]:
    """While this lasts, messages name options of the command in place of arguments."""
    token = _at_command_line.set(True)
    try:
        yield
    finally:
        _at_command_line.reset(token)


def way(program: str, command: str) -> str:
    """Return the spelling for the command line inside `command_line`, else the one for a program."""
    return command if _at_command_line.get() else program


def named(name: str, location: str) -> str:
    """Return how messages show a table: its path, after its catalog name if it was declared by name."""
    return f"{name}, {location}" if name else location
