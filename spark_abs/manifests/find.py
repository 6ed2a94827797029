"""The checkpoints of a root, and the search for one by id, savepoint name, `latest` or a moment.

Nothing is created, and one damaged row does not hide the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from spark_abs.advice import way
from spark_abs.errors import CheckpointNotFound, DamageError, UsageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import PATH, SCHEMA, Checkpoints, Summary, read_rows, row_files
from spark_abs.model import NO_ATTEMPT, CheckpointId, CheckpointKind, checked_name, is_number
from spark_abs.protocol.control import ControlState
from spark_abs.quantities import time_ms, time_said
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.table import Table

LATEST = "latest"
_SHOWN = 10
_COLUMNS = [name for name in SCHEMA.names if name not in ("body", "v")]


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and whether a restore has abandoned it."""

    manifest: Manifest
    abandoned: bool


def lookup(root: Root, to: str | int) -> Found:
    """Find a checkpoint by id, savepoint name or `latest`, and read its manifest.

    Raises:
        UsageError: there is no job at this root.
        CheckpointNotFound: there is no such checkpoint.
        DamageError: its row is damaged.
        OSError: the store cannot be read now.
    """
    state = Control.open(root).state
    summary = choose(to, list_manifests(root, state.job), state)
    return Found(load(root, summary), summary.attempt != NO_ATTEMPT and not on_path(summary, state))


def choose(to: str | int | datetime, listing: ManifestListing, state: ControlState) -> Summary:
    """Resolve `to` among the readable rows. A damaged row is never skipped silently.

    Raises:
        CheckpointNotFound: there is no such checkpoint.
        DamageError: the row of the checkpoint cannot be read, or an unreadable row may be the checkpoint's.
    """
    text = str(to)
    try:
        chosen = resolve(to, listing.completed, state)
    except CheckpointNotFound as error:
        if not listing.damaged:
            raise
        if any(text == str(d.id) for d in listing.damaged):
            raise DamageError(f"checkpoint {text} is damaged: {_unreadable(listing)}") from error
        raise DamageError(f"{error}; or its row is unreadable: {_unreadable(listing)}") from error
    if (text == LATEST or isinstance(to, datetime)) and any(
        d.id is None or d.id > chosen.id for d in listing.damaged
    ):
        raise DamageError(
            f"the newest checkpoint may be damaged: {_unreadable(listing)}: see `spark-abs list ROOT` and "
            "name another checkpoint, or restore the newest intact checkpoint with "
            f"{way('fallback=True', '--fallback')}"
        )
    return chosen


def load(root: Root, summary: Summary) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointNotFound: it was removed after it was listed.
        DamageError: it is damaged.
        OSError: the store cannot be read now.
    """
    checkpoints = open_existing(root, summary.job)
    if checkpoints is None:
        raise DamageError(f"{root.uri} has lost its table of checkpoints")
    return checkpoints.load(summary.id)


def readable(root: Root, job: str) -> tuple[Manifest, ...]:
    """Return all intact manifests of a root, by id.

    All are read at once; only if that fails are they read one by one, without those that retire meanwhile.

    Raises:
        DamageError: the table's log is damaged.
        OSError: the store cannot be read now.
    """
    checkpoints = open_existing(root, job)
    if checkpoints is None:
        return ()
    try:
        return checkpoints.load_all()
    except DamageError:
        return tuple(_loaded_one_by_one(checkpoints, _listed_one_by_one(root)))


def _loaded_one_by_one(checkpoints: Checkpoints, listing: ManifestListing) -> Iterator[Manifest]:
    for summary in listing.completed:
        with suppress(DamageError, CheckpointNotFound):
            yield checkpoints.load(summary.id)


def _unreadable(listing: ManifestListing) -> str:
    return ", ".join(f"{d.id if d.id is not None else 'unknown id'} ({d.path})" for d in listing.damaged[:3])


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A manifest whose file cannot be read."""

    id: CheckpointId | None
    """From the Delta log; None if the log does not have it."""
    path: str
    """Relative to the root."""
    error: str


@dataclass(frozen=True, slots=True)
class ManifestListing:
    """The completed checkpoints of a root, by id, and the rows that are damaged."""

    completed: tuple[Summary, ...] = ()
    damaged: tuple[DamagedRow, ...] = ()


def open_existing(root: Root, job: str) -> Checkpoints | None:
    """Open the manifests of a root; None if none was ever written. Creates nothing.

    Raises:
        DamageError: the table's log is damaged.
        OSError: the store cannot be read now.
    """
    table = Table.find(root.place(PATH))
    return None if table is None else Checkpoints(root, job, table)


def list_manifests(root: Root, job: str) -> ManifestListing:
    """List the checkpoints of a root.

    All files are read at once; only if that fails are they read one by one.

    Raises:
        DamageError: the table's log is damaged.
        OSError: the store cannot be read now.
    """
    checkpoints = open_existing(root, job)
    if checkpoints is None:
        return ManifestListing()
    try:
        return ManifestListing(checkpoints.summaries())
    except DamageError:
        return _listed_one_by_one(root)


def _listed_one_by_one(root: Root) -> ManifestListing:
    table = Table.open(root.place(PATH))
    completed: list[Summary] = []
    damaged: list[DamagedRow] = []
    for file in row_files(table, PATH):
        try:
            rows = read_rows(root, file.path, _COLUMNS)
        except DamageError as error:
            damaged.append(DamagedRow(file.least, file.path, str(error).removeprefix(f"{file.path}: ")))
        else:
            completed += [Summary(**{**row, "kind": CheckpointKind(row["kind"])}) for row in rows]
    return ManifestListing(
        tuple(sorted(completed, key=lambda s: s.id)),
        tuple(sorted(damaged, key=lambda d: (d.id or 0, d.path))),
    )


def check_savepoint_name(name: str) -> None:
    """Check the name of a new savepoint.

    Raises:
        UsageError: it is not a valid name, or it is the word for the newest checkpoint.
    """
    if checked_name(name, "savepoint") == LATEST:
        raise UsageError(f"{LATEST!r} means the newest checkpoint: choose another savepoint name")


def resolve(to: str | int | datetime, completed: Sequence[Summary], state: ControlState) -> Summary:
    """Find the checkpoint `to`: an id, the name of a savepoint, `latest`, or a moment (UTC without a zone).

    `latest` is the newest on the current path; a moment is the newest one there whose cut was made by then:
    no later row is in it. An id may name an abandoned checkpoint. Of several savepoints
    with the same name the newest on the current path is taken, else the newest of all.

    Raises:
        CheckpointNotFound: there is none.
    """
    text = str(to)
    if isinstance(to, datetime):
        matching = [s for s in completed if on_path(s, state) and cut_by(to, s)]
    elif text == LATEST:
        matching = [s for s in completed if on_path(s, state)]
    elif is_number(text):
        matching = [s for s in completed if s.id == int(text)]
    else:
        named = [s for s in completed if s.name == text]
        matching = [s for s in named if on_path(s, state)] or named
    if not matching:
        what = f"no checkpoint {text!r}"
        if isinstance(to, datetime):
            said = time_said(_milliseconds(to))
            what = f"no checkpoint of before {said} on the current path"
        elif text == LATEST:
            what = "no completed checkpoint on the current path"
        raise CheckpointNotFound(f"job {state.job!r} has {what}: {_said(completed)}")
    return max(matching, key=lambda s: s.id)


def cut_by(moment: datetime, summary: Summary) -> bool:
    """Say whether all stages had made their cuts at a moment, which is in UTC unless it has a zone."""
    return summary.acked_ms <= _milliseconds(moment)


def _milliseconds(moment: datetime) -> int:
    return time_ms(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _said(completed: Sequence[Summary]) -> str:
    if not completed:
        return "none is complete yet"
    newest = sorted(completed, key=lambda s: s.id)[-_SHOWN:]
    names = ", ".join(f"{s.id} ({s.name})" if s.name else str(s.id) for s in newest)
    more = "" if len(newest) == len(completed) else " and older ones"
    return f"it has {names}{more}, see `spark-abs list ROOT`; others were retired, or never completed"


def newest_first(completed: Sequence[Summary], state: ControlState) -> tuple[Summary, ...]:
    """Return the checkpoints of the current path, newest first: the order in which a fallback tries them."""
    return tuple(sorted((s for s in completed if on_path(s, state)), key=lambda s: s.id, reverse=True))


def on_path(summary: Summary, state: ControlState) -> bool:
    """Say whether a checkpoint is on the current path; a restore has abandoned all others."""
    return state.on_path(summary.attempt, summary.id)
