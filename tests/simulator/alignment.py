"""One stage and the logs that it reads, without anything else: the gate rule and the cut rule by hand."""

from __future__ import annotations

from collections.abc import Sequence

from spark_abs.alignment import align, marker
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    Barrier,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    DataFile,
    Entry,
    Position,
    RunId,
    Version,
)

ROOMY = align.Limits(max_entries=1_000, max_bytes=1_000_000)


def barrier(number: int, mode: CheckpointMode = CheckpointMode.ALIGNED) -> Barrier:
    """Return the barrier of a plain checkpoint."""
    return Barrier(CheckpointId(number), CheckpointKind.CHECKPOINT, timestamp_ms=0, mode=mode)


class Alignment:
    """A stage that reads channels, each a list; name a channel twice for a self-join.

    `write` adds to a channel, `batch` lets all gates decide and plans a micro-batch if anything moves.
    """

    def __init__(
        self,
        *inputs: str,
        run: int = 1,
        floor: int = 0,
        mode: CheckpointMode = CheckpointMode.ALIGNED,
    ) -> None:
        self.run = RunId(run)
        self.mode = mode
        """Of the barriers that are written."""
        self.floor = CheckpointId(floor)
        self.aborted: set[CheckpointId] = set()
        self.overtaken: set[CheckpointId] = set()
        self.logs: dict[str, list[Entry]] = {name: [] for name in inputs}
        start = (Position(ChannelId(name), AttemptId(1), Version(0), NO_EPOCH) for name in inputs)
        self.positions: tuple[Position, ...] = tuple(start)
        self.emitted: list[marker.Emission] = []

    def write(
        self,
        channel: str,
        rows: int = 0,
        marker: int | None = None,
        cancel: int | None = None,
        end: bool = False,
        run: int | None = None,
    ) -> None:
        """Append an entry; without anything in it, it is a silent one."""
        log = self.logs[channel]
        log.append(
            Entry(
                Version(len(log) + 1),
                AttemptId(1),
                RunId(run) if run is not None else self.run,
                barrier=barrier(marker, self.mode) if marker is not None else None,
                cancel=CheckpointId(cancel) if cancel is not None else None,
                end=end,
                files=(DataFile("part.parquet", rows * 10, rows),) if rows else (),
            )
        )

    def decide(self, number: int, limits: align.Limits = ROOMY) -> align.Decision:
        """Return what one gate decides now; nothing is changed by it."""
        own = self.positions[number]
        unread = iter(self.logs[own.channel][own.version :])
        settled = align.Settled(self.floor, frozenset(self.aborted), frozenset(self.overtaken))
        return align.decide(
            own,
            self.positions,
            unread,
            settled=settled,
            limits=limits,
            run=self.run,
            attempt=AttemptId(1),
        )

    def batch(self, limits: align.Limits = ROOMY) -> marker.Emission | None:
        """Plan and run one micro-batch; return what its outputs get, None if nothing moved."""
        decisions = [self.decide(number, limits) for number in range(len(self.positions))]
        after = tuple(decision.position for decision in decisions)
        if after == self.positions:
            return None
        found = marker.emission(self.positions, after, self.run)
        self.positions = after
        self.emitted.append(found)
        return found

    def drain(self, limits: align.Limits = ROOMY) -> list[marker.Emission]:
        """Run micro-batches until nothing moves; return what they gave, without those that gave nothing."""
        found = []
        while (emission := self.batch(limits)) is not None:
            if emission != marker.Nothing():
                found.append(emission)
        return found

    def waiting(self) -> dict[int, CheckpointId]:
        """Return the inputs that are blocked, and at which barrier."""
        decisions = (self.decide(number) for number in range(len(self.positions)))
        return {n: d.on for n, d in enumerate(decisions) if isinstance(d, align.Blocked)}

    def unread(self, number: int) -> Sequence[Entry]:
        """Return what lies after an input's position."""
        own = self.positions[number]
        return self.logs[own.channel][own.version :]
