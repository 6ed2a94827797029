"""The credit of one running stage: a running count of the unread entries in its channels (P19)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping

from spark_abs.channels.follow import follow
from spark_abs.model import ChannelId, Entry, Version
from spark_abs.protocol.credit import Capacity, Load, grants, load_of, loads_of, slowest, unread
from spark_abs.protocol.path import channel_path
from spark_abs.run_context import RunContext
from spark_abs.stages.consumers import Consumers
from spark_abs.store.control import Control


class Credit:
    """The batch thread of a stage asks for credit before each batch and reports its commits.

    The channels are read once, before the first batch; then the stage's own commits are counted, since no
    others write. Consumers are polled only when a channel seems full, and no more often than `poll_ms`.
    """

    def __init__(
        self,
        ctx: RunContext,
        channels: Iterable[ChannelId],
        consumers: Consumers,
        start: Version,
        poll_ms: int,
    ) -> None:
        """Take the run.

        Args:
            ctx: the run.
            channels: the stage's channels that are bounded.
            consumers: their consumers.
            start: the position of a consumer that has not begun.
            poll_ms: least time between looks at the consumers.
        """
        self._ctx = ctx
        settings = ctx.settings
        self._capacity = Capacity(settings.capacity_entries, settings.capacity_bytes)
        self._channels = tuple(channels) if self._capacity.bounded else ()
        self._consumers = consumers
        self._start = start
        self._poll_s = poll_ms / 1000
        self._next_poll = float("-inf")
        self._loads: dict[ChannelId, deque[Load]] = {}
        self._lock = threading.Lock()
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._full: tuple[ChannelId, ...] = ()

    @property
    def waited_ms(self) -> int:
        """How long the stage has waited for credit since it began, a wait under way included. Any thread."""
        with self._lock:
            since = self._waiting_since
            now = 0.0 if since is None else time.monotonic() - since
            return int((self._waited_s + now) * 1000)

    @property
    def waiting(self) -> tuple[ChannelId, ...]:
        """The channels without credit for which the stage waits now. Any thread."""
        return self._full

    def full(self) -> tuple[ChannelId, ...]:
        """Return the channels that take no other batch now.

        Raises:
            DamageError: a channel or a consumer's offsets cannot be read.
        """
        if not self._loads:
            self._prime()
        full = self._find_full()
        return self._find_full() if full and self._look() else full

    def waits_for(self, channels: tuple[ChannelId, ...]) -> None:
        """Record the channels that the stage waits for, none if it does not wait. The time is counted."""
        with self._lock:
            self._full, now = channels, time.monotonic()
            if channels and self._waiting_since is None:
                self._waiting_since = now
            if not channels and self._waiting_since is not None:
                self._waited_s += now - self._waiting_since
                self._waiting_since = None

    def wrote(self, entries: Mapping[ChannelId, Entry]) -> None:
        """Count a batch that the channels hold; a batch that was counted before changes nothing."""
        for channel, loads in self._loads.items():
            load = load_of(entries[channel])
            if load is not None and (not loads or load.version > loads[-1].version):
                loads.append(load)

    def _find_full(self) -> tuple[ChannelId, ...]:
        """Return the channels that take no batch, as of the last look at consumers."""
        found = {channel: unread(loads, [self._start]) for channel, loads in self._loads.items()}
        return tuple(channel for channel, now in found.items() if not grants(now, self._capacity))

    def _look(self) -> bool:
        """Poll the consumers and drop consumed entries; say whether the poll was due."""
        now = time.monotonic()
        if now < self._next_poll:
            return False
        self._next_poll = now + self._poll_s
        for channel, loads in self._loads.items():
            behind = self._consumed(channel)
            while loads and loads[0].version <= behind:
                loads.popleft()
        return True

    def _prime(self) -> None:
        state = Control.open(self._ctx.root).state if self._channels else None
        for channel in self._channels:
            assert state is not None
            follower = follow(self._ctx.root, channel, channel_path(state, channel))
            self._loads[channel] = deque(loads_of(follower.after(self._consumed(channel))))

    def _consumed(self, channel: ChannelId) -> Version:
        found = slowest(self._start if v is None else v for v in self._consumers.consumed(channel))
        assert found is not None
        return found
