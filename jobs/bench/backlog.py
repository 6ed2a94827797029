"""What waits in a channel to be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_abs.channels.follow import Follower
from spark_abs.model import AttemptId, Branch, StageId, Version
from spark_abs.stages.native import NativeLog

if TYPE_CHECKING:
    from spark_abs.job import Job


def unread(job: Job, channel: str, stage: str) -> int:
    """Return how many entries with rows of a channel a stage has not durably read; of a first attempt."""
    native = job.root.native("native", AttemptId(1), StageId(stage))
    read = next((p.version for p in NativeLog(native).consumed() if p.channel == channel), Version(0))
    log = Follower(job.root.fs, job.root.path(f"channels/{channel}"), [Branch(AttemptId(1), None)])
    return sum(bool(entry.files) for entry in log.after(read))
