"""Undo one root's part of a table, file by file, where another root has written to it since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pyarrow as pa
from deltalake import DeltaTable
from pyarrow import parquet as pq

from spark_abs.channels.files import statistics
from spark_abs.errors import Refused
from spark_abs.model import NO_TABLE, Version
from spark_abs.sinks.delta.changes import Own, Who, commits_since
from spark_abs.store.table import AddFile, Commit, Table

_WAYS_OUT = (
    "Go back to a checkpoint that is newer than that, start the job without going back, or give each job a "
    "table of its own"
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
    """Refuse where one has rewritten the rows that another had added, as a merge or an overwrite does."""
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
