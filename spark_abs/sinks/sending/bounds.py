"""How far a sink outside has read its channel, compared with the checkpoints that are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spark_abs.manifest import Manifest
from spark_abs.model import Branch, ChannelId, CheckpointId, Version, channel_id
from spark_abs.protocol import outside
from spark_abs.protocol.control import ControlState, OutsideSink
from spark_abs.protocol.outside import Mark
from spark_abs.protocol.path import NOTHING, channel_path


@dataclass(frozen=True, slots=True)
class MarkBounds:
    """The bounds of a sink that follow from its mark and the checkpoints that are kept."""

    line: tuple[Branch, ...]
    needed: Version
    """The entry after which the sink may still read."""
    undone: Version
    """The entry after which a restore may undo rows that the sink has committed."""
    asked: tuple[Version, ...]
    """The entries to which a restore may bring the sink back, oldest first."""


def cuts_of(manifests: Iterable[Manifest], channel: ChannelId) -> Iterator[Mark]:
    """Iterate the cuts of checkpoints in a channel; checkpoints without the channel are left out."""
    for manifest in manifests:
        version = manifest.channel_cuts().get(channel)
        if version is not None:
            yield Mark(manifest.cut.attempt, manifest.id, version)


def path_to(state: ControlState, manifest: Manifest, channel: ChannelId) -> tuple[Branch, ...]:
    """Return the path to the cut of a checkpoint; if it lacks the channel, no entry of the channel counts."""
    path = channel_path(state, channel, manifest.cut.attempt)
    version = next((cut.version for cut in cuts_of([manifest], channel)), NOTHING)
    return (*path[:-1], replace(path[-1], until=version))


def bounds_of(
    state: ControlState, channel: ChannelId, mark: Mark, manifests: Iterable[Manifest]
) -> MarkBounds:
    """Return the bounds that a mark sets in the channel."""
    line = outside.line_to(channel_path(state, channel, mark.attempt), mark)
    kept = [path_to(state, manifest, channel) for manifest in manifests]
    needed, undone = outside.needed_from(mark, line, kept), outside.undone_from(line, kept)
    return MarkBounds(line, needed, undone, outside.asked_for(line, kept))


def missed_by(
    state: ControlState, record: OutsideSink, manifests: Iterable[Manifest]
) -> tuple[CheckpointId, ...]:
    """Return checkpoints of the current path with the sink's stage, but without the channel of its output."""
    channel = channel_id(record.stage, record.output)
    return tuple(
        manifest.id
        for manifest in manifests
        if state.on_path(manifest.attempt, manifest.id)
        and manifest.stage(record.stage) is not None
        and not any(cuts_of([manifest], channel))
    )


def away(state: ControlState, channel: ChannelId, manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the newest checkpoint of the current path if it does not have a channel."""
    mine = [manifest for manifest in manifests if state.on_path(manifest.attempt, manifest.id)]
    newest = max(mine, key=lambda manifest: manifest.id, default=None)
    return None if newest is None or any(cuts_of([newest], channel)) else newest
