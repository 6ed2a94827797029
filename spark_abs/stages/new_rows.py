"""Whether a batch reads rows: one that carries only a barrier or an end marker leaves a table as it is."""

from __future__ import annotations

from collections.abc import Mapping

from spark_abs.channels.entries import entry_of
from spark_abs.channels.follow import LogTail
from spark_abs.errors import DamageError
from spark_abs.model import Position, positions_of
from spark_abs.snapshots.layout import OffsetFile
from spark_abs.store.root import Root


def reads_rows(root: Root, before: OffsetFile, planned: OffsetFile) -> bool:
    """Say whether a batch reads, or may read, rows: a native source moved, or a channel has new files.

    Args:
        root: the job's root.
        before: the offsets of the batch before it.
        planned: its own.
    """
    if native_offsets(before) != native_offsets(planned):
        return True
    pairs = zip(positions_of(before.lines), positions_of(planned.lines), strict=True)
    return any(_has_files(root, then, now) for then, now in pairs)


def native_offsets(offsets: OffsetFile) -> Mapping[str, str]:
    """Return the offsets of native sources, by name; channels are left out."""
    return {name: text for name, text in offsets.offsets.items() if not positions_of([text])}


def _has_files(root: Root, then: Position, now: Position) -> bool:
    """Say whether a channel has files between two positions, or may have: of another attempt, or trimmed."""
    if (then.channel, then.attempt) != (now.channel, now.attempt):
        return True
    tail = LogTail(root.fs, root.path(root.channel(then.channel)), then.version)
    try:
        while tail.version < now.version:
            entry = entry_of(tail.require())
            if entry is None or entry.files:
                return True
    except DamageError:
        return True
    return False
