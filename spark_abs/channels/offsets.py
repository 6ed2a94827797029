"""The positions of a stage's gates, from the offset files of its query."""

from __future__ import annotations

from collections.abc import Iterator

from pyarrow import fs

from spark_abs.channels.follow import Clock
from spark_abs.errors import DamageError
from spark_abs.model import Position, positions_of
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
                text = stream.read().decode()
        except FileNotFoundError:
            return False
        self._positions = positions_of(offset_lines(text, f"{self._directory}/{batch}"))
        return True

    def _listed(self) -> Iterator[int]:
        for info in self._fs.get_file_info(fs.FileSelector(self._directory, allow_not_found=True)):
            if info.base_name.isdigit():
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
