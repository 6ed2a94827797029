"""Credit in the simulated cluster: what its channels hold, and the bound on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spark_abs.model import AttemptId, Branch, Version
from spark_abs.protocol import credit
from spark_abs.testing.cluster import Storage, Table
from spark_abs.testing.invariants import within_bound
from spark_abs.testing.parts import Parts


def consumed(storage: Storage, attempt: AttemptId, table: Table) -> Iterator[Version]:
    """Yield how far each input that reads a channel has durably read it."""
    for stage in storage.graph:
        if table.channel in stage.inputs:
            durable = storage.native[attempt, stage.id].durable
            yield from (p.version for p in durable.positions if p.channel == table.channel)


def has_room(
    storage: Storage, attempt: AttemptId, table: Table, path: Sequence[Branch], parts: Parts
) -> bool:
    """Say whether a channel takes another batch."""
    behind = parts.slowest(consumed(storage, attempt, table)) if parts.capacity.bounded else None
    if behind is None:
        return True
    loads = (parts.load(entry) for entry in table.after(behind, path))
    return credit.grants(credit.held([load for load in loads if load], [behind]), parts.capacity)


def check_bound(
    storage: Storage, attempt: AttemptId, table: Table, path: Sequence[Branch], capacity: credit.Capacity
) -> None:
    """Check what a channel holds, at the only moments in which it grows."""
    behind = credit.slowest(consumed(storage, attempt, table))
    if capacity.entries is None or behind is None:
        return
    unread = list(table.after(behind, path))
    marked = sum(entry.barrier is not None or entry.cancel is not None for entry in unread)
    within_bound(table.channel, sum(bool(e.files) for e in unread), marked, capacity.entries)
