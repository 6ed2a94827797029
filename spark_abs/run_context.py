"""The facts of one run that all its parts need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_abs.model import (
    AttemptId,
    ChannelId,
    CheckpointId,
    Position,
    RunId,
    SinkWriter,
    StageId,
    Version,
    app_id,
    owner_of,
)
from spark_abs.protocol.changes import first_position
from spark_abs.settings import Settings
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

_POLL_LOCAL_MS, _POLL_REMOTE_MS = 10, 500


@dataclass(frozen=True, slots=True)
class RunContext:
    """The facts of one run. `floor` is the last checkpoint id that earlier runs claimed."""

    root: Root
    job: str
    attempt: AttemptId
    natives: str
    """The directory of its native checkpoints, see `Root.native`."""
    run: RunId
    floor: CheckpointId
    control_version: Version
    settings: Settings
    batches_retained: int
    bounded: bool
    """Whether the job ends when its input does; only then do channel inputs close."""
    failpoint: Failpoint
    directories: Mapping[StageId, str] = field(default_factory=dict)
    """Names of native checkpoints that were rebuilt in another directory, by stage."""
    starts: Mapping[tuple[StageId, ChannelId], Position] = field(default_factory=dict)
    """Where stages begin in channels that existed before them."""
    in_order_since: RunId | None = None
    """The first of the earlier runs that all ended in order, see `protocol.control.in_order_since`."""
    identity: str = ""
    """The root's identity in commits to tables outside of it, see `Attempt.root`."""

    def writer(self, stage: StageId, sink: str) -> SinkWriter:
        """Return the writer under whose ids this run commits to the table of a sink."""
        return SinkWriter(self.job, self.identity, stage, sink, self.attempt)

    def app_id(self, stage: StageId, output: str) -> str:
        """Return the application id for idempotent writes of a sink function."""
        return app_id(owner_of(self.job, self.identity), stage, output, self.attempt)

    def start(self, stage: StageId, channel: ChannelId, feedback: bool = False) -> Position:
        """Return where a stage begins in a channel; the same in every run of an attempt."""
        return self.starts.get((stage, channel), first_position(channel, feedback))

    def native(self, stage: StageId) -> Place:
        """Return the directory of a stage's Spark checkpoint."""
        return self.root.native(self.natives, self.attempt, self.directories.get(stage, stage))

    def poll_ms(self, place: Place) -> int:
        """Return the least time between two polls of a store: Spark would poll every ten milliseconds."""
        if self.settings.poll_interval_ms is not None:
            return self.settings.poll_interval_ms
        return _POLL_LOCAL_MS if place.local else _POLL_REMOTE_MS
