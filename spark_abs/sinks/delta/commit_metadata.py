"""The user metadata of commits by spark_abs to the table of a sink."""

from __future__ import annotations

import json
from dataclasses import dataclass

from spark_abs.codec import from_plain, require_format
from spark_abs.model import (
    FORMAT,
    NO_BATCH,
    AttemptId,
    Barrier,
    BatchId,
    CheckpointId,
    LookupVersion,
    RunId,
    Version,
)
from spark_abs.protocol.evaluation import Staged
from spark_abs.protocol.outside import Mark
from spark_abs.store.log import LogCommit


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The offsets that a batch read: with them a lost stage can repeat the batch."""

    batch: BatchId
    offsets: str
    """The text of the stage's `offsets/<batch>`."""


@dataclass(frozen=True, slots=True)
class CommittedEpoch:
    """How far the table of a sink that writes after checkpoints is with a commit."""

    mark: Mark | None = None
    """None before the first epoch."""
    after: Mark | None = None
    """In the commit with the rows of an epoch: the mark before the epoch."""
    kept: bool = False
    """Whether rows after the mark stay in the table: a restore was told to leave them."""


@dataclass(frozen=True, slots=True)
class TombstoneFile:
    """A file with deleted keys, written before the commit that names it."""

    directory: str
    """Relative to the root."""
    newest_ms: int
    """When its last delete was applied."""
    level: int = 0
    """How often its keys were rewritten together with those of other files."""


@dataclass(frozen=True, slots=True)
class Tombstones:
    """The deleted keys that count after a commit."""

    key: tuple[str, ...]
    sequence_by: tuple[str, ...]
    files: tuple[TombstoneFile, ...] = ()


@dataclass(frozen=True, slots=True)
class SinkMetadata:
    """The user metadata of a commit by spark_abs; commits by others have none."""

    sink: str
    """`<job>/<stage>/<output>`; `<job>/<sink>` of one that writes after checkpoints."""
    attempt: AttemptId
    run: RunId
    batch: BatchId = NO_BATCH
    barrier: Barrier | None = None
    cancel: CheckpointId | None = None
    restored: Version | None = None
    """Set in the commit that brought the table back to that version for the attempt."""
    attached: bool = False
    """Set in the commit with which the attempt came to a table that held nothing of it."""
    plans: tuple[PlannedBatch, ...] = ()
    """Of a stage without channels: the offsets of this batch, and of batches without rows before it."""
    root: str = ""
    """The identity of the root that wrote it; empty in commits of attempts that an earlier version began."""
    evaluated: tuple[Staged, ...] = ()
    """In the first commit of a batch: the files of all its outputs."""
    lookups: tuple[LookupVersion, ...] = ()
    """Beside them: the versions at which the batch reads its lookups."""
    took_over: bool = False
    """Set in a commit that fences all other roots that had written to the table by then."""
    epoch: CommittedEpoch | None = None
    """Set in every commit of a sink that writes after checkpoints."""
    tombstones: Tombstones | None = None
    """In a commit with rows, or of a restore, of a sink that applies deletes by a sequence."""
    v: int = FORMAT

    @property
    def job(self) -> str:
        return self.sink.partition("/")[0]

    @property
    def stage(self) -> str:
        return self.sink.split("/")[1] if self.sink.count("/") == 2 else ""

    @property
    def has_rows(self) -> bool:
        """Whether it is the commit of a batch or an epoch."""
        return self.batch > NO_BATCH or (self.epoch is not None and self.epoch.after is not None)

    @property
    def begins(self) -> bool:
        """Whether an attempt begins with this commit: it came to the table, or brought it back."""
        return self.attached or self.restored is not None


def note_of(commit: LogCommit, table: str) -> SinkMetadata | None:
    """Return the metadata of a commit by spark_abs, None for a commit by others.

    Raises:
        DamageError: a newer version wrote it.
    """
    try:
        plain = json.loads(commit.metadata or "null")
    except ValueError:
        return None
    if not isinstance(plain, dict) or not {"sink", "attempt", "run"} <= plain.keys():
        return None
    note = from_plain(SinkMetadata, plain)
    require_format(note.v, FORMAT, f"version {commit.version} of {table}")
    return note
