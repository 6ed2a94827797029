"""Marks of Iceberg sinks: a property of the table, changed in the commit that adds the rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from spark_abs.codec import from_json
from spark_abs.errors import DamageError
from spark_abs.model import Version
from spark_abs.protocol.outside import Epoch, Mark, Owner

FORMAT = 1
SUMMARY = "spark_abs.sink"
"""In the summary of every snapshot of a sink: its root and name."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The snapshot with which an epoch was committed: a restore goes back to it."""

    version: Version
    """Of the epoch's mark."""
    snapshot: int


@dataclass(frozen=True, slots=True)
class IcebergMark:
    """What the table says of a sink."""

    v: int
    root: str
    sink: str
    run: int
    """The newest run: older ones are refused."""
    mark: Mark | None = None
    kept: tuple[Kept, ...] = ()
    """Of epochs that a restore may undo, oldest first."""

    def with_epoch(self, epoch: Epoch, before: int, after: int) -> IcebergMark:
        """Add an epoch, with the snapshots before and after it; forget what no restore asks for any more."""
        kept = [k for k in self.kept if k.version <= epoch.after.version]
        if epoch.first:
            kept = [Kept(epoch.after.version, before)]
        kept.append(Kept(epoch.mark.version, after))
        needed = max((k.version for k in kept if k.version <= epoch.floor), default=kept[0].version)
        return replace(self, mark=epoch.mark, kept=tuple(k for k in kept if k.version >= needed))

    def snapshot_of(self, back: Mark) -> int | None:
        """Return the snapshot that has all up to a mark and nothing after it, None if it is forgotten."""
        return next((k.snapshot for k in self.kept if k.version == back.version), None)


def property_of(owner: Owner) -> str:
    """Return the name of the property that has the mark of a sink."""
    return f"spark_abs.{hashlib.sha256(f'{owner.root} {owner.sink}'.encode()).hexdigest()[:32]}"


def summary_of(owner: Owner) -> str:
    """Return what the snapshots of a sink say."""
    return f"{owner.root}/{owner.sink}"


def tag_of(epoch: Epoch) -> str:
    """Name the tag on the snapshot of a savepoint: no other sink, and no other root, has the same."""
    return f"spark_abs_{epoch.savepoint}_{epoch.owner.sink}_{epoch.owner.root[:8]}"


def mark_in(metadata: TableMetadata, owner: Owner) -> IcebergMark | None:
    """Read the mark of a sink, None if it has none.

    Raises:
        DamageError: it cannot be read.
    """
    text = metadata.properties.get(property_of(owner))
    if text is None:
        return None
    found = from_json(IcebergMark, text)
    if found.v > FORMAT:
        raise DamageError(f"the mark of sink {owner.sink!r} has format {found.v}, newest known is {FORMAT}")
    if (found.root, found.sink) != (owner.root, owner.sink):
        raise DamageError(f"property {property_of(owner)} is about sink {found.sink!r} of another root")
    return found


def head_of(metadata: TableMetadata, branch: str) -> int | None:
    """Return the newest snapshot of a branch, None if it has none."""
    ref = metadata.refs.get(branch)
    return None if ref is None else ref.snapshot_id


def behind(metadata: TableMetadata, branch: str, until: int) -> Iterator[Snapshot]:
    """Iterate the snapshots of a branch from the newest one back to that after `until`, where kept."""
    at = head_of(metadata, branch)
    while at is not None and at != until:
        snapshot = metadata.snapshot_by_id(at)
        if snapshot is None:
            return
        yield snapshot
        at = snapshot.parent_snapshot_id


def is_within(metadata: TableMetadata, branch: str, snapshot: int) -> bool:
    """Say whether a snapshot is on a branch."""
    found = list(behind(metadata, branch, snapshot))
    last = found[-1].parent_snapshot_id if found else head_of(metadata, branch)
    return last == snapshot
