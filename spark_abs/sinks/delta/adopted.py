"""The Delta table of a native query whose place a stage takes: the query's last batch, and its end.

Delta's own sink commits each batch under the id of its query. So the log says which batches the table holds,
and a burnt id keeps the query from writing another batch: Delta's sink skips the batch silently.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_abs.errors import DamageError, Refused
from spark_abs.model import FENCED, BatchId, RunId, SinkWriter, Version
from spark_abs.sinks.delta.commit_metadata import SinkMetadata, note_of
from spark_abs.sinks.delta.marks import Marked, commit_marks
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from spark_abs.sinks.delta.marks import Session

STREAMED = "STREAMING UPDATE"
"""The operation of Delta's sink."""


def last_written(table: Table, query: str) -> BatchId | None:
    """Return the newest batch of a query that a table holds, None if it has written none.

    Where its id was burnt, the log says it, as far back as it goes.

    Raises:
        DamageError: the log does not go back to it any more.
    """
    last = table.transaction(query)
    if last != FENCED:
        return None if last is None else BatchId(last)
    for commit in table.backwards():
        if (before := commit.transactions.get(query, FENCED)) != FENCED:
            return BatchId(before)
    raise DamageError(f"the log of {table.uri} no longer says which batch query {query} wrote last")


def refuse_running(table: Table, query: str, planned: BatchId) -> BatchId | None:
    """Do as `last_written`, and refuse a query that has written more than its checkpoint says.

    Raises:
        Refused: it has.
    """
    last = last_written(table, query)
    if last is not None and last > planned:
        raise Refused(
            f"{table.uri} holds batch {last} of query {query}, and its checkpoint ends with batch {planned}: "
            "the query still runs, or the checkpoint is an older copy. Stop the query, and give its own "
            "checkpoint location"
        )
    return last


def take_over_query(
    table: Table, writer: SinkWriter, *, run: RunId, query: str, planned: BatchId, session: Session
) -> None:
    """Let a sink take the place of a native query: it has the query's batches, and the query writes no more.

    Repeatable; nothing is changed of a table that the query has never written. A plain table gets one commit;
    any other gets a commit for each id, first that of the batches.

    Args:
        table: the table.
        writer: as whom the sink commits its batches.
        run: the run.
        query: the id of the query.
        planned: the newest batch that its copied checkpoint knows.
        session: called only where Delta's own writer is needed.

    Raises:
        Refused: the query has written since it was copied.
    """

    def taken_over() -> Marked | None:
        at = table.transaction(query)
        if at is None:
            return None
        ids: dict[str, int] = {}
        if at != FENCED or table.transaction(writer.app) is None:
            last = refuse_running(table, query, planned)
            if last is not None and last != table.transaction(writer.app):
                ids[writer.app] = int(last)
        if at != FENCED:
            ids[query] = FENCED
        note = SinkMetadata(writer.name, writer.attempt, run, attached=True, root=writer.root)
        return Marked(ids, note) if ids else None

    commit_marks(table, taken_over, session)


@dataclass(frozen=True, slots=True)
class Written:
    """What the log of a table says of a query, as far back as it goes."""

    mode: str
    """The output mode in which it wrote last, in lower case; empty if it is not said."""
    others: tuple[Version, ...]
    """Versions with rows that neither the query nor the root has written."""


def written_by(table: Table, query: str, root: str) -> Written:
    """Read the whole log of a table; once, before a query is adopted.

    Args:
        table: the table.
        query: the id of the query.
        root: the identity of the root, empty if it has none yet.

    Raises:
        DamageError: a commit cannot be read.
    """
    mode, others = "", []
    for entry in table.delta.history():  # the newest first
        parameters: Any = entry.get("operationParameters") or {}
        if entry.get("operation") == STREAMED and parameters.get("queryId") == query:
            mode = mode or str(parameters.get("outputMode") or "").lower()
            continue
        commit = table.read_commit(int(entry["version"]))
        if commit is not None and query in commit.transactions:  # `spark-abs rewind` has set the query back
            continue
        note = None if commit is None else note_of(commit, table.uri)
        ours = note is not None and root != "" and note.root == root
        if not ours and (commit is None or (commit.data_change and commit.adds)):
            others.append(Version(int(entry["version"])))
    return Written(mode, tuple(sorted(others)))


def was_fenced(table: Table, query: str) -> bool:
    """Say whether a query was kept from writing a table."""
    return table.transaction(query) == FENCED


def is_adopted(table: Table, writer: SinkWriter, query: str) -> bool:
    """Say whether a sink has taken the place of a query in a table."""
    return was_fenced(table, query) and table.transaction(writer.app) is not None


def named(versions: Collection[int]) -> str:
    """Name versions for a person, the first ones only."""
    few = ", ".join(map(str, list(versions)[:5]))
    return f"{few} and {len(versions) - 5} more" if len(versions) > 5 else few
