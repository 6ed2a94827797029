"""The data in flight of a checkpoint, in the logs of its channels (P16, P17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from pyarrow import fs

from spark_abs.channels.follow import follow
from spark_abs.errors import DamageError
from spark_abs.manifest import InFlight
from spark_abs.model import Branch, Entry
from spark_abs.store.root import Root


def bytes_in_flight(root: Root, path: Sequence[Branch], flight: InFlight, most: int | None = None) -> int:
    """Return the bytes of the files with the rows in flight; every entry is opened once.

    Args:
        root: the job's root.
        path: the current path in the channel.
        flight: the range.
        most: count no more entries than these.

    Raises:
        DamageError: an entry is missing or cannot be read.
    """
    entries = islice(_entries(root, path, flight), most)
    return sum(file.size for entry in entries for file in entry.files)


def problems_in_flight(root: Root, path: Sequence[Branch], flight: InFlight) -> Iterator[str]:
    """Describe the missing or altered entries and files of rows in flight."""
    table = root.path(root.channel(flight.channel))
    try:
        for entry in _entries(root, path, flight):
            for file in entry.files:
                info = root.fs.get_file_info(f"{table}/{file.path}")
                if info.type is not fs.FileType.File or info.size != file.size:
                    yield f"in flight to {flight.stage}: {file.path} of entry {entry.version} is missing"
    except DamageError as error:
        yield str(error)


def _entries(root: Root, path: Sequence[Branch], flight: InFlight) -> Iterator[Entry]:
    follower = follow(root, flight.channel, path)
    return takewhile(lambda entry: entry.version <= flight.until, follower.after(flight.after))
