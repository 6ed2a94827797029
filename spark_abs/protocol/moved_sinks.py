"""Sinks that move to another stage, and the rows that only one of the two stages has read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.manifest import CHANNEL, StageShape
from spark_abs.model import ChannelId, Position, StageId, producer
from spark_abs.protocol.changes import Recorded, StageChange, StageProgress, Verdict

_REASON = (
    "sink {} moves from stage {!r}, but only one of the two stages has read {} entries of channel {}: the "
    "rows of these entries would be {}; start the unchanged job and stop it with a savepoint, so that no row "
    "stays unread, then move the sink"
)
_TWICE, _MISSING = "in the table twice", "missing from the table"


def moved_sinks(
    recorded: Recorded, declared: Sequence[StageShape], changes: Sequence[StageChange]
) -> Iterator[tuple[StageId, str]]:
    """Iterate the stages that may not take over the table of another stage's sink, and why.

    Rows that the old stage has written and the new stage has not read would be in the table twice. Rows that
    the new stage has read and the old stage has not written would be missing.

    Args:
        recorded: the job as recorded in the root.
        declared: the declared stages.
        changes: the effect of the start on each stage.
    """
    now = {shape.stage: shape for shape in declared}
    known = {shape.stage: shape for shape in recorded.shapes} | now
    reads = {
        stage: frozenset(ChannelId(s.name) for s in shape.sources if s.kind == CHANNEL and not s.feedback)
        for stage, shape in known.items()
    }
    ways = _Ways(recorded, reads, {change.stage: change for change in changes})
    for shape in declared:
        for sink, table in shape.tables.items():
            for old in _moved_from(recorded, now, shape, table):
                for channel, entries, times in ways.apart(old, shape.stage):
                    yield shape.stage, _REASON.format(sink, old, entries, channel, times)


def _moved_from(
    recorded: Recorded, now: Mapping[StageId, StageShape], shape: StageShape, table: str
) -> Iterator[StageId]:
    """Iterate the other stages that wrote a table and no longer do."""
    before = recorded.shape(shape.stage)
    if before is not None and table in before.tables.values():
        return
    for old in recorded.shapes:
        wrote = old.stage != shape.stage and table in old.tables.values()
        if wrote and (old.stage not in now or table not in now[old.stage].tables.values()):
            yield old.stage


@dataclass(frozen=True, slots=True)
class _Ways:
    """The paths of rows through the declared job; removed stages keep their recorded inputs."""

    recorded: Recorded
    reads: Mapping[StageId, Collection[ChannelId]]
    changes: Mapping[StageId, StageChange]

    def apart(self, old: StageId, new: StageId) -> Iterator[tuple[ChannelId, int, str]]:
        """Iterate the channels that only one of two stages has read: channel, entries, effect on the rows."""
        above = {stage: self._above(stage) for stage in (old, new)}
        common = above[old] & above[new]
        for stage, other, times in ((new, old, _TWICE), (old, new, _MISSING)):
            if stage in above[other]:
                continue
            if other in above[stage]:  # one after the other
                begin = {s for s in above[stage] if other in self._above(s)}
                readers = begin - {other}
            else:  # beside each other
                readers, begin = above[stage] - common, above[stage]
            for reader in sorted(readers):
                for channel in sorted(self.reads[reader]):
                    if producer(channel) in begin and (
                        entries := self._behind(reader, channel, above[other] - common)
                    ):
                        yield channel, entries, times

    def _behind(self, reader: StageId, channel: ChannelId, others: Collection[StageId]) -> int:
        """Count the entries that a reader has not read and another reader has."""
        unread = self.recorded.unread
        ahead = [unread(p) for other in others for p in self._stands(other, channel)]
        mine = [unread(p) for p in self._stands(reader, channel)]
        return max(0, max(mine, default=0) - min(ahead, default=0))

    def _above(self, stage: StageId) -> set[StageId]:
        """Return a stage and all stages before it."""
        found, waiting = {stage}, [stage]
        while waiting:
            new = {producer(c) for c in self.reads.get(waiting.pop(), ())} - found
            found |= new
            waiting += new
        return found

    def _stands(self, stage: StageId, channel: ChannelId) -> list[Position]:
        """Return the position from which a stage will read a channel.

        For a removed stage its last position.
        """
        change = self.changes.get(stage)
        reached = self.recorded.progress.get(stage, StageProgress())
        if change is not None and change.verdict is Verdict.NEW:
            positions: Sequence[Position] = [start.position for start in change.starts]
        elif change is None or change.layout is None:
            positions = reached.positions
        else:
            sources = (reached.sources[s] if isinstance(s, int) else s for s in change.layout.sources)
            positions = [position for position in sources if position is not None]
        return [position for position in positions if position.channel == channel]
