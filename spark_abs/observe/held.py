"""Which outputs of a stage, channels and Delta sinks, hold a batch, and the metadata of its commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from spark_abs.channels.channel_log import ChannelLog
from spark_abs.channels.entries import EntryMetadata
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    SinkWriter,
    StageId,
    Version,
    app_id,
    channel_id,
)
from spark_abs.sinks.delta.commit_metadata import SinkMetadata
from spark_abs.sinks.delta.sink_log import SinkLog
from spark_abs.store.root import Root
from spark_abs.store.table import Table


class Output(Protocol):
    """An output of a stage in which an attempt's batches can be looked up, as of the version last read."""

    def last_batch(self) -> BatchId:
        """Return the newest batch that was committed, `NO_BATCH` if none was."""

    def commit_of(self, batch: BatchId) -> tuple[Version, EntryMetadata | SinkMetadata] | None:
        """Return the commit of a batch, None if there is none: a batch without rows may lack it."""


@dataclass(frozen=True, slots=True)
class Held:
    """The newest batch of a stage: the outputs that hold it, and the metadata of its commits."""

    batch: BatchId
    """`NO_BATCH` if none holds any."""
    last: Mapping[str, BatchId]
    """The newest batch of each output."""
    outputs: Mapping[str, Output]

    def notes(self) -> Iterator[EntryMetadata | SinkMetadata]:
        """Read the batch's commits one by one, in the order of the outputs: the first one names the files."""
        for name, output in self.outputs.items():
            holds = NO_BATCH < self.last[name] == self.batch
            if holds and (commit := output.commit_of(self.batch)) is not None:
                yield commit[1]

    @property
    def named(self) -> EntryMetadata | SinkMetadata | None:
        """The commit that names the files of all outputs, the first one; earlier versions named none."""
        return next((note for note in self.notes() if note.evaluated), None)

    def lacks(self, output: str) -> bool:
        """Say whether an output lacks the batch; an unknown output does."""
        return self.last.get(output, NO_BATCH) < self.batch


def held(outputs: Mapping[str, Output]) -> Held:
    """Look at the outputs of a stage, as of the versions last read."""
    last = {name: output.last_batch() for name, output in outputs.items()}
    return Held(max(last.values(), default=NO_BATCH), last, outputs)


def open_logs(
    root: Root,
    job: str,
    stage: StageId,
    *,
    attempt: AttemptId,
    writer: Callable[[StageId, str], SinkWriter],
    channels: Iterable[str],
    sinks: Mapping[str, str],
) -> tuple[ChannelLog | SinkLog | None, ...]:
    """Open the log of each output of a stage without a running query; None for an output that is not there.

    Args:
        root: the job's root.
        job: its name.
        stage: the stage.
        attempt: whose batches are looked up.
        writer: as whom it commits to a sink of a stage.
        channels: the outputs that are channels, which come first.
        sinks: the tables of the Delta sinks.
    """
    found: list[ChannelLog | SinkLog | None] = []
    for output in channels:
        table = Table.find(root.place(root.channel(channel_id(stage, output))))
        app = app_id(job, stage, output, attempt)
        found.append(None if table is None else ChannelLog(table, app, attempt))
    for sink, uri in sinks.items():
        table = Table.find(root.storage.place(uri))
        found.append(None if table is None else SinkLog(table, writer(stage, sink)))
    return tuple(found)
