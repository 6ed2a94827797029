"""A micro-batch of a stage as values: its cause, and what it carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_abs.alignment.cut import Emission
from spark_abs.model import NO_EPOCH, Barrier, BatchId, CheckpointId, Entry, LookupVersion, Position
from spark_abs.protocol.evaluation import Staged
from spark_abs.snapshots.layout import OffsetFile


@dataclass(frozen=True, slots=True)
class Marker:
    """The marker after the rows of an entry."""

    barrier: Barrier | None = None
    cancel: CheckpointId | None = None

    @property
    def id(self) -> CheckpointId:
        """The id of the barrier or cancel marker, `NO_EPOCH` if there is neither."""
        return self.barrier.id if self.barrier else (self.cancel or NO_EPOCH)


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """The cause of a batch, as in the metadata of its commits."""

    batch: BatchId
    offsets: str
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch from Spark's offset log: its cause, and the positions before and after it."""

    facts: BatchFacts
    offsets: OffsetFile
    offsets_before: OffsetFile | None
    """Of the batch before it, None for the first."""
    before: tuple[Position, ...]
    after: tuple[Position, ...]
    emission: Emission
    """The marker for the outputs at its end, as far as the positions determine it."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A batch that outputs hold already: their commits decide for those that lack it."""

    tables: frozenset[str]
    """The tables that hold it or a later batch, by `Consumer.table`."""
    marker: Marker | None
    """The marker after its rows in the channels; None if no channel holds it."""
    named: tuple[Staged, ...]
    """The files that its first commit names, none if an earlier version made that commit."""
    lookups: tuple[LookupVersion, ...] = ()
    """The versions of lookups, which that commit names, too."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Where a batch stands in the channels, and the barrier that it carries there."""

    barrier: Barrier | None
    entries: Mapping[str, Entry]
    """By output."""
