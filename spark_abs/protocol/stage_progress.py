"""The position of a stage that has run, decided from its logs, its outputs and its channels.

`compatibility.recorded` and the simulator supply the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    ChannelId,
    Entry,
    Position,
    StageId,
    Version,
)
from spark_abs.protocol.changes import FIRST_ENTRY, UnderWay, first_position


def under_way(finished: BatchId, planned: BatchId, held: Sequence[BatchId]) -> UnderWay:
    """Return how far the batch after the last finished batch was written.

    Args:
        finished: the last batch whose end is recorded.
        planned: the last batch that is planned.
        held: the newest batch that each output holds, `NO_BATCH` if it holds none.
    """
    if planned <= finished:
        return UnderWay.NOTHING
    have = [batch >= planned for batch in held]
    if not any(have):
        return UnderWay.PLANNED
    return UnderWay.WRITTEN if all(have) else UnderWay.TORN


def sources_after(finished: BatchId, planned: BatchId, way: UnderWay) -> tuple[BatchId, bool]:
    """Return the batch whose offset file names the sources, and whether its positions have been reached.

    They have not if that batch has yet to run: the sources are then at the stage's first positions.
    """
    if way.decided:
        return planned, True
    return (finished, True) if finished != NO_BATCH else (planned, False)


def begins_at(
    stage: StageId,
    channel: ChannelId,
    recorded: Mapping[tuple[StageId, ChannelId], Position],
    at_cut: Iterable[Position],
    feedback: bool = False,
) -> Position:
    """Return where a stage without a finished batch begins in a channel of its earlier declaration.

    Args:
        stage: the stage.
        channel: the channel.
        recorded: the first positions that the attempt has recorded.
        at_cut: the stage's position in the restored checkpoint, if it had run no batch there.
        feedback: whether the channel closes a loop.
    """
    first = recorded.get((stage, channel))
    if first is not None:
        return first
    return next((p for p in at_cut if p.channel == channel), first_position(channel, feedback))


def current_cut(
    newest_first: Iterable[Entry | None], end: Version, ended: BatchId, attempt: AttemptId
) -> Version:
    """Return the entry after which a new stage begins: the last entry of the producer's finished batches.

    An unfinished batch of the producer may be in only some of its channels: the new stage reads it in all.

    Args:
        newest_first: the entries of the channel from `end` downwards; None for a removed entry.
        end: its newest version.
        ended: the last batch of the producer that all its outputs hold.
        attempt: the current attempt.
    """
    cut = end
    for entry in newest_first:
        if entry is None or entry.attempt not in (AttemptId(0), attempt):
            break
        if entry.batch > ended:
            cut = Version(entry.version - 1)
        elif entry.batch != NO_BATCH:
            break
    return cut


def whole_after(newest_first: Iterable[Entry], end: Version, ended: BatchId) -> Version:
    """Return the least entry after which a channel has the rows of every batch of its producer.

    An output without readers is not written: its channel then has a gap in the batch numbers.

    Args:
        newest_first: the valid entries of the channel from `end` downwards, as far as they are retained.
        end: its newest version.
        ended: the last batch of the producer that all its outputs hold.
    """
    found, expected = end, ended
    for entry in newest_first:
        if entry.batch == NO_BATCH or entry.batch > ended:
            continue
        if entry.batch < expected:
            return found
        found, expected = Version(entry.version - 1), BatchId(entry.batch - 1)
    return FIRST_ENTRY
