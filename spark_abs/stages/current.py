"""Facts about a batch for its sink function."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from spark_abs.errors import UsageError
from spark_abs.model import (
    AttemptId,
    BatchId,
    CheckpointId,
    RunId,
    StageId,
)


@dataclass(frozen=True, slots=True)
class Current:
    """Where a sink function is called: with `app_id` and `batch` it can make its own write idempotent."""

    job: str
    stage: StageId
    attempt: AttemptId
    run: RunId
    batch: BatchId
    epoch: CheckpointId
    """The newest barrier that the stage's inputs have passed; 0 before the first and in a source."""
    app_id: str
    """Differs between attempts: a batch that is repeated after a roll back is not one that was written."""


_current: ContextVar[Current] = ContextVar("spark_abs.current")


def current() -> Current:
    """Return the batch that is being written; only inside a sink function.

    Raises:
        UsageError: called anywhere else.
    """
    try:
        return _current.get()
    except LookupError:
        raise UsageError("spark_abs.current() is known only inside a sink function") from None


def within(value: Current, call: Callable[[], None]) -> None:
    """Call a sink function with `current()` set."""
    token = _current.set(value)
    try:
        call()
    finally:
        _current.reset(token)
