"""The facts that a gate reads beside its channel: positions of its stage, aborted and unaligned barriers.

The positions are in the offset files of the stage's query, the barriers in the log of `control/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyarrow import fs

from spark_abs.channels.follow import Clock, LogTail
from spark_abs.codec import decoded, from_json, require_format
from spark_abs.errors import DamageError
from spark_abs.model import FORMAT, CheckpointId, CheckpointMode, Position, Version, is_number, positions_of
from spark_abs.store.log import LogCommit
from spark_abs.store.root import Root
from spark_abs.store.storage import Place


class StageOffsets:
    """All channel positions of the stage, as of the newest file in its `offsets/`.

    The directory is listed until it has a file. Then only the next number is tried, since Spark writes the
    files one by one, and at most once per poll: an old position can only make an input wait longer.
    """

    def __init__(self, native: Place, poll_ms: int, clock: Clock) -> None:
        self._fs, self._directory, self._clock = native.fs, f"{native.path}/offsets", clock
        self._poll_s = poll_ms / 1000
        self._next_poll = float("-inf")
        self.batch: int | None = None
        """The newest batch that was seen to be planned."""
        self._positions: tuple[Position, ...] = ()

    def positions(self, planned: bool = False) -> tuple[Position, ...]:
        """Return the positions, repeats kept; none before the first batch is planned.

        Args:
            planned: whether a first batch is known to be planned, since the asking input has moved. Then its
                file is read at once: without the other inputs' positions, an input at a barrier would read
                on.

        Raises:
            DamageError: an offset file cannot be parsed.
        """
        now = self._clock()
        if now >= self._next_poll or (planned and self.batch is None):
            self._next_poll = now + self._poll_s
            if self.batch is None:
                self.batch = max(self._listed(), default=None)
                if self.batch is not None:
                    self._read(self.batch)
            while self.batch is not None and self._read(self.batch + 1):
                self.batch += 1
        return self._positions

    def _read(self, batch: int) -> bool:
        try:
            with self._fs.open_input_stream(f"{self._directory}/{batch}") as stream:
                text = decoded(stream.read(), f"{self._directory}/{batch}")
        except FileNotFoundError:
            return False
        self._positions = positions_of(offset_lines(text, f"{self._directory}/{batch}"))
        return True

    def _listed(self) -> Iterator[int]:
        for info in self._fs.get_file_info(fs.FileSelector(self._directory, allow_not_found=True)):
            if is_number(info.base_name):
                yield int(info.base_name)


def offset_lines(text: str, where: str) -> list[str]:
    """Return the offsets in a file of Spark's offset log, formats 1 and 2; format 2 has names before them.

    Raises:
        DamageError: the format is unknown.
    """
    version, _, rest = text.partition("\n")
    lines = rest.split("\n")[1:]
    match version:
        case "v1":
            return lines
        case "v2":
            return [line.partition(":")[2] for line in lines]
    raise DamageError(f"{where} has offset log format {version!r}; this version of spark_abs reads v1 and v2")


@dataclass(frozen=True, slots=True)
class _ControlNote:
    """The part of a `control/` commit's metadata that gates look at."""

    v: int
    aborted: tuple[CheckpointId, ...] | None = None
    overtaken: tuple[CheckpointId, ...] | None = None


class Aborts:
    """The ids that `control/` has declared aborted, or unaligned, since the run began.

    Polled only while an input is blocked. The log of `control/` is trimmed far behind its newest commit;
    after so long a pause the table is read once instead.
    """

    def __init__(self, root: Root, after: Version, poll_ms: int, clock: Clock) -> None:
        self._root, self._poll_ms, self._clock = root, poll_ms, clock
        self._tail = LogTail(root.fs, root.path("control"), after, poll_ms, clock)
        self.ids: frozenset[CheckpointId] = frozenset()
        """The ids known as aborted."""
        self.overtaken: frozenset[CheckpointId] = frozenset()
        """The ids known as unaligned."""

    def poll(self) -> bool:
        """Read new commits; say whether they aborted a barrier or made one unaligned.

        Raises:
            DamageError: `control/` cannot be read.
        """
        before = self.ids, self.overtaken
        while (commit := self._next()) is not None:
            if commit.token is None or commit.metadata is None:
                continue
            note = from_json(_ControlNote, commit.metadata)
            require_format(note.v, FORMAT, "control/")
            self.ids |= frozenset(note.aborted or ())
            self.overtaken |= frozenset(note.overtaken or ())
        return (self.ids, self.overtaken) != before

    def _next(self) -> LogCommit | None:
        try:
            return self._tail.next()
        except DamageError:
            # Here, since a gate that never needs it need not load deltalake.
            from spark_abs.store.control import Control

            control = Control.open(self._root)
            at = control.version
            self.ids |= {aborted.id for aborted in control.state.aborted}
            barriers = [claim.barrier for claim in control.state.claims]
            self.overtaken |= {b.id for b in barriers if b.mode is CheckpointMode.UNALIGNED}
            self._tail = LogTail(self._root.fs, self._root.path("control"), at, self._poll_ms, self._clock)
            return self._tail.next()
