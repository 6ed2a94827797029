"""Which outputs of a stage, channels and Delta sinks, hold a batch, and the metadata of its commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from spark_abs.channels.channel_log import ChannelLog
from spark_abs.channels.entries import EntryMetadata
from spark_abs.model import NO_BATCH, AttemptId, BatchId, SinkWriter, StageId, app_id, channel_id
from spark_abs.sinks.delta.commit_metadata import SinkMetadata
from spark_abs.sinks.delta.sink_log import SinkLog
from spark_abs.store.root import Root
from spark_abs.store.table import Table


class Output(Protocol):
    """An output of a stage in which an attempt's batches can be looked up, as of the version last read."""

    def last_batch(self) -> BatchId:
        """Return the newest batch that was committed, `NO_BATCH` if none was."""

    def note_of_batch(self, batch: BatchId) -> EntryMetadata | SinkMetadata | None:
        """Return what the commit of a batch says, None if there is none: a batch without rows may lack it."""


@dataclass(frozen=True, slots=True)
class Held:
    """The newest batch of a stage: the outputs that hold it, and the metadata of its commits."""

    batch: BatchId
    """`NO_BATCH` if none holds any."""
    last: Mapping[str, BatchId]
    """The newest batch of each output."""
    notes: tuple[EntryMetadata | SinkMetadata, ...]
    """The metadata of the batch's commits, in the order of the outputs: the first commit names the files."""

    @property
    def named(self) -> EntryMetadata | SinkMetadata | None:
        """The commit that names the files of all outputs, the first one; earlier versions named none."""
        return next((note for note in self.notes if note.evaluated), None)

    def lacks(self, output: str) -> bool:
        """Say whether an output lacks the batch; one that is not known does."""
        return self.last.get(output, NO_BATCH) < self.batch


def held(outputs: Mapping[str, Output]) -> Held:
    """Look at the outputs of a stage, as of the versions last read."""
    last = {name: output.last_batch() for name, output in outputs.items()}
    batch = max(last.values(), default=NO_BATCH)
    holding = [outputs[name] for name in outputs if last[name] == batch and batch != NO_BATCH]
    notes = (output.note_of_batch(batch) for output in holding)
    return Held(batch, last, tuple(note for note in notes if note is not None))


class StageLogs:
    """The logs of the outputs of a stage, opened to be looked at when no query of the stage runs."""

    def __init__(
        self,
        root: Root,
        job: str,
        attempt: AttemptId,
        writer: Callable[[StageId, str], SinkWriter],
    ) -> None:
        """Take what tells an attempt's batches from those of others.

        Args:
            root: the job's root.
            job: its name.
            attempt: the attempt.
            writer: as whom it commits to the sink of a stage.
        """
        self._root, self._job, self._attempt, self._writer = root, job, attempt, writer

    def channel(self, stage: StageId, output: str) -> ChannelLog | None:
        """Open the log of a channel, None if there is no such channel yet."""
        with suppress(FileNotFoundError):
            table = Table.open(self._root.place(self._root.channel(channel_id(stage, output))))
            return ChannelLog(table, app_id(self._job, stage, output, self._attempt), self._attempt)
        return None

    def sink(self, stage: StageId, sink: str, uri: str) -> SinkLog | None:
        """Open the log of a Delta sink, None if there is no such table yet."""
        with suppress(FileNotFoundError):
            return SinkLog(Table.open(self._root.storage.place(uri)), self._writer(stage, sink))
        return None

    def of(
        self, stage: StageId, channels: Iterable[str], sinks: Mapping[str, str]
    ) -> Iterator[ChannelLog | SinkLog | None]:
        """Open the log of each output, channels first; None for one that is not there yet."""
        yield from (self.channel(stage, output) for output in channels)
        yield from (self.sink(stage, sink, uri) for sink, uri in sinks.items())
