"""Which checkpoint a person means."""

from __future__ import annotations

from collections.abc import Sequence

from spark_abs.errors import CheckpointNotFound, UsageError
from spark_abs.manifests.checkpoints import Summary
from spark_abs.model import checked_name
from spark_abs.protocol.control import ControlState

LATEST = "latest"
_SHOWN = 10


def check_savepoint_name(name: str) -> None:
    """Refuse what a savepoint cannot be called.

    Raises:
        UsageError: it is no name, or it means the newest checkpoint.
    """
    if checked_name(name, "savepoint") == LATEST:
        raise UsageError(f"{LATEST!r} means the newest checkpoint: choose another savepoint name")


def resolve(to: str | int, completed: Sequence[Summary], state: ControlState) -> Summary:
    """Find the checkpoint called `to`: an id, the name of a savepoint, or `latest`.

    `latest` is the newest on the current path. An id may name an abandoned checkpoint. Of several
    savepoints with one name, the newest on the current path is meant, else the newest of all.

    Raises:
        CheckpointNotFound: there is none.
    """
    text = str(to)
    if text == LATEST:
        found = [s for s in completed if on_path(s, state)]
    elif text.isdecimal():
        found = [s for s in completed if s.id == int(text)]
    else:
        named = [s for s in completed if s.name == text]
        found = [s for s in named if on_path(s, state)] or named
    if not found:
        what = "no completed checkpoint on the current path" if text == LATEST else f"no checkpoint {text!r}"
        raise CheckpointNotFound(f"job {state.job!r} has {what}: {_said(completed)}")
    return max(found, key=lambda s: s.id)


def _said(completed: Sequence[Summary]) -> str:
    """Say which checkpoints there are, for whoever has asked for another."""
    if not completed:
        return "none is complete yet"
    newest = sorted(completed, key=lambda s: s.id)[-_SHOWN:]
    names = ", ".join(f"{s.id} ({s.name})" if s.name else str(s.id) for s in newest)
    more = "" if len(newest) == len(completed) else " and older ones"
    return f"there are {names}{more}, see `spark-abs list ROOT`; others were retired, or never completed"


def newest_first(completed: Sequence[Summary], state: ControlState) -> tuple[Summary, ...]:
    """Return the checkpoints of the current path, newest first: the order in which a fallback tries them."""
    return tuple(sorted((s for s in completed if on_path(s, state)), key=lambda s: s.id, reverse=True))


def on_path(summary: Summary, state: ControlState) -> bool:
    """Say whether a checkpoint lies on the current path; one that does not was abandoned by a restore."""
    return state.on_path(summary.attempt, summary.id)
