"""Loops: the output of a stage is an input of an earlier stage, or of the same stage (P17).

The edge that closes a loop is its feedback edge; the stage that reads the feedback edge is the loop's head.
Feedback edges are not aligned, since the head would wait for a barrier that only the head can send round: the
head cuts when its other inputs have barrier n. The rows of the feedback edge that the head has not read at
its cut, up to barrier n, are in flight and part of the checkpoint. The channel's log holds them: the manifest
records the head's position and the producer's version, retention removes nothing between the two, and a
restored head reads these rows first.

Loops may be nested: the rule holds for each head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_abs.model import ChannelId, Position, RunId, StageId


@dataclass(frozen=True, slots=True)
class Loop:
    """Stages that can all send rows to each other, and the channels between them."""

    stages: frozenset[StageId]
    channels: frozenset[ChannelId]


@dataclass(frozen=True, slots=True)
class Member:
    """How far a stage of a loop has read and committed."""

    idle: bool
    """Whether no batch is planned after the last finished batch."""
    positions: tuple[Position, ...]
    """After that batch."""
    unread: frozenset[ChannelId]
    """Channels that hold rows which the stage has not durably consumed."""


def find_loops(edges: Iterable[tuple[StageId, ChannelId, StageId]]) -> tuple[Loop, ...]:
    """Find the loops of a graph. Loops that share a stage are one loop.

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
    """Return the positions without feedback edges: alignment, cuts and ends use only these."""
    return tuple(position for position in positions if not position.feedback)


def has_ended(loop: Loop, members: Iterable[Member], run: RunId) -> bool:
    """Say whether a loop can produce no more rows, so that its head may end (P10).

    True if all inputs from outside the loop have ended, no row is between its stages, and all of them are
    idle at one moment: the caller must let no batch begin meanwhile.
    """
    return all(
        member.idle
        and not member.unread & loop.channels
        and all(p.is_closed(run) for p in member.positions if p.channel not in loop.channels)
        for member in members
    )
