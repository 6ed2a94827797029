"""Which entries of a channel are valid on the current path of the attempt tree (P18)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_abs.codec import from_json
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, Branch, ChannelId, Version
from spark_abs.protocol.control import ControlState

NOTHING = Version(-1)
"""The position before all entries."""


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The facts of the restored checkpoint in the stored plan of an attempt.

    The plan keeps it, so that retention may remove the manifest.
    """

    channels: Mapping[str, Version]
    """The last valid entry of each channel that the job had then."""


def channel_path(
    state: ControlState, channel: ChannelId, attempt: AttemptId | None = None
) -> tuple[Branch, ...]:
    """Return the path through the attempt tree for one channel, oldest attempt first.

    The path ends with the given attempt; by default with the current attempt.

    For an attempt that was left at a checkpoint, the entries up to its cut are valid, and none if the channel
    did not exist at the cut. All entries of the last attempt are valid.

    Raises:
        DamageError: the stored plan of an attempt cannot be read.
    """
    path = state.lineage(attempt)
    branches = []
    for step, after in zip(path, (*path[1:], None), strict=True):
        if after is None:
            until = None
        else:
            try:
                point = from_json(BranchPoint, after.plan)
            except DamageError as error:
                raise DamageError(f"the restore plan of attempt {after.id} is unreadable: {error}") from error
            until = point.channels.get(channel, NOTHING)
        branches.append(Branch(step.id, until))
    return tuple(branches)
