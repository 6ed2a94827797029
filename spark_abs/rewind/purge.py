"""Delete the files that rewinds have kept. Afterwards these rewinds cannot be undone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyarrow import fs

from spark_abs.rewind import claim
from spark_abs.rewind.apply import withdraw
from spark_abs.rewind.claim import Claim
from spark_abs.rewind.journal import PURGED, top_of
from spark_abs.rewind.query import rewinds_of
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class Kept:
    """The files that a rewind has kept in one checkpoint directory."""

    place: Place
    rewind: str
    files: int
    size: int


def kept_files(checkpoints: Sequence[Place]) -> tuple[Kept, ...]:
    """List the rewinds of directories that have kept files, oldest first."""
    found = []
    for place in checkpoints:
        for rewind in rewinds_of(place):
            top = f"{place.path}/{top_of(rewind.rewind)}/files"
            selector = fs.FileSelector(top, allow_not_found=True, recursive=True)
            sizes = [i.size or 0 for i in place.fs.get_file_info(selector) if i.type is fs.FileType.File]
            found += [Kept(place, rewind.rewind, len(sizes), sum(sizes))] if sizes else []
    return tuple(sorted(found, key=lambda kept: (kept.rewind, kept.place.uri)))


def purge(checkpoints: Sequence[Place], *, call: str, at: Failpoint) -> tuple[Kept, ...]:
    """Delete the files that rewinds of these directories have kept. A call that was killed is repeated.

    Args:
        checkpoints: the directories.
        call: a fresh id, under which they are claimed meanwhile.
        at: called with the name of each point where a kill is tried.

    Raises:
        Refused: a rewind or an undo works; nothing was deleted.
    """
    wanted = Claim(call, tuple(sorted(place.uri for place in checkpoints)), purges=True)
    storage = checkpoints[0].storage
    try:
        for uri in wanted.queries:
            claim.take(storage.place(uri), wanted)
        at("claimed")
        found = kept_files(checkpoints)
        for kept in found:  # first of all: no undo begins with a part of the files
            kept.place.write(f"{top_of(kept.rewind)}/{PURGED}", b"")
            at("marked")
        for kept in found:
            with suppress(FileNotFoundError):
                kept.place.fs.delete_dir(f"{kept.place.path}/{top_of(kept.rewind)}/files")
            at("deleted")
    finally:
        withdraw(wanted, storage)
    return found
