"""Marks in the log of a Delta table: commits with ids and metadata, and without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_abs.codec import to_json
from spark_abs.errors import CommitConflict, Refused
from spark_abs.model import owner_of, run_app_id
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.commit_metadata import SinkMetadata, note_of
from spark_abs.sinks.delta.fit import planned_for
from spark_abs.sinks.delta.native_writable import why_not_native
from spark_abs.sinks.delta.spark_writer import Stamp
from spark_abs.store.log import LogCommit
from spark_abs.store.table import Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Session = Callable[[], SparkSession]


@dataclass(frozen=True, slots=True)
class Marked:
    """Application ids with their versions, and the metadata of the commit."""

    transactions: Mapping[str, int]
    note: SinkMetadata


def commit_mark(table: Table, mark: Marked, session: Session) -> None:
    """Commit ids and a note without rows.

    A table that is not plain is committed to by Delta's own writer, once for each id: the last id says that
    all are there. That writer silently skips an id whose version is not above the version in the log.

    Raises:
        CommitConflict: another commit stands in the way.
    """
    if why_not_native(table.delta) is None:
        table.commit_next(Commit(transactions=mark.transactions, metadata=to_json(mark.note)))
        return
    *first, last = mark.transactions.items()
    with planned_for(table):
        for app, number in first:
            stamp = Stamp(app, number, to_json(replace(mark.note, took_over=False)))
            spark_writer.mark(session(), table, stamp)
        spark_writer.mark(session(), table, Stamp(*last, to_json(mark.note)))


def is_mark_by_spark(commit: LogCommit) -> bool:
    """Say whether a commit of a restore is its mark alone, by Delta's own writer: others may be before it."""
    return commit.token is None and commit.operation == "WRITE"


def commit_marks(table: Table, decide: Callable[[], Marked | None], session: Session) -> None:
    """Refresh, let `decide` look, commit the mark; again until `decide` returns None. See `Table.commit`."""
    while True:
        table.refresh()
        mark = decide()
        if mark is None:
            return
        with suppress(CommitConflict):
            commit_mark(table, mark, session)


def epochs_app(job: str, root: str, sink: str) -> str:
    """Name the application id under which a sink commits the rows of completed checkpoints."""
    return f"{owner_of(job, root)}/{sink}/epochs"


def notes_of_root(table: Table, job: str, root: str) -> Iterator[SinkMetadata]:
    """Iterate the metadata of a root's commits to a table, the newest first."""
    notes = (note_of(commit, table.uri) for commit in table.backwards())
    return (note for note in notes if note is not None and (note.job, note.root) == (job, root))


def epoch_sinks(notes: Iterable[SinkMetadata]) -> tuple[str, ...]:
    """Name the sinks of a root that have written a table after checkpoints."""
    return tuple(sorted({note.sink.rpartition("/")[2] for note in notes if note.epoch is not None}))


def refuse_epochs(table: Table, job: str, root: str) -> None:
    """Refuse to write a table with each batch that the root has written after checkpoints.

    Raises:
        Refused: it has; names the sink.
    """
    if before := epoch_sinks(notes_of_root(table, job, root)):
        raise Refused(
            f"sink {before[-1]!r} wrote {table.uri} with visible='checkpoint'; with visible='batch' the rows "
            "that still wait for a checkpoint would never be written: declare it with visible='checkpoint' "
            "again, or with another table"
        )


def other_writers(table: Table, job: str, root: str) -> tuple[str, ...] | None:
    """Return the ids by which all other roots that have written to a table are fenced.

    None if this root has taken the table over, and no other root has written since.
    """
    found: set[str] = set()
    for version in range(table.version, -1, -1):
        commit = table.read_commit(version)
        note = note_of(commit, table.uri) if commit is not None else None
        if commit is None or (note is not None and (note.job, note.root) == (job, root) and note.took_over):
            return tuple(sorted(found)) or None
        if note is not None and (note.job, note.root) != (job, root):
            found.add(run_app_id(owner_of(note.job, note.root)))
            if note.epoch is not None:
                found.add(epochs_app(note.job, note.root, note.sink.rpartition("/")[2]))
    return tuple(sorted(found))
