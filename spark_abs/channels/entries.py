"""The user metadata of a channel's commits: encoding and decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from spark_abs.codec import from_json, require_format, to_plain
from spark_abs.model import (
    FORMAT,
    NO_BATCH,
    AttemptId,
    Barrier,
    BatchId,
    CheckpointId,
    DataFile,
    Entry,
    LookupVersion,
    RunId,
    Version,
    checked_relative,
)
from spark_abs.protocol.evaluation import Staged
from spark_abs.store.log import LogCommit


@dataclass(frozen=True, slots=True)
class EntryMetadata:
    """The user metadata of a commit of this package. Fields that are None, False or empty are not stored."""

    attempt: AttemptId
    run: RunId
    batch: BatchId = NO_BATCH
    """`NO_BATCH` where the commit holds only a marker."""
    barrier: Barrier | None = None
    cancel: CheckpointId | None = None
    end: bool = False
    watermark: int | None = None
    """The producer's watermark after the batch, milliseconds since the epoch."""
    offsets: str | None = None
    """The text of the producer's `offsets/<batch>`: with it a lost stage can repeat the batch."""
    evaluated: tuple[Staged, ...] = ()
    """In the first commit of a batch: the files of all its outputs."""
    lookups: tuple[LookupVersion, ...] = ()
    """In the same commit: the versions of the batch's lookups."""
    uncompressed: int | None = None
    """Bytes of the entry's files before compression; None if there are none, or it is not known."""
    v: int = FORMAT


def encode_note(note: EntryMetadata) -> str:
    """Encode metadata as the JSON text of the commit."""
    plain = {
        key: value for key, value in to_plain(note).items() if value not in ([], None) and value is not False
    }
    return json.dumps(plain, separators=(",", ":"))


def note_of(commit: LogCommit) -> EntryMetadata | None:
    """Return the metadata of a commit, None for a commit without a batch or marker.

    Commits of this package are recognised by their token; metadata of other commits is not read.

    Raises:
        DamageError: the metadata of a commit of this package cannot be read, or has a newer format.
    """
    if commit.token is None or commit.metadata is None:
        return None
    note = from_json(EntryMetadata, commit.metadata)
    require_format(note.v, FORMAT, f"commit {commit.version}")
    return note


def entry_of(commit: LogCommit) -> Entry:
    """Turn a commit of a channel into its entry. Foreign commits and fences are empty entries of attempt 0.

    Raises:
        DamageError: as `note_of`, or a file's path leaves the table.
    """
    note = note_of(commit)
    if note is None:
        return Entry(commit.version)
    return entry_from(commit.version, note, commit.adds)


def entry_from(version: Version, note: EntryMetadata, files: tuple[DataFile, ...]) -> Entry:
    """Build an entry.

    Raises:
        DamageError: a file's path leaves the table.
    """
    for file in files:
        checked_relative(file.path)
    if note.uncompressed is not None:
        files = _inflated(files, note.uncompressed)
    return Entry(
        version=version,
        attempt=note.attempt,
        run=note.run,
        batch=note.batch,
        barrier=note.barrier,
        cancel=note.cancel,
        end=note.end,
        watermark_ms=note.watermark,
        files=files,
    )


def _inflated(files: tuple[DataFile, ...], uncompressed: int) -> tuple[DataFile, ...]:
    """Divide the uncompressed bytes of an entry among its files, by their sizes."""
    size = max(1, sum(file.size for file in files))
    return tuple(replace(file, inflated=uncompressed * file.size // size) for file in files)
