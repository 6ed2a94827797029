"""Marks of Iceberg sinks: a property of the table, changed in the commit that adds the rows."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from spark_abs.codec import from_json, require_format
from spark_abs.errors import DamageError
from spark_abs.model import Version
from spark_abs.protocol.outside import Epoch, Mark, Owner

FORMAT = 1
SUMMARY = "spark_abs.sink"
"""In the summary of every snapshot of a sink: its root and name."""
CHECKPOINT = "spark_abs.checkpoint"
"""In those summaries, from the first epoch on: the checkpoint up to which the snapshot has all."""
_MARK = re.compile(r"spark_abs\.[0-9a-f]{32}")
"""The property of a table that has the mark of a sink."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The snapshot with which an epoch was committed: a restore goes back to it."""

    version: Version
    """Of the epoch's mark."""
    snapshot: int


@dataclass(frozen=True, slots=True)
class IcebergMark:
    """The property with the mark of a sink."""

    v: int
    root: str
    sink: str
    run: int
    """The newest run: older ones are refused."""
    mark: Mark | None = None
    kept: tuple[Kept, ...] = ()
    """Of epochs that a restore may undo, oldest first."""

    def with_epoch(self, epoch: Epoch, before: int, after: int) -> IcebergMark:
        """Add an epoch, with the snapshots before and after it; forget snapshots that no restore needs."""
        kept = [k for k in self.kept if k.version <= epoch.after.version]
        if epoch.first:
            kept = [Kept(epoch.after.version, before)]
        kept.append(Kept(epoch.mark.version, after))
        needed = max((k.version for k in kept if k.version <= epoch.floor), default=kept[0].version)
        wanted = [
            k for k in kept if k.version == needed or (k.version > needed and epoch.may_return_to(k.version))
        ]
        return replace(self, mark=epoch.mark, kept=tuple(wanted))

    def snapshot_of(self, back: Mark) -> int | None:
        """Return the snapshot that has all up to a mark and nothing after it, None if it is forgotten."""
        return next((k.snapshot for k in self.kept if k.version == back.version), None)


def snapshot_to(metadata: TableMetadata, owner: Owner, known: IcebergMark, back: Mark) -> int | None:
    """Return the snapshot to which the table goes back with a mark, None if it is not known.

    For a mark from before the first epoch of the sink, it is the snapshot before that epoch, if it exists.
    """
    found = known.snapshot_of(back)
    if found is None and known.kept and back.version < known.kept[0].version:
        oldest = known.kept[0].snapshot
        return oldest if _has_nothing(metadata, owner, oldest) else None
    return found


def _has_nothing(metadata: TableMetadata, owner: Owner, snapshot: int | None) -> bool:
    """Say whether a snapshot is from before the first epoch of a sink: after a start, and no epoch."""
    while snapshot is not None and (at := metadata.snapshot_by_id(snapshot)) is not None:
        said = at.summary.additional_properties if at.summary is not None else {}
        if said.get(SUMMARY) == summary_of(owner):
            return CHECKPOINT not in said
        snapshot = at.parent_snapshot_id
    return False


def property_of(owner: Owner) -> str:
    """Return the name of the property that has the mark of a sink."""
    return f"spark_abs.{hashlib.sha256(f'{owner.root} {owner.sink}'.encode()).hexdigest()[:32]}"


def summary_of(owner: Owner) -> str:
    """Return the text by which the snapshots of a sink are known."""
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
    require_format(found.v, FORMAT, f"the mark of sink {owner.sink!r}")
    if (found.root, found.sink) != (owner.root, owner.sink):
        raise DamageError(f"property {property_of(owner)} is about sink {found.sink!r} of another root")
    return found


def head_of(metadata: TableMetadata, branch: str) -> int | None:
    """Return the newest snapshot of a branch, None if it has none."""
    ref = metadata.refs.get(branch)
    return None if ref is None else ref.snapshot_id


def has_marks(metadata: TableMetadata, root: str) -> bool:
    """Say whether a sink of a root has a mark in a table."""
    named = (text for name, text in metadata.properties.items() if _MARK.fullmatch(name))
    return any(from_json(IcebergMark, text).root == root for text in named)


def rows_of(metadata: TableMetadata, branch: str) -> str:
    """Say for a person which rows a branch has, empty if it has none."""
    head = head_of(metadata, branch)
    found = None if head is None else metadata.snapshot_by_id(head)
    if found is None or found.summary is None:
        return "" if found is None else "rows"
    said = found.summary.additional_properties.get("total-records")
    return "" if said == "0" else "rows" if said is None else f"{said} rows"


@dataclass(frozen=True, slots=True)
class Since:
    """What a branch has after one of its snapshots, as far as that is still there."""

    snapshots: tuple[Snapshot, ...]
    """Newest first."""
    whole: bool
    """Whether that is all; else some have expired."""


def since(metadata: TableMetadata, branch: str, target: int) -> Since | None:
    """Return the snapshots of a branch after a target snapshot, None if the target is not on the branch.

    Parents are followed until one has expired. If all of them are newer than the target, and a snapshot in
    between may have expired, the target counts as reached. A branch that was set back has an older snapshot,
    or no snapshot in between has expired.
    """
    found: list[Snapshot] = []
    at = head_of(metadata, branch)
    while at is not None and at != target:
        snapshot = metadata.snapshot_by_id(at)
        if snapshot is None:
            break
        found.append(snapshot)
        at = snapshot.parent_snapshot_id
    if at == target:
        return Since(tuple(found), whole=True)
    sought = metadata.snapshot_by_id(target)
    if sought is None or not found or not _expired_between(metadata, sought, found[-1]):
        return None
    return Since(tuple(found), whole=False)


def _expired_between(metadata: TableMetadata, older: Snapshot, newer: Snapshot) -> bool:
    """Say whether a snapshot between two may have expired; not if they are in the other order.

    Each snapshot of a table has the next sequence number, so a missing number has expired. In a table of
    format 1 all numbers are 0, and only the times tell.
    """
    first, last = older.sequence_number or 0, newer.sequence_number or 0
    if not first:
        return (first, older.timestamp_ms) < (last, newer.timestamp_ms)
    there = sum(first < (snapshot.sequence_number or 0) < last for snapshot in metadata.snapshots)
    return last - first - 1 > there
