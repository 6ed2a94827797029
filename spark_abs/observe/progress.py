"""Progress reports of long operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Receives progress of long work, in the thread that does the work."""

    def say(self, text: str) -> None:
        """Receive the name of the work that begins now."""

    def count(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Receive the name and size of work; the function that it yields takes bytes as they are done."""


class Silent:
    """Ignores all progress."""

    def say(self, text: str) -> None:
        """Say nothing."""

    # The arguments are the protocol's.
    def count(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]:  # noqa: ARG002
        """Count nothing."""
        return nullcontext(lambda _: None)


SILENT: Progress = Silent()
