"""Restores of a Delta table to the rows of a recorded version, in a commit that says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow import parquet as pq

from spark_abs.advice import way
from spark_abs.channels.files import statistics
from spark_abs.codec import to_json
from spark_abs.errors import Refused
from spark_abs.model import FENCED, NO_TABLE, Version
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.changes import Changes, Own, Who, changes_since, commits_since
from spark_abs.sinks.delta.commit_metadata import note_of
from spark_abs.sinks.delta.marks import Marked, commit_mark
from spark_abs.sinks.delta.native_writable import why_not_native, why_not_plain
from spark_abs.sinks.delta.table_shape import shape_of
from spark_abs.snapshots.parallel import in_threads
from spark_abs.store.storage import Place
from spark_abs.store.table import AddFile, Commit, Table
from spark_abs.store.version_files import lacks_vectors, place_of

if TYPE_CHECKING:
    from spark_abs.sinks.delta.marks import Session


_WAYS_OUT = (
    "Go back to a checkpoint that is newer than that, start the job without going back, or give each job a "
    "table of its own"
)
_KEPT = (
    "VACUUM deletes the files of versions that are older than the table's property "
    "delta.deletedFileRetentionDuration, a week by default: set it to what restores need, with ALTER TABLE … "
    "SET TBLPROPERTIES, before that time has passed"
)


def bring_back(
    table: Table, version: Version, *, own: Own, mark: Marked, session: Session, undo_others: bool = False
) -> None:
    """Bring a table back to `version`, `NO_TABLE`: to no rows, as of the version read. Repeatable.

    Rows of other roots stay. A plain table gets one commit. Any other gets two, Delta's RESTORE and the mark:
    killed between them, a repeat finds the rows restored and adds the mark.

    Raises:
        Refused: somebody else has changed data since, and not `undo_others`; names the commits. Or another
            root has, and its rows cannot be told from ours.
        CommitConflict: somebody else took the next version.
        DamageError: the version, or a file of it, is not there any more.
        CommitStateUnknown: the store did not say; repeat the call.
    """
    changes, shape = changes_since(table, version, own), shape_of(table.delta)
    plain = why_not_plain(shape) is None
    if changes.of_others and not undo_others:
        force = way("force=['rows']", "--force rows")
        raise Refused(
            f"{table.uri} was changed by others since version {version}, which a restore would undo; "
            f"say {force} if it may: {_operations(table, changes.of_others)}"
        )
    if not plain and (entangled := why_not_apart(table, version, own, changes)):
        raise Refused(f"{table.uri}: {entangled}")
    said = to_json(mark.note)
    if plain and shape.append_only and changes and (changes.of_roots or version == NO_TABLE):
        raise Refused(
            f"{table.uri} has the property delta.appendOnly=true, which forbids to take rows out of it: "
            "unset it for the time of the restore"
        )
    if changes.of_roots:
        undone = undoing(table, version, own)
        table.commit_next(replace(undone, transactions=mark.transactions, metadata=said))
    elif changes and plain and version == NO_TABLE:
        table.commit_next(Commit((), mark.transactions, said, replace=True))
    elif changes and plain:
        table.restore(version, Commit(transactions=mark.transactions, metadata=said))
    else:
        if changes:
            spark_writer.restore(session(), table.place, version, said)
            table.refresh()  # it may have fewer columns now
        commit_mark(table, mark, session)


def ahead(table: Table, version: Version, job: str, owner: str) -> dict[str, int]:
    """Return the application ids of functions that are ahead of a version, with their numbers there.

    A function may write under an id of its own. Once the rows are back, Delta would skip its batches, whose
    numbers the log has seen. -1 stands for an id that had none. Ids of this root are left out: an attempt has
    its own.

    Args:
        table: the table.
        version: the version whose rows come back.
        job: the name of the job.
        owner: the prefix of its ids on this root.
    """
    own = tuple(f"{prefix}{mark}" for prefix in (job, owner) for mark in "/@")
    found: set[str] = set()
    for _, commit in commits_since(table, version):
        if commit is not None and note_of(commit, table.uri) is None:
            found |= {app for app in commit.transactions if not app.startswith(own)}
    if not found:
        return {}
    then = {}
    if version != NO_TABLE:
        before = DeltaTable(table.uri, version=int(version), storage_options=table.place.options)
        then = {app: before.transaction_version(app) for app in found}
    numbers = {app: -1 if then.get(app) is None else int(then[app] or 0) for app in sorted(found)}
    return {app: n for app, n in numbers.items() if n < (table.transaction(app) or 0) < FENCED}


def why_not_back(table: Table, version: Version, own: Own) -> str:
    """Say why a version cannot be restored, empty if it can; changes nothing, needs no Spark."""
    if gone := missing(table, version):
        return gone
    changes = changes_since(table, version, own)
    if changes.of_others:
        return f"others have changed rows of the table since: {_operations(table, changes.of_others)}"
    return why_not_apart(table, version, own, changes)


def why_not_apart(table: Table, version: Version, own: Own, changes: Changes) -> str:
    """Say why rows of this root cannot be told from rows that others wrote since; empty if they can."""
    if not changes.of_roots:
        return ""
    if why_not_native(table.delta) is not None:
        return (
            f"another root has written to the table since version {version}, and only Delta's own writer can "
            f"write it: rows of one root cannot be undone alone. {_WAYS_OUT}"
        )
    try:
        undoing(table, version, own)
    except Refused as error:
        return str(error)
    return ""


def missing(table: Table, version: Version) -> str:
    """Say which files of a version are gone, empty if none is.

    Raises:
        OSError: the store cannot be read now.
    """
    if version == NO_TABLE:
        return ""
    try:
        handle = DeltaTable(table.uri, version=int(version), storage_options=table.place.options)
        then = handle.file_uris()
    except (DeltaError, FileNotFoundError) as error:
        return f"version {version} cannot be opened any more: {error}"
    left = [place_of(handle, table.place, uri) for uri in sorted({*then} - {*table.delta.file_uris()})]
    if gone := [
        place for place, there in zip(left, in_threads(Place.exists, left), strict=True) if not there
    ]:
        return f"{len(gone)} files of version {version} are gone, as {gone[0]}: {_KEPT}"
    if lost := lacks_vectors(handle):
        return f"deletion vectors of version {version} are gone ({lost}): {_KEPT}"
    return ""


def _operations(table: Table, versions: Sequence[Version]) -> str:
    commits = [(version, table.read_commit(version)) for version in versions]
    return "; ".join(
        f"version {version}: {commit.operation if commit else 'not in the log any more'}"
        for version, commit in commits
    )


def undoing(table: Table, version: Version, own: Own) -> Commit:
    """Return the commit that undoes what all but other roots did since a version, file by file.

    A file that was added is removed, one that was removed comes back; files of other roots stay as they are.

    Raises:
        Refused: files were merged or rewritten since, so that rows of different writers are in one file.
    """
    then, now = dict[str, int](), _active(table.delta)
    if version != NO_TABLE:
        then = _active(DeltaTable(table.uri, version=int(version), storage_options=table.place.options))
    added, removed = dict[str, Who](), dict[str, Who]()
    for _, commit in commits_since(table, version):
        if commit is not None and commit.data_change:
            who = own.author(commit, table.uri)
            _refuse_entangled(version, [p for p in commit.removed if added.get(p, who) is not who])
            added |= {file.path: who for file in commit.adds}
            removed |= dict.fromkeys(commit.removed, who)
    new, gone = now.keys() - then.keys(), then.keys() - now.keys()
    _refuse_rewritten(version, (new - added.keys()) | (gone - removed.keys()))
    back = sorted(path for path in gone if removed[path] is not Who.ROOT)
    return Commit(
        adds=[AddFile(path, then[path], _statistics(table, path)) for path in back],
        removes=sorted(path for path in new if added[path] is not Who.ROOT),
    )


def _refuse_entangled(version: Version, paths: Sequence[str]) -> None:
    """Refuse if one root has rewritten rows that another had added, as a merge or an overwrite does."""
    if paths:
        raise Refused(
            f"another root has written to the table since version {version}, and one has rewritten rows of "
            f"the other: rows of both are in one file or gone with it ({paths[0]}), and cannot be told "
            f"apart. {_WAYS_OUT}"
        )


def _refuse_rewritten(version: Version, paths: Iterable[str]) -> None:
    if paths := sorted(paths):
        raise Refused(
            f"another root has written to the table since version {version}, and rows of both were "
            f"rewritten into one file ({paths[0]}, as OPTIMIZE does): they cannot be told apart. {_WAYS_OUT}"
        )


def _active(table: DeltaTable) -> dict[str, int]:
    """Return path and size of every file of a version."""
    rows = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    return {str(row["path"]): int(row["size_bytes"]) for row in rows}


def _statistics(table: Table, path: str) -> str:
    with table.place.fs.open_input_file(f"{table.place.path}/{path}") as source:
        return json.dumps(statistics(pq.read_metadata(source)))
