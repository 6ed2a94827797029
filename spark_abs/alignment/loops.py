"""Loops: an output that is also an input of an earlier stage, or of its own (P17).

The edge that closes a loop is its feedback edge, the stage that reads it there the loop's head. A feedback
edge takes no part in alignment, or a head would wait for a barrier that only it can send round: the head cuts
when its other inputs have barrier n. What it has not read of the feedback edge then, up to barrier n in it,
is in flight and part of the checkpoint. The channel's own log holds it: the manifest has the head's position
and the producer's version, between them retention removes nothing, and a restored head reads them first.

Nothing here forbids loops within loops: what holds for a head holds for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_abs.model import ChannelId, Position, RunId, StageId


@dataclass(frozen=True, slots=True)
class Loop:
    """Stages each of which can send rows to each other one, and the channels on which they do."""

    stages: frozenset[StageId]
    channels: frozenset[ChannelId]


@dataclass(frozen=True, slots=True)
class Member:
    """How a stage of a loop stands."""

    idle: bool
    """Whether no batch is planned after its last finished one."""
    positions: tuple[Position, ...]
    """After that batch."""
    unread: frozenset[ChannelId]
    """Channels that hold rows which the stage has not durably consumed."""


def find_loops(edges: Iterable[tuple[StageId, ChannelId, StageId]]) -> tuple[Loop, ...]:
    """Find the loops of a graph; none shares a stage with another, since then they are one.

    Args:
        edges: producer, channel, consumer; feedback edges among them.
    """
    known = list(edges)
    reach = {producer: {producer} for producer, _, _ in known}
    grown = True
    while grown:
        grown = False
        for producer, _, consumer in known:
            further = reach.get(consumer, {consumer}) - reach[producer]
            reach[producer] |= further
            grown = grown or bool(further)
    found: dict[frozenset[StageId], set[ChannelId]] = {}
    for producer, channel, consumer in known:
        if producer in reach.get(consumer, ()):
            around = frozenset(s for s in reach[producer] if producer in reach.get(s, ()))
            found.setdefault(around, set()).add(channel)
    return tuple(Loop(stages, frozenset(channels)) for stages, channels in found.items())


def forward(positions: Sequence[Position]) -> tuple[Position, ...]:
    """Leave out the feedback edges: what alignment, cuts and ends go by."""
    return tuple(position for position in positions if not position.feedback)


def has_ended(loop: Loop, members: Iterable[Member], run: RunId) -> bool:
    """Say whether nothing can come out of a loop any more, so that its head may end (P10).

    All that comes from outside has ended, nothing is under way between the stages, and all of them are idle.
    True only if it was so at one moment: whoever asks lets no batch begin meanwhile.
    """
    return all(
        member.idle
        and not member.unread & loop.channels
        and all(p.is_closed(run) for p in member.positions if p.channel not in loop.channels)
        for member in members
    )
