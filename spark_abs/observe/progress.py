"""Progress reports of long operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Who is told how far work is; called from the thread that does it."""

    def say(self, text: str) -> None:
        """Hear what is done next."""

    def count(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Hear what is done next, and then its bytes as they are done, `total` in all."""


class Silent:
    """Tells nobody."""

    def say(self, text: str) -> None:
        """Say nothing."""

    # The arguments are the protocol's.
    def count(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]:  # noqa: ARG002
        """Count nothing."""
        return nullcontext(lambda _: None)


SILENT: Progress = Silent()
