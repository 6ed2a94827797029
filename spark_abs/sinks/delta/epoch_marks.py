"""The log of a Delta table whose sink writes after checkpoints.

Every commit of such a sink has one application id. The version of that id only grows: its upper bits are the
run, its lower 32 bits count the commits of the run. A commit continues the number that was read, so the
number is also the fence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spark_abs.errors import DamageError, TakenOver
from spark_abs.model import FENCED, RunId, Version, owner_of, run_app_id
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.sinks.delta.commit_metadata import CommittedEpoch, note_of
from spark_abs.sinks.delta.marks import epochs_app, notes_of_root
from spark_abs.sinks.marked import refuse_replaced
from spark_abs.store.table import Table

_BITS = 32


class Newest(NamedTuple):
    """The newest commit of a sink."""

    number: int
    mark: Mark | None
    at_ms: int = 0
    """When it was written, by the writer's clock; 0 if that is not known."""

    @property
    def run(self) -> RunId:
        return RunId(self.number >> _BITS)


def app_of(owner: Owner) -> str:
    """Return the application id of a sink."""
    return epochs_app(owner.job, owner.root, owner.sink)


def next_number(before: int | None, run: RunId) -> int:
    """Return the number of the next commit of a run, which is not older than the one before."""
    return max((before or 0) + 1, int(run) << _BITS)


def newest(table: Table, owner: Owner) -> Newest | None:
    """Return the newest commit of a sink as of the version read, None if there is none.

    Raises:
        TakenOver: another root has taken the table over.
        DamageError: the log does not go back to it any more.
    """
    number = table.transaction(app_of(owner))
    if FENCED in (number, table.transaction(run_app_id(owner_of(owner.job, owner.root)))):
        raise TakenOver(
            f"{table.uri} was taken over by another root: sink {owner.sink!r} writes nothing more to it; "
            "give it another table, or declare the job without it"
        )
    if number is None:
        return None
    for commit in table.backwards():
        if commit.transactions.get(app_of(owner)) == number:
            note = note_of(commit, table.uri)
            if note is None or note.epoch is None:
                raise DamageError(f"version {commit.version} of {table.uri} does not say what it holds")
            return Newest(number, note.epoch.mark, commit.at_ms)
    raise DamageError(
        f"the log of {table.uri} does not go back to the last commit of sink {owner.sink!r} any more: what "
        "it holds is not known. Bring the log back, or give the sink another name, to begin at the newest "
        "checkpoint, and keep the log longer (delta.logRetentionDuration)"
    )


def require_newest(table: Table, owner: Owner) -> Newest | None:
    """Do as `newest`, and refuse a run that was replaced.

    Raises:
        Fenced: a newer run has been here.
    """
    found = newest(table, owner)
    refuse_replaced(owner, found)
    return found


def version_of(table: Table, owner: Owner, mark: Mark) -> Version | None:
    """Return a version with all rows up to a mark and none after it, None if the log has none.

    That is the newest such version; if a restore left rows after the mark in the table, the version before
    these rows came.
    """
    found: Version | None = None
    for version, _, epoch in _epochs(table, owner):
        if _same(epoch.mark, mark):
            if epoch.kept:
                found = None
                continue
            found = version if found is None else found
            if epoch.after is not None:
                break
        elif found is None and _same(epoch.after, mark):
            found = Version(version - 1)
    return found


def version_to(table: Table, owner: Owner, mark: Mark) -> Version | None:
    """Return the version to which a restore to a mark leads, None if the log does not say it.

    That is `version_of`, or the version before the sink's first epoch if the mark lies before it.
    """
    found = version_of(table, owner, mark)
    return _version_before(table, owner, mark) if found is None else found


def was_absent(table: Table, owner: Owner, run: RunId) -> bool:
    """Say whether a sink was in the job before a run, and not in that run: each start commits a number."""
    runs = (RunId(number >> _BITS) for _, number, _ in _epochs(table, owner))
    return next((at < run for at in runs if at <= run), False)


def _version_before(table: Table, owner: Owner, mark: Mark) -> Version | None:
    """Return the version before the first epoch, None if the log does not reach it.

    None, too, if an epoch has rows from before the mark, which the numbers of the channel's entries tell; or
    if another sink of the root has written the table: how far its rows must go back is not known here.
    """
    first: Version | None = None
    for version, _, epoch in _epochs(table, owner):
        if epoch.mark is None:
            return None if first is None or _shared(table, owner) else Version(first - 1)
        if epoch.after is not None:
            if epoch.after.version < mark.version:
                return None
            first = version
    return None


def _shared(table: Table, owner: Owner) -> bool:
    """Say whether the root has written a table by another sink, too, as of the version read."""
    notes = notes_of_root(table, owner.job, owner.root)
    return {note.sink for note in notes} != {f"{owner.job}/{owner.sink}"}


def _same(one: Mark | None, other: Mark) -> bool:
    """Compare what two marks stand for; the checkpoint's id may have been forgotten."""
    return one is not None and (one.attempt, one.version) == (other.attempt, other.version)


def _epochs(table: Table, owner: Owner) -> Iterator[tuple[Version, int, CommittedEpoch]]:
    """Iterate the commits of a sink, their numbers and what they say, the newest first."""
    app = app_of(owner)
    for commit in table.backwards():
        number = commit.transactions.get(app, FENCED)  # with that another root has taken the table over
        note = note_of(commit, table.uri) if number != FENCED else None
        if note is not None and note.epoch is not None:
            yield commit.version, number, note.epoch
