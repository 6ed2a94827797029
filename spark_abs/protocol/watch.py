"""What `control/` records of the watcher of plain queries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watch:
    """What the newest watcher of a root was given."""

    checkpoints: tuple[str, ...]
    """Where the checkpoint directories are; of a pattern those that it has led to."""
    tables: tuple[str, ...]
    """Where the tables are, in the same way."""
    keep: str
    """How long cuts are kept, in words."""
    every: str
    """The time between two looks as it was given; empty if the watcher looked once."""
    id: str = "watch"
