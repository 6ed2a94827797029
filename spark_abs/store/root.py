"""Where everything of one job is kept."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlparse

from pyarrow import fs

from spark_abs.errors import UsageError
from spark_abs.model import AttemptId, ChannelId, StageId, checked_name


def location_of(uri: str) -> str:
    """Return `uri` in the one form that Spark, deltalake and pyarrow all take; local paths become absolute.

    Raises:
        UsageError: it is empty.
    """
    if not uri:
        raise UsageError("an empty path")
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        uri = parsed.path
    elif parsed.scheme:
        return uri.rstrip("/")
    return os.path.abspath(os.path.expanduser(uri))


@dataclass(frozen=True)
class Root:
    """Paths below a job's root. Picklable: the gates take it to their own processes."""

    uri: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", location_of(self.uri))

    @cached_property
    def _resolved(self) -> tuple[fs.FileSystem, str]:
        filesystem, path = fs.FileSystem.from_uri(self.uri)
        return filesystem, path

    @property
    def fs(self) -> fs.FileSystem:
        """The file system of the root."""
        return self._resolved[0]

    def __getstate__(self) -> dict[str, str]:
        return {"uri": self.uri}

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "uri", state["uri"])

    def path(self, relative: str) -> str:
        """Return a path below the root as `fs` takes it."""
        return f"{self._resolved[1]}/{relative}"

    def at(self, relative: str) -> str:
        """Return a path below the root as a URI that Spark and deltalake take."""
        return f"{self.uri}/{relative}"

    def channel(self, channel: ChannelId) -> str:
        """Return the relative path of a channel's table."""
        stage, _, output = channel.partition(".")
        return f"channels/{checked_name(stage, 'stage')}.{checked_name(output, 'output')}"

    def native(self, attempt: AttemptId, stage: StageId) -> str:
        """Return the relative path of a stage's Spark checkpoint."""
        return f"native/{int(attempt)}/{checked_name(stage, 'stage')}"

    def write_whole(self, relative: str, data: bytes) -> None:
        """Write a small file so that a reader sees all of it or the one before.

        Only for files that any single writer may overwrite; nothing is decided by them.
        """
        target = self.path(relative)
        self.fs.create_dir(os.path.dirname(target), recursive=True)
        if isinstance(self.fs, fs.LocalFileSystem):
            temporary = f"{target}.{uuid.uuid4().hex}.tmp"
            with self.fs.open_output_stream(temporary) as stream:
                stream.write(data)
            self.fs.move(temporary, target)
        else:
            with self.fs.open_output_stream(target) as stream:
                stream.write(data)

    def read_whole(self, relative: str) -> bytes | None:
        """Read a small file, None if there is none."""
        try:
            with self.fs.open_input_stream(self.path(relative)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None
