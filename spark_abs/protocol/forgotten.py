"""What `control/` says of a query that is gone for good."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.model import AttemptId, CheckpointId, StageId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A query that shared the root and is gone for good, see `protocol.members`."""

    stage: StageId
    attempt: AttemptId
    """In which it was forgotten."""
    checkpoint: CheckpointId
    """The newest id that was claimed by then."""
    at_ms: int

    @property
    def id(self) -> str:
        """What tells it from others."""
        return self.stage
