"""The paths of a job's root."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pyarrow import fs

from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, ChannelId, checked_name, is_number
from spark_abs.store.storage import DEFAULTS, Place, Storage, root_location

DIRECTORIES = ("channels", "checkpoints", "control", "history", "native", "staging", "state", "tombstones")
"""What a job makes below its root."""


@dataclass(frozen=True)
class Root:
    """Paths below a job's root. Picklable: gates take it to their own processes."""

    uri: str
    storage: Storage = field(default=DEFAULTS, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", root_location(self.uri))

    @cached_property
    def top(self) -> Place:
        """The root itself."""
        return self.storage.place(self.uri)

    @property
    def fs(self) -> fs.FileSystem:
        return self.top.fs

    @property
    def local(self) -> bool:
        """Whether the root is a path of the machine's own file system."""
        return self.top.local

    def path(self, relative: str) -> str:
        """Return a path below the root as `fs` takes it."""
        return f"{self.top.path}/{relative}"

    def at(self, relative: str) -> str:
        """Return a path below the root as a URI that Spark takes."""
        return f"{self.uri}/{relative}"

    def place(self, relative: str) -> Place:
        """Return a place below the root."""
        return self.top.below(relative)

    def channel(self, channel: ChannelId) -> str:
        """Return the relative path of a channel's table."""
        stage, _, output = channel.partition(".")
        return f"channels/{checked_name(stage, 'stage')}.{checked_name(output, 'output')}"

    def anywhere(self, location: str) -> Place:
        """Return a place that is given relative to the root, or by its full location."""
        absolute = location.startswith("/") or "://" in location
        return self.storage.place(location) if absolute else self.place(location)

    def native(self, natives: str, attempt: AttemptId, directory: str) -> Place:
        """Return the place of a stage's Spark checkpoint: `natives` and `directory` of its attempt."""
        stage, dot, number = directory.partition(".")
        checked_name(stage, "stage")
        if dot and not is_number(number):
            raise DamageError(f"{directory!r} is not the directory of a native checkpoint")
        return self.anywhere(f"{natives}/{int(attempt)}/{directory}")

    def write_whole(self, relative: str, data: bytes) -> None:
        """Write a small file below the root, see `Place.write`."""
        self.top.write(relative, data)

    def read_whole(self, relative: str) -> bytes | None:
        """Read a small file below the root, None if there is none."""
        return self.top.read(relative)
