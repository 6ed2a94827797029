"""How many shuffle partitions a stage has: Spark fixes the number for good with the stage's first batch."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spark_abs.errors import UsageError
from spark_abs.model import NO_BATCH, StageId
from spark_abs.snapshots.layout import PARTITIONS_KEY
from spark_abs.stages.native import NativeLog

log = logging.getLogger(__name__)

FAR_MORE = 8
"""Above this number of partitions per core the log warns about a stage with state: each partition costs a
task and a state store commit in every batch, however few rows it has."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """The number of partitions that a stage starts with, and the reason."""

    number: int
    why: str
    fixed: bool
    """Whether a batch was planned with it: then only a restore can change it."""

    def __str__(self) -> str:
        return f"{self.number} shuffle partitions ({self.why})"


def partitions_of(
    native: NativeLog, declared: int | None, session: str | None, slots: int
) -> Partitions | None:
    """Return the number of shuffle partitions of a stage: recorded, declared, the session's, or one a core.

    Args:
        native: the stage's native checkpoint, in whose offset log Spark records the number.
        declared: what the job gives for the stage.
        session: the session's setting, None if it is not set: Spark would then take 200.
        slots: how many tasks can run at once.

    Returns:
        None for a stage that has run and whose log does not say.

    Raises:
        UsageError: the session's is no number.
    """
    planned = native.newest_planned()
    if planned != NO_BATCH:
        recorded = native.offsets(planned).conf.get(PARTITIONS_KEY)
        return None if recorded is None else Partitions(int(recorded), "from its first batch on", True)
    if declared is not None:
        return Partitions(declared, "as declared", False)
    if session is not None:
        try:
            return Partitions(int(session), f"{PARTITIONS_KEY} of the session", False)
        except ValueError:
            raise UsageError(f"{PARTITIONS_KEY} is {session!r}: expected a whole number") from None
    return Partitions(slots, "one for each core", False)


def warn(stage: StageId, found: Partitions, declared: int | None, keeps_state: bool, slots: int) -> None:
    """Warn of a number that is not the declared one, or is far above the cores and not yet fixed."""
    if found.fixed and declared not in (None, found.number):
        log.warning(
            "stage %s goes on with %s shuffle partitions, not with %s as declared: Spark fixes the "
            "number with the first batch; a restore with shuffle_partitions={%r: %s} changes it",
            stage,
            found.number,
            declared,
            stage,
            declared,
        )
    elif keeps_state and not found.fixed and found.number > FAR_MORE * slots:
        log.warning(
            "stage %s will keep its state in %s shuffle partitions (%s) on %s cores: a batch pays for each "
            "of them, and the first one fixes the number; start with shuffle_partitions=%s for the stage on "
            "an empty root, or give it another number with a restore later",
            stage,
            found.number,
            found.why,
            slots,
            slots,
        )
