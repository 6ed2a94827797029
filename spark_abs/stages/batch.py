"""A micro-batch of a stage as values: its cause, what it carries, and what its sink function may know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from spark_abs.alignment.marker import Emission
from spark_abs.errors import UsageError
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    Barrier,
    BatchId,
    CheckpointId,
    Entry,
    LookupVersion,
    Position,
    RunId,
    StageId,
)
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


@dataclass(frozen=True, slots=True)
class Current:
    """Where a sink function is called: with `app_id` and `batch` it can make its own write idempotent."""

    job: str
    stage: StageId
    attempt: AttemptId
    run: RunId
    batch: BatchId
    epoch: CheckpointId
    """The newest barrier that the stage's inputs have passed; 0 before the first and in a source."""
    app_id: str
    """Differs between attempts: a batch with the same number after a restore has not been written yet."""


_current: ContextVar[Current] = ContextVar("spark_abs.current")


def current() -> Current:
    """Return the batch that is being written; only inside a sink function.

    Raises:
        UsageError: called anywhere else.
    """
    try:
        return _current.get()
    except LookupError:
        raise UsageError("spark_abs.current() is known only inside a sink function") from None


def within(value: Current, call: Callable[[], None]) -> None:
    """Call a sink function with `current()` set."""
    token = _current.set(value)
    try:
        call()
    finally:
        _current.reset(token)
