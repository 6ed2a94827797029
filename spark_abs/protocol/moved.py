"""Sinks that move to another stage, and the rows that are between the two."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from spark_abs.manifest import CHANNEL, StageShape
from spark_abs.model import ChannelId, Position, StageId, producer
from spark_abs.protocol.changes import Recorded, StageChange, Verdict

_REASON = (
    "sink {} was one of stage {!r}, and {} entries of channel {} between the two are unread: their rows "
    "would be {}; start the job as it was and stop it with a savepoint, after which nothing is "
    "unread, then move the sink"
)
_TWICE, _MISSING = "in the table twice", "missing from the table"


def moved_sinks(
    recorded: Recorded, declared: Sequence[StageShape], changes: Sequence[StageChange]
) -> Iterator[tuple[StageId, str]]:
    """Iterate the stages that may not take over the table of another stage's sink, and why.

    Rows that the one stage has written to the table and that have not come to the other one would be in the
    table twice; rows that the other one has passed on, and that have not come to the first, would be missing.

    Args:
        recorded: the job as the root knows it.
        declared: the stages as they are declared.
        changes: what becomes of them.
    """
    now = {shape.stage: shape for shape in declared}
    found = {change.stage: change for change in changes}
    for shape in declared:
        for sink, table in shape.tables.items():
            for old in _moved_from(recorded, now, shape, table):
                for first, last, times in ((old, shape.stage, _TWICE), (shape.stage, old, _MISSING)):
                    for reader, channel in _between(now, first, last):
                        at = [p for p in _begins(recorded, found[reader]) if p.channel == channel]
                        if unread := max(map(recorded.unread, at), default=0):
                            yield shape.stage, _REASON.format(sink, old, unread, channel, times)


def _moved_from(
    recorded: Recorded, now: Mapping[StageId, StageShape], shape: StageShape, table: str
) -> Iterator[StageId]:
    """Iterate the other stages that wrote a table and, still declared, write it no more."""
    before = recorded.shape(shape.stage)
    if before is not None and table in before.tables.values():
        return
    for old in recorded.shapes:
        wrote = old.stage != shape.stage and table in old.tables.values()
        if wrote and old.stage in now and table not in now[old.stage].tables.values():
            yield old.stage


def _between(
    now: Mapping[StageId, StageShape], first: StageId, last: StageId
) -> Iterator[tuple[StageId, ChannelId]]:
    """Iterate the channels on the ways from one stage to another, each with its reader."""
    reads = {
        stage: {ChannelId(s.name) for s in shape.sources if s.kind == CHANNEL and not s.feedback}
        for stage, shape in now.items()
    }
    behind = _reached({s: [r for r, cs in reads.items() if s in map(producer, cs)] for s in now}, first)
    ahead = _reached({s: [producer(c) for c in cs] for s, cs in reads.items()}, last)
    for reader in (behind - {first}) & ahead:
        yield from ((reader, channel) for channel in reads[reader] if producer(channel) in behind)


def _reached(edges: Mapping[StageId, Collection[StageId]], start: StageId) -> set[StageId]:
    found, waiting = {start}, [start]
    while waiting:
        new = set(edges.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def _begins(recorded: Recorded, change: StageChange) -> Sequence[Position]:
    """Return where a stage goes on, or begins, to read its channels."""
    if change.verdict is Verdict.NEW:
        return [start.position for start in change.starts]
    reached = recorded.progress[change.stage]
    if change.layout is None:
        return reached.positions
    sources = (reached.sources[s] if isinstance(s, int) else s for s in change.layout.sources)
    return [position for position in sources if position is not None]
