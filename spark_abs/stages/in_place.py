"""The inputs of an idle stage, read as far as it takes to know whether it is at the cut of a barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spark_abs.alignment.in_place import is_at_cut
from spark_abs.channels.follow import follow
from spark_abs.channels.taken import TakenNote
from spark_abs.model import Barrier, Branch, ChannelId, Entry, Position
from spark_abs.run_context import RunContext


class InPlace:
    """Decides for a stage that reads channels alone, each entry opened once. For the coordinator's thread.

    A stage that also has a native source, a loop's head and the stages of a bounded run take their barriers
    with batches.
    """

    def __init__(self, ctx: RunContext, paths: Mapping[ChannelId, Sequence[Branch]], note: TakenNote) -> None:
        poll_ms = ctx.poll_ms(ctx.root.top)
        self._run = ctx.run
        self._followers = {c: follow(ctx.root, c, path, poll_ms) for c, path in paths.items()}
        self.note = note
        """Tells the stage's gates."""

    def is_at_cut(self, barrier: Barrier, positions: Sequence[Position]) -> bool:
        """Say whether the stage, which has finished its last batch at `positions`, is at its cut.

        Raises:
            DamageError: the log of an input cannot be read.
        """
        for channel, follower in self._followers.items():
            follower.forget(min(p.version for p in positions if p.channel == channel))
        return is_at_cut(barrier, positions, self._unread, self._run)

    def _unread(self, position: Position) -> Iterable[Entry]:
        return self._followers[position.channel].after(position.version)
