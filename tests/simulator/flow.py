"""Credit in the simulated cluster: what its channels hold, and the bound on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from spark_abs.model import NO_EPOCH, AttemptId, Barrier, BatchId, Branch, Position, Version
from spark_abs.protocol import credit
from tests.invariants import within_bound
from tests.simulator.cluster import Native, Storage
from tests.simulator.parts import Parts, Paths
from tests.simulator.running import Run
from tests.simulator.table import Planned, Table


class Planning(Protocol):
    """The process of a stage that has planned a batch."""

    run: Run
    storage: Storage
    native: Native
    channels: list[tuple[str, Table]]

    def path(self, table: Table) -> tuple[Branch, ...]:
        """Return what counts in a channel."""

    def takes(self, planned: Planned) -> Barrier | None:
        """Return the barrier that a stage is to take without its inputs having it."""


def consumed(storage: Storage, attempt: AttemptId, table: Table) -> Iterator[Version]:
    """Iterate how far each input that reads a channel, but not as its feedback edge, has durably read it."""
    return (position.version for _, position in _readers(storage, attempt, table))


def _readers(storage: Storage, attempt: AttemptId, table: Table) -> Iterator[tuple[Native, Position]]:
    for stage in storage.graph:
        if table.channel in stage.inputs and table.channel not in stage.feedback:
            native = storage.native.get((attempt, stage.id))
            if native is not None:
                yield from ((native, p) for p in native.durable.positions if p.channel == table.channel)


def has_room(
    storage: Storage, attempt: AttemptId, table: Table, path: Sequence[Branch], parts: Parts
) -> bool:
    """Say whether a channel takes another batch."""
    behind = parts.slowest(consumed(storage, attempt, table)) if parts.capacity.bounded else None
    if behind is None:
        return True
    loads = (parts.load(entry) for entry in table.after(behind, path))
    return credit.grants(credit.unread([load for load in loads if load], [behind]), parts.capacity)


def may_begin(process: Planning, batch: BatchId) -> bool:
    """Say whether a stage may begin a batch that it has planned."""
    run, storage, parts = process.run, process.storage, process.run.parts
    channels = [(table, process.path(table)) for _, table in process.channels]
    if all(has_room(storage, run.attempt, table, path, parts) for table, path in channels):
        return True
    before, planned = process.native.before(batch), process.native.batch(batch)
    emission = parts.emission(before.positions, planned.positions, run.id)
    written, offered = min(table.marker(path) for table, path in channels), process.takes(planned)
    return parts.at_once(emission, written, offered.id if offered else NO_EPOCH)


def check_bound(
    storage: Storage, attempt: AttemptId, table: Table, path: Sequence[Branch], capacity: credit.Capacity
) -> None:
    """Check what a channel holds, at the only moments in which it grows.

    What a consumer reads a second time, since its checkpoint was lost, is no part of the bound.
    """
    behind = credit.slowest(
        max(position.version, native.had_read.get(table.channel, position.version))
        for native, position in _readers(storage, attempt, table)
    )
    if capacity.entries is None or behind is None:
        return
    unread = list(table.after(behind, path))
    marked = sum(entry.barrier is not None or entry.cancel is not None for entry in unread)
    within_bound(table.channel, sum(bool(e.files) for e in unread), marked, capacity.entries)


def is_held_back(storage: Storage, paths: Paths, positions: Sequence[Position], parts: Parts) -> bool:
    """Say whether a stage reads nothing but its feedback edge, since that is full."""
    if not parts.capacity.bounded:
        return False
    for own in positions:
        if own.feedback:
            loads = (
                parts.load(e) for e in storage.tables[own.channel].after(own.version, paths[own.channel])
            )
            if credit.holds_back([load for load in loads if load], own.version, parts.capacity):
                return True
    return False
