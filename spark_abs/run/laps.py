"""How long the parts of something took, for one line of a log."""

from __future__ import annotations

import time


class Laps:
    """A clock that is told when a part is over. For one thread."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: list[str] = []

    def over(self, part: str) -> None:
        """Say that a part is over which began when the one before was."""
        now = time.monotonic()
        self._parts.append(f"{part} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        """Return the time of the whole, and of each part."""
        return f"{self._last - self._began:.1f} s ({', '.join(self._parts)})"
