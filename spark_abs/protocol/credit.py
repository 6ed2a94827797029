"""Credit: whether a stage may begin its next batch, from what its channels hold unread (P19).

There is no message that grants credit. A channel has so much room; what its slowest consumer has not durably
consumed takes some of it. Both are in logs, so a producer that asks again after a crash gets the same answer.
A full channel makes its producer wait, which then reads nothing from its own inputs, and so the pressure goes
back to the sources.

Barriers do not wait (see `at_once`), so a channel holds at most its capacity and a batch for each open
checkpoint; in bytes, one batch more, which may be larger than what was left. No cycle of waiting comes of it:

- A consumer that stands at barrier n and does not read on waits for a stage that has not passed n on. Take
  the least such n, and of the stages that have yet to pass it on the one furthest upstream: it is a source,
  or all its inputs have n.
- If it waits for credit, then on a channel whose consumer is not held there at n, which it does not hold or
  which is the last it holds, nor at an earlier barrier. That one reads on, or waits for credit itself, and
  the chain of these goes downstream to an end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spark_abs.alignment.cut import Cancelled, Cut, Emission
from spark_abs.model import CheckpointId, Entry, Version


@dataclass(frozen=True, slots=True)
class Capacity:
    """The unread data that a channel may hold: entries with rows, and their bytes; None for no limit."""

    entries: int | None = None
    size: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether there is a bound."""
        return self.entries is not None or self.size is not None


ANY = Capacity()
"""No bound."""


@dataclass(frozen=True, slots=True)
class Load:
    """An entry with rows as credit counts it."""

    version: Version
    size: int


@dataclass(frozen=True, slots=True)
class Unread:
    """The data in a channel that its slowest consumer has not durably consumed."""

    entries: int
    size: int


def load_of(entry: Entry) -> Load | None:
    """Return what an entry takes of a channel's room; None if it has no rows.

    A position never moves to an entry without anything in it: were such entries counted, an idle stage
    could fill its channel with what nobody will ever consume.
    """
    return Load(entry.version, entry.size) if entry.files else None


def loads_of(entries: Iterable[Entry]) -> Iterator[Load]:
    """Iterate what entries take of a channel's room."""
    return (load for entry in entries if (load := load_of(entry)) is not None)


def slowest(consumers: Iterable[Version]) -> Version | None:
    """Return the entry up to which all consumers of a channel have read, None if it has none."""
    return min(consumers, default=None)


def unread(loads: Iterable[Load], consumers: Iterable[Version]) -> Unread:
    """Add up the entries that the slowest consumer has not consumed."""
    behind = slowest(consumers)
    sizes = [load.size for load in loads if behind is not None and load.version > behind]
    return Unread(len(sizes), sum(sizes))


def grants(found: Unread, capacity: Capacity) -> bool:
    """Say whether a channel takes another batch, however large: an empty one always does."""
    entries = capacity.entries is None or found.entries < capacity.entries
    return not found.entries or (entries and (capacity.size is None or found.size < capacity.size))


def holds_back(loads: Iterable[Load], position: Version, capacity: Capacity) -> bool:
    """Say whether the head of a loop reads only its feedback edge for now: that holds all it may hold.

    A feedback edge is outside credit: its producer may be the head, which must not wait for itself (P17).
    """
    return not grants(unread(loads, [position]), capacity)


def at_once(emission: Emission, written: CheckpointId, offered: CheckpointId) -> bool:
    """Say whether a batch needs no credit.

    Args:
        emission: what the outputs get at its end.
        written: the newest id that every output has carried.
        offered: the open barrier that the stage may take ahead of the batch, or with it, though no input has
            it: it takes barriers like a source, or this one is unaligned; `NO_EPOCH` if there is none. It
            counts also if it is offered while the stage waits.
    """
    match emission:
        case Cut(id=reached) | Cancelled(id=reached):
            return max(reached, offered) > written
        case _:
            return offered > written
