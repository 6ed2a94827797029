"""The barriers that a stage has taken where it stood, told to its gates.

The gates of a stage plan in processes of their own on the driver's machine, so a local file carries the news.
It is a hint: a gate that gets none reads the barrier with a batch, which its outputs hold already. The file
is the run's own, so it tells of no other run's barriers.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from spark_abs.model import NO_EPOCH, CheckpointId

log = logging.getLogger(__name__)


class TakenNote:
    """Tells the gates of one stage. For the holder of the batch lock."""

    def __init__(self, path: str) -> None:
        self.path = path
        """The file, on a disk of the driver's machine."""

    def write(self, checkpoint: CheckpointId) -> None:
        """Tell that a barrier was taken, whole or not at all: every output has it, its cut is handed over."""
        part = f"{self.path}.part"
        try:
            Path(part).write_text(str(int(checkpoint)))
            os.replace(part, self.path)
        except OSError as error:
            log.debug("gates are not told of barrier %s: %s", checkpoint, error)


class TakenHint:
    """What one gate knows of the barriers that its stage has taken. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.newest = NO_EPOCH
        """The newest one."""

    def look(self) -> bool:
        """Read the note; say whether it tells of a newer barrier."""
        before = self.newest
        with suppress(OSError, ValueError):
            self.newest = max(before, CheckpointId(int(Path(self._path).read_text())))
        return self.newest > before
