"""How far stages have durably read their channels: the basis of clean-up and credit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.model import ChannelId, Position, StageId, Version
from spark_abs.run_context import RunContext
from spark_abs.stages.native import NativeLog


def _nobody(_: ChannelId) -> tuple[Version, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Consumers:
    """The consumers of the channels of a job, asked by their native checkpoints. Any thread."""

    ctx: RunContext
    inputs: Mapping[StageId, Sequence[ChannelId]]
    """The channels that each stage reads."""
    outside: Callable[[ChannelId], tuple[Version, ...]] = _nobody
    """How far each sink outside has read a channel."""

    def consumed(self, channel: ChannelId) -> tuple[Version | None, ...]:
        """Return how far each consumer of a channel has durably read it, None before it has begun.

        That is its position after its last finished batch, or its first position. If a stage reads the
        channel twice, the input that is further behind counts. Costs a listing and a small file for each
        consumer.

        Raises:
            DamageError: an offset file cannot be read.
        """
        stages = tuple(
            min((p.version for p in self._positions(stage, channel)), default=None)
            for stage, channels in self.inputs.items()
            if channel in channels
        )
        return (*stages, *self.outside(channel))

    def _positions(self, stage: StageId, channel: ChannelId) -> list[Position]:
        read = [p for p in NativeLog(self.ctx.native(stage)).consumed() if p.channel == channel]
        begins = self.ctx.starts.get((stage, channel))
        return read or ([begins] if begins is not None else [])
