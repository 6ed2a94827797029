"""Follow a Delta log from a version on: one open per new commit, one failed open when there is none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pyarrow import fs

from spark_abs.channels.entries import entry_of
from spark_abs.errors import DamageError
from spark_abs.model import Branch, ChannelId, Entry, Position, Version, counts
from spark_abs.store.log import LogCommit, log_file, read_commit, versions_in
from spark_abs.store.root import Root

Clock = Callable[[], float]
"""A monotonic clock, in seconds."""

GAP_CHECK_S = 10.0


class LogTail:
    """The commits of one table after a version, each opened once, in order.

    Not thread-safe. Polls the store at most once per `poll_ms` while there is nothing new. A missing commit
    below a newer one is damage. Because that check costs a listing, it is done when the tail first finds
    nothing, and then every ten seconds.
    """

    def __init__(
        self,
        filesystem: fs.FileSystem,
        table_path: str,
        after: Version,
        poll_ms: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fs, self._path, self._clock = filesystem, table_path, clock
        self._poll_s = poll_ms / 1000
        self._next_poll = self._next_check = float("-inf")
        self.version = after
        """The last version read."""

    def next(self) -> LogCommit | None:
        """Return the next commit, None if there is none yet.

        Raises:
            DamageError: the next commit is missing below a newer one, or cannot be read.
        """
        now = self._clock()
        if now < self._next_poll:
            return None
        wanted = Version(self.version + 1)
        commit = read_commit(self._fs, self._path, wanted)
        if commit is None and now >= self._next_check:
            self._next_check = now + GAP_CHECK_S
            # The file may have come between the look and the listing: look again before crying damage.
            if any(v > wanted for v in versions_in(self._fs, self._path)):
                commit = self.require()
        if commit is None:
            self._next_poll = now + self._poll_s
            return None
        self.version = wanted
        return commit

    def require(self) -> LogCommit:
        """Return the next commit, which is known to exist.

        Raises:
            DamageError: the commit is missing.
        """
        wanted = self.version + 1
        commit = read_commit(self._fs, self._path, wanted)
        if commit is None:
            raise DamageError(
                f"commit {wanted} of {self._path} is missing below newer ones: restore a checkpoint"
            )
        self.version = Version(wanted)
        return commit


class Newest:
    """The newest commit of a table, by the presence of its file alone. Not thread-safe."""

    def __init__(self, filesystem: fs.FileSystem, table_path: str) -> None:
        self._fs, self._path = filesystem, table_path
        self._version: int | None = None

    def moved(self) -> bool:
        """Say whether there may be a newer commit than at the last call; true at the first call.

        The first call lists the log, whose older commits may have been cleaned up; a later one asks for the
        next file.
        """
        if self._version is None:
            self._version = max(versions_in(self._fs, self._path), default=-1)
            return True
        before = self._version
        while self._is_there(self._version + 1):
            self._version += 1
        return self._version > before

    def _is_there(self, version: int) -> bool:
        found = self._fs.get_file_info(f"{self._path}/{log_file(version)}")
        return bool(found.type is not fs.FileType.NotFound)


class Queued:
    """How many bytes, uncompressed, wait in a channel after a position. Not thread-safe.

    Every entry is opened once.
    """

    def __init__(self, root: Root, position: Position, poll_ms: int = 0) -> None:
        self._tail = LogTail(root.fs, root.path(root.channel(position.channel)), position.version, poll_ms)
        self._ahead: LogCommit | None = None
        self.size = 0
        """Bytes read so far."""

    def read(self, most: int, until_ms: int | None = None) -> int:
        """Read at most `most` new entries, none written after `until_ms`; return `size`.

        Raises:
            DamageError: a commit is missing below a newer one, or cannot be read.
        """
        for _ in range(most):
            commit = self._ahead or self._tail.next()
            self._ahead = None
            if commit is None:
                break
            if until_ms is not None and commit.at_ms > until_ms:
                self._ahead = commit
                break
            self.size += entry_of(commit).size
        return self.size


class Follower:
    """The entries of a channel that count on one path and are not silent, each commit opened once.

    Entries stay in memory until `forget`, so that another call from the same version, as a blocked or idle
    gate makes every few milliseconds, costs at most one failed open. Silent entries are skipped: they start
    no batch, and the next batch includes them. Not thread-safe.
    """

    def __init__(
        self,
        filesystem: fs.FileSystem,
        table_path: str,
        path: Sequence[Branch],
        poll_ms: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fs, self._table_path, self._path = filesystem, table_path, tuple(path)
        self._poll_ms, self._clock = poll_ms, clock
        self._kept: deque[Entry] = deque()
        self._from = Version(-1)
        self._tail: LogTail | None = None

    def after(self, version: Version) -> Iterator[Entry]:
        """Iterate the entries above `version`, ascending. Reads the log only as far as it is iterated.

        Raises:
            DamageError: a commit is missing below a newer one, or cannot be read.
        """
        tail = self._tail_from(version)
        yield from [entry for entry in self._kept if entry.version > version]
        while (commit := tail.next()) is not None:
            if (entry := self._keep(commit)) is not None:
                yield entry

    def between(self, after: Version, until: Version) -> Iterator[Entry]:
        """Iterate the entries above `after` up to and including `until`, all known to exist.

        Raises:
            DamageError: one is missing or cannot be read.
        """
        tail = self._tail_from(after)
        while tail.version < until:
            self._keep(tail.require())
        yield from [entry for entry in self._kept if after < entry.version <= until]

    def forget(self, until: Version) -> None:
        """Drop the entries up to and including `until`, which are no longer needed."""
        while self._kept and self._kept[0].version <= until:
            self._kept.popleft()
        self._from = Version(max(self._from, until))

    def _tail_from(self, version: Version) -> LogTail:
        if self._tail is None or not self._from <= version <= self._tail.version:
            self._kept.clear()
            self._from = version
            self._tail = LogTail(self._fs, self._table_path, version, self._poll_ms, self._clock)
        return self._tail

    def _keep(self, commit: LogCommit) -> Entry | None:
        entry = entry_of(commit)
        if entry.silent or not counts(self._path, entry.attempt, entry.version):
            return None
        self._kept.append(entry)
        return entry


def follow(
    root: Root, channel: ChannelId, path: Sequence[Branch], poll_ms: int = 0, clock: Clock = time.monotonic
) -> Follower:
    """Return a follower of the entries that count in a channel of a root."""
    return Follower(root.fs, root.path(root.channel(channel)), path, poll_ms, clock)
