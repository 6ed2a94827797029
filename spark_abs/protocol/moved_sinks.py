"""Sinks that move to another stage, and the rows that only one of the two stages has read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.manifest import CHANNEL, StageShape
from spark_abs.model import ChannelId, Position, StageId, producer
from spark_abs.protocol.changes import Recorded, StageChange, StageProgress, Verdict

_REASON = (
    "sink {} belonged to stage {!r}, and only one of the two stages has read {} entries of channel {}: "
    "their rows would be {}; start the job as it was and stop it with a savepoint, after which no row is "
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
    """Iterate the other stages that wrote a table and write it no more."""
    before = recorded.shape(shape.stage)
    if before is not None and table in before.tables.values():
        return
    for old in recorded.shapes:
        wrote = old.stage != shape.stage and table in old.tables.values()
        if wrote and (old.stage not in now or table not in now[old.stage].tables.values()):
            yield old.stage


@dataclass(frozen=True, slots=True)
class _Ways:
    """The ways of rows through a job: as it is declared, and for stages that are left out as it was."""

    recorded: Recorded
    reads: Mapping[StageId, Collection[ChannelId]]
    changes: Mapping[StageId, StageChange]

    def apart(self, old: StageId, new: StageId) -> Iterator[tuple[ChannelId, int, str]]:
        """Iterate what has come to only one of two stages: channel, entries, what becomes of their rows."""
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
        """Count the entries that have not come to a reader, but not those that none of the others has."""
        unread = self.recorded.unread
        ahead = [unread(p) for other in others for p in self._stands(other, channel)]
        mine = [unread(p) for p in self._stands(reader, channel)]
        return max(0, max(mine, default=0) - min(ahead, default=0))

    def _above(self, stage: StageId) -> set[StageId]:
        """Return a stage and all whose rows come to it."""
        found, waiting = {stage}, [stage]
        while waiting:
            new = {producer(c) for c in self.reads.get(waiting.pop(), ())} - found
            found |= new
            waiting += new
        return found

    def _stands(self, stage: StageId, channel: ChannelId) -> list[Position]:
        """Return where a stage goes on, or begins, to read a channel; where it stood if it is left out."""
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
