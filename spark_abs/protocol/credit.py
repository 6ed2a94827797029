"""Credit: whether a stage may begin its next batch, decided from the unread data in its channels (P19).

No message grants credit. A channel has a fixed capacity; the entries that its slowest consumer has not
durably consumed use it. Both are read from logs, so the answer is the same after a crash. A full channel
blocks its producer, which then reads no input, and so backpressure reaches the sources.

Barriers do not wait (see `at_once`), so a channel holds at most its capacity and one batch for each open
checkpoint; in bytes, one batch more, since a batch may be larger than the remaining capacity. There is no
deadlock:

- A consumer that is blocked at barrier n waits for a stage that has not passed n on. Take the least such n,
  and the stage furthest upstream that has not passed it on: this stage is a source, or all its inputs have n.
- If this stage waits for credit, the consumer of the full channel is not blocked at n, which has not arrived
  there or is its last entry, nor at an earlier barrier. So this consumer reads, or waits for credit itself,
  and this chain of waiting stages ends downstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spark_abs.alignment.marker import Cancelled, Cut, Emission
from spark_abs.model import CheckpointId, Entry, Version


@dataclass(frozen=True, slots=True)
class Capacity:
    """The unread data that a channel may hold, in entries with rows and in bytes; None for no limit."""

    entries: int | None = None
    size: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether a limit is set."""
        return self.entries is not None or self.size is not None


ANY = Capacity()
"""No bound."""


@dataclass(frozen=True, slots=True)
class Load:
    """The credit that an entry with rows uses."""

    version: Version
    size: int


@dataclass(frozen=True, slots=True)
class Unread:
    """The data of a channel that its slowest consumer has not durably consumed."""

    entries: int
    size: int


def load_of(entry: Entry) -> Load | None:
    """Return the credit that an entry uses; None for an entry without rows.

    A position never moves to an entry without rows and markers. If such entries used credit, an idle stage
    would fill its channel with entries that are never consumed.
    """
    return Load(entry.version, entry.size) if entry.files else None


def loads_of(entries: Iterable[Entry]) -> Iterator[Load]:
    """Iterate the credit that entries use."""
    return (load for entry in entries if (load := load_of(entry)) is not None)


def slowest(consumers: Iterable[Version]) -> Version | None:
    """Return the entry up to which all consumers of a channel have read; None without consumers."""
    return min(consumers, default=None)


def unread(loads: Iterable[Load], consumers: Iterable[Version]) -> Unread:
    """Add up the entries that the slowest consumer has not consumed."""
    behind = slowest(consumers)
    sizes = [load.size for load in loads if behind is not None and load.version > behind]
    return Unread(len(sizes), sum(sizes))


def grants(unread: Unread, capacity: Capacity) -> bool:
    """Say whether a channel has credit for one more batch of any size; an empty channel always has."""
    entries = capacity.entries is None or unread.entries < capacity.entries
    return not unread.entries or (entries and (capacity.size is None or unread.size < capacity.size))


def holds_back(loads: Iterable[Load], position: Version, capacity: Capacity) -> bool:
    """Say whether the head of a loop must read only its feedback edge, because this channel is full.

    A feedback edge has no credit: its producer may be the head, which must not wait for itself (P17).
    """
    return not grants(unread(loads, [position]), capacity)


def at_once(emission: Emission, written: CheckpointId, offered: CheckpointId) -> bool:
    """Say whether a batch needs no credit.

    Args:
        emission: the marker that the outputs get at the end of the batch.
        written: the newest id that every output has passed on.
        offered: an open barrier that the stage may take before or with the batch although no input has it,
            because the stage takes barriers like a source or the barrier is unaligned; `NO_EPOCH` without
            one. The barrier may also be offered while the stage waits.
    """
    match emission:
        case Cut(id=reached) | Cancelled(id=reached):
            return max(reached, offered) > written
        case _:
            return offered > written
