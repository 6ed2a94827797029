"""Which checkpoints, entries and packs stay and which go. Pure, over manifests, packs and positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from spark_abs.keep import Keep
from spark_abs.manifest import Manifest
from spark_abs.model import ChannelId, CheckpointId, CheckpointKind, Version
from spark_abs.snapshots.packs import Packed


class Completed(Protocol):
    """A completed checkpoint: its manifest or its summary."""

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's id."""

    @property
    def kind(self) -> CheckpointKind:
        """Whether it is a checkpoint or a savepoint."""

    @property
    def acked_ms(self) -> int:
        """When its cut was made."""


C = TypeVar("C", bound=Completed)


def retired(
    completed: Iterable[C],
    keep: Keep,
    now_ms: int,
    *,
    on_path: Callable[[C], bool],
    needed: Collection[CheckpointId] = (),
) -> tuple[CheckpointId, ...]:
    """Choose the checkpoints whose manifests may be deleted, by id.

    The newest `keep.newest` checkpoints of the current path are kept, and all checkpoints that are newer
    than the oldest of them. So a restore can be undone: checkpoints that it abandoned stay until the new path
    has as many. Of older ones those stay that the words of `keep` choose, of the path and of what was
    abandoned; of the path also those that were the newest for long, since an idle job makes none. Savepoints
    are always kept (P21) and do not count.

    Args:
        completed: all completed checkpoints.
        keep: how many periodic checkpoints of the path stay, and for how long older ones.
        now_ms: the time.
        on_path: whether a checkpoint lies on the current path of the attempt tree.
        needed: ids that stay in any case, such as the target of an unfinished restore.
    """
    periodic = sorted((c for c in completed if not c.kind.owned_by_user), key=lambda c: c.id)
    path = {c.id: c.acked_ms for c in periodic if on_path(c)}
    since = newest_since(periodic, keep, on_path)
    abandoned = {c.id: c.acked_ms for c in periodic if c.id not in path}
    of_path = keep.chosen(path, now_ms) | keep.stood(path, now_ms)
    stay = of_path | keep.chosen(abandoned, now_ms) | set(needed)
    return tuple(c.id for c in periodic if c.id < since and c.id not in stay)


def newest_since(completed: Iterable[C], keep: Keep, on_path: Callable[[C], bool]) -> CheckpointId:
    """Return the oldest of the newest checkpoints of the path; 0 as long as they are fewer than `keep` says.

    From it on every checkpoint stays. Of older ones only their cuts stay.
    """
    path = (c.id for c in completed if not c.kind.owned_by_user and on_path(c))
    newest = sorted(path, reverse=True)[: keep.newest]
    return newest[-1] if len(newest) == keep.newest else CheckpointId(0)


def channel_floors(
    manifests: Iterable[Manifest], readers: Mapping[ChannelId, Iterable[Version | None]]
) -> dict[ChannelId, Version]:
    """Say up to which entry each channel may be trimmed: all cuts and readers are past the entries before it.

    The entry itself is kept: it is the last one that the slowest of them has read. The result has no channel
    of which a consumer has read nothing, now or in a retained checkpoint, and no channel without a manifest.

    Args:
        manifests: every retained manifest, of abandoned attempts too.
        readers: for each channel of the running job the last entry that each consumer has durably consumed,
            None for nothing yet; empty for a channel without consumers.
    """
    floors: dict[ChannelId, Version] = {}
    unread = {channel for channel, versions in readers.items() if None in versions}
    for manifest in manifests:
        for channel, version in manifest.channel_cuts().items():
            _lower(floors, channel, version)
        for stage in manifest.stages:
            for position in stage.positions:
                _lower(floors, position.channel, position.version)
        for shape in manifest.graph:
            snapshot = manifest.stage(shape.stage)
            read = {p.channel for p in snapshot.positions} if snapshot else set()
            unread.update(ChannelId(channel) for channel in shape.inputs if channel not in read)
    for channel, versions in readers.items():
        if channel in floors:
            floors[channel] = min([floors[channel], *(v for v in versions if v is not None)])
    return {c: floor for c, floor in floors.items() if c in readers and c not in unread}


@dataclass(frozen=True, slots=True)
class Needed:
    """What of a channel may still be read."""

    floor: Version
    """The first entry that stays in the log, from `channel_floors`."""
    rows: Version
    """The first entry with rows that may be read."""
    in_flight: tuple[tuple[Version, Version], ...] = ()
    """Rows of earlier entries: those after the first version of a pair, up to the second."""


def needed_of_channels(
    manifests: Collection[Manifest],
    readers: Mapping[ChannelId, Collection[Version | None]],
    since: CheckpointId,
) -> dict[ChannelId, Needed]:
    """Say which entries of each channel, and which of their rows, may still be read.

    A restore goes on from a cut: of a channel it reads the rows that were in flight, up to the barrier. Rows
    after the barrier no longer count then: their producer writes them again. So an old checkpoint needs its
    rows in flight, of which an aligned one has none, and of later entries the log alone, which is read past.
    From `since` on a checkpoint may need all later rows: a stage that is rebuilt repeats the batches since.

    Args:
        manifests: as for `channel_floors`, and so is the result: it has the same channels.
        readers: as for `channel_floors`.
        since: from `newest_since`.
    """
    floors = channel_floors(manifests, readers)
    rows = floors | channel_floors([m for m in manifests if m.id >= since], readers)
    in_flight: dict[ChannelId, set[tuple[Version, Version]]] = {channel: set() for channel in floors}
    for manifest in manifests:
        cuts = manifest.channel_cuts()
        for position in (p for stage in manifest.stages for p in stage.positions if manifest.id < since):
            channel, version = position.channel, position.version
            if channel in floors and version < (until := cuts.get(channel, rows[channel])):
                in_flight[channel].add((version, until))
    return {c: Needed(floor, rows[c], tuple(sorted(in_flight[c]))) for c, floor in floors.items()}


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The plan of a sweep: which packs of `state/` stay, move or go."""

    dead: tuple[str, ...]
    """Packs without live bytes."""
    rewrite: tuple[str, ...]
    """Packs of which less than half is live: the live part moves to a merged pack."""
    moved: Mapping[str, Packed]
    """The live files of the rewritten packs, by hash."""

    @property
    def removed(self) -> tuple[str, ...]:
        """All packs that are removed."""
        return (*self.dead, *self.rewrite)


def plan_sweep(packs: Mapping[str, Mapping[str, Packed]], live: Collection[tuple[str, str]]) -> SweepPlan:
    """Choose the packs to remove and the packs to rewrite.

    Args:
        packs: the files of each active pack, by hash.
        live: hash and pack of each file that a retained manifest or an open capture names.
    """
    dead, rewrite = [], []
    moved: dict[str, Packed] = {}
    for pack, inside in sorted(packs.items()):
        live_files = {sha256: packed for sha256, packed in inside.items() if (sha256, pack) in live}
        if not live_files:
            dead.append(pack)
        elif 2 * sum(p.size for p in live_files.values()) < sum(p.size for p in inside.values()):
            rewrite.append(pack)
            moved |= live_files
    return SweepPlan(tuple(dead), tuple(rewrite), moved)


def _lower(floors: dict[ChannelId, Version], channel: ChannelId, version: Version) -> None:
    floors[channel] = min(version, floors.get(channel, version))
