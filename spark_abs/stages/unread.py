"""What the stages of a run have not read of its channels, counted for operators."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from spark_abs.channels.entries import entry_of
from spark_abs.channels.follow import LogTail
from spark_abs.errors import AbsError
from spark_abs.model import ChannelId, Entry, Position, Version, counts
from spark_abs.protocol.path import channel_path
from spark_abs.run_context import RunContext
from spark_abs.store.activity import Backlog
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.log import versions_in

log = logging.getLogger(__name__)

MOST_READ = 256
"""The most entries of a channel that are opened, once, of what earlier runs have left unread."""
MOST_KEPT = 4096
"""The most entries of a channel that are counted."""


@dataclass(frozen=True, slots=True)
class _Written:
    version: Version
    rows: int
    size: int
    at_ms: int


class _Counted:
    """The entries with rows of one channel."""

    def __init__(self) -> None:
        self.entries: deque[_Written] = deque(maxlen=MOST_KEPT)
        self.since: Version | None = None
        """The entry after which all were read, None if the log was not read yet."""
        self.lost = Version(-1)
        """An entry up to which some are not counted."""

    def add(self, written: _Written) -> None:
        if len(self.entries) == MOST_KEPT:
            self.lost = self.entries[0].version
        self.entries.append(written)


class Unread:
    """Counts the entries of all channels of a run. Thread-safe.

    The batch threads report what they commit, which costs no reading. What was in a channel before is read
    once, up to a limit: for the first reader, and then for one that is further behind.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._lock = threading.Lock()
        self._channels: dict[ChannelId, _Counted] = {}

    def wrote(self, entries: Mapping[ChannelId, Entry]) -> None:
        """Count the entries of a batch; those of a repeated batch change nothing."""
        now = now_ms()
        with self._lock:
            for channel, entry in entries.items():
                counted = self._channels.setdefault(channel, _Counted())
                last = counted.entries[-1].version if counted.entries else Version(-1)
                if entry.files and entry.version > last:
                    counted.add(_Written(entry.version, entry.rows, entry.size, now))

    def has_rows(self, channel: ChannelId, after: Version, until: Version) -> bool:
        """Say whether counted entries with rows lie between two entries: barriers move a position, too."""
        with self._lock:
            counted = self._channels.get(channel)
            return counted is not None and any(after < one.version <= until for one in counted.entries)

    def after(self, position: Position, moved_ms: int | None = None) -> Backlog:
        """Return what a stage at a position has not read; what cannot be read of a log is left out."""
        with self._lock:
            counted = self._channels.setdefault(position.channel, _Counted())
            since = counted.since
        if since is None or position.version < since:
            self._read_earlier(position, counted)
        with self._lock:
            unread = [written for written in counted.entries if written.version > position.version]
            more = position.version < counted.lost
        return Backlog(
            position.channel,
            entries=len(unread),
            rows=sum(written.rows for written in unread),
            size=sum(written.size for written in unread),
            oldest_ms=min((written.at_ms for written in unread), default=None),
            more=more,
            moved_ms=moved_ms,
        )

    def _read_earlier(self, position: Position, counted: _Counted) -> None:
        found: list[_Written] = []
        lost = position.version
        try:
            found, lost = self._earlier(position)
        except (AbsError, OSError) as error:
            log.debug("channel %s could not be counted: %s", position.channel, error)
        with self._lock:
            newer, counted.entries = tuple(counted.entries), deque(found, maxlen=MOST_KEPT)
            last = found[-1].version if found else position.version
            for written in newer:
                if written.version > last:
                    counted.add(written)
            counted.since = position.version
            counted.lost = max(counted.lost, lost)

    def _earlier(self, position: Position) -> tuple[list[_Written], Version]:
        """Return entries after a position, and an entry up to which some are missing among them."""
        root = self._ctx.root
        path = channel_path(Control.open(root).state, position.channel)
        table = root.path(root.channel(position.channel))
        tail = LogTail(root.fs, table, position.version)
        found: list[_Written] = []
        for _ in range(MOST_READ):
            commit = tail.next()
            if commit is None:
                return found, position.version
            entry = entry_of(commit)
            if entry.files and counts(path, entry.attempt, entry.version):
                found.append(_Written(entry.version, entry.rows, entry.size, commit.at_ms or now_ms()))
        newest = max(versions_in(root.fs, table), default=tail.version)
        return found, newest if newest > tail.version else position.version
