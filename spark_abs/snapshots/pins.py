"""What may not be swept although no manifest names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_abs.manifest import Location
from spark_abs.model import CheckpointId


class Pins:
    """Bytes that open captures name, and those that aborted ones have left to the next capture.

    What a checkpoint had packed before it was aborted, by its timeout say, is not lost: the next capture of
    the same stage finds it, by its hash. Once that capture is in, what it did not use may go. All of this is
    memory: after a crash the next run's first sweep takes what no manifest names.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._pinned: dict[CheckpointId, dict[str, dict[str, Location]]] = {}
        self._left: dict[str, dict[str, Location]] = {}

    def pin(self, checkpoint: CheckpointId, directory: str, files: Mapping[str, Location]) -> None:
        """Pin what a checkpoint's capture of a native directory names, by hash, until `unpin`."""
        self._pinned.setdefault(checkpoint, {}).setdefault(directory, {}).update(files)

    def unpin(self, checkpoint: CheckpointId, *, completed: bool) -> None:
        """Let go of what a checkpoint pinned; if it was aborted, leave that to the next captures."""
        for directory, files in self._pinned.pop(checkpoint, {}).items():
            if not completed:
                self._left.setdefault(directory, {}).update(files)

    def captured(self, directory: str) -> None:
        """Drop what was left to the next capture of a directory: it is in, and has pinned what it uses."""
        self._left.pop(directory, None)

    def pinned(self) -> set[tuple[str, str]]:
        """Return hash and pack of everything that is pinned."""
        return {(sha256, at.pack) for files in self._all() for sha256, at in files.items()}

    def move(self, gone: Collection[str], moved: Mapping[str, Location]) -> None:
        """Follow bytes out of packs that are gone."""
        for files in self._all():
            follow(files, gone, moved)

    def _all(self) -> list[dict[str, Location]]:
        return [*self._left.values(), *(files for held in self._pinned.values() for files in held.values())]


def follow(files: dict[str, Location], gone: Collection[str], moved: Mapping[str, Location]) -> None:
    """Replace what was in packs that are gone by where it is now, or forget it."""
    for sha256 in [sha256 for sha256, at in files.items() if at.pack in gone]:
        if sha256 in moved:
            files[sha256] = moved[sha256]
        else:
            del files[sha256]
