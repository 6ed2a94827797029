"""Bytes that sweeping must keep although no manifest names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_abs.manifest import Location
from spark_abs.model import CheckpointId


class Pins:
    """Bytes that open captures name, or that aborted captures have left for the next one.

    When a checkpoint is aborted, for example by its timeout, the files that it has packed are not lost: the
    next capture of the same stage finds them by hash. After that capture, unused ones may be swept. Pins are
    only in memory: after a crash the first sweep of the next run removes everything that no manifest names.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._pinned: dict[CheckpointId, dict[str, dict[str, Location]]] = {}
        self._left: dict[str, dict[str, Location]] = {}

    def pin(self, checkpoint: CheckpointId, directory: str, files: Mapping[str, Location]) -> None:
        """Pin the captured files of a native directory for a checkpoint, by hash, until `unpin`."""
        self._pinned.setdefault(checkpoint, {}).setdefault(directory, {}).update(files)

    def unpin(self, checkpoint: CheckpointId, *, completed: bool) -> None:
        """Release the pins of a checkpoint; if it was aborted, leave its files to the next captures."""
        for directory, files in self._pinned.pop(checkpoint, {}).items():
            if not completed:
                self._left.setdefault(directory, {}).update(files)

    def captured(self, directory: str) -> None:
        """Drop the files left to the next capture of a directory: it is complete and has pinned its own."""
        self._left.pop(directory, None)

    def pinned(self) -> set[tuple[str, str]]:
        """Return hash and pack of everything that is pinned."""
        return {(sha256, at.pack) for files in self._all() for sha256, at in files.items()}

    def move(self, gone: Collection[str], moved: Mapping[str, Location]) -> None:
        """Follow bytes that have moved out of removed packs."""
        for files in self._all():
            follow(files, gone, moved)

    def _all(self) -> list[dict[str, Location]]:
        return [*self._left.values(), *(files for held in self._pinned.values() for files in held.values())]


def follow(files: dict[str, Location], gone: Collection[str], moved: Mapping[str, Location]) -> None:
    """Replace locations in removed packs by their new ones, or forget them."""
    for sha256 in [sha256 for sha256, at in files.items() if at.pack in gone]:
        if sha256 in moved:
            files[sha256] = moved[sha256]
        else:
            del files[sha256]
