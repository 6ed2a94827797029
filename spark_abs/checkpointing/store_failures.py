"""Errors of a store that name what the run could not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deltalake.exceptions import DeltaError

from spark_abs.errors import CommitStateUnknown, StoreFailed
from spark_abs.protocol import messages as protocol


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Say what a run could not do when the store fails; the innermost purpose is the one that is said.

    Raises:
        StoreFailed: the store did not do it.
    """
    try:
        yield
    except (CommitStateUnknown, DeltaError, OSError) as error:
        raise StoreFailed(
            f"could not {what}: {error}; start the job again once the store takes writes"
        ) from error


def purpose(effect: protocol.Effect) -> str:
    """Say what an effect of the coordinator writes."""
    match effect:
        case protocol.Claim():
            return "claim a checkpoint in control/"
        case protocol.Overtake(id=checkpoint):
            return f"make checkpoint {checkpoint} unaligned in control/"
        case protocol.Complete(id=checkpoint):
            return f"complete checkpoint {checkpoint} in checkpoints/"
        case protocol.Abort(id=checkpoint):
            return f"abort checkpoint {checkpoint} in checkpoints/"
        case _:
            return "answer a command in control/"
