"""Restore a native checkpoint: write the files of a cut from `state/` into a new directory."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence

from pyarrow import fs

from spark_abs.codec import decoded, parsed
from spark_abs.errors import Refused
from spark_abs.manifest import StoredFile
from spark_abs.model import RunId, checked_relative, is_number
from spark_abs.snapshots.delta_offsets import jumped
from spark_abs.snapshots.layout import relocate_operator
from spark_abs.snapshots.packs import Chunk, PackReader
from spark_abs.snapshots.parallel import for_each
from spark_abs.snapshots.schema_log import is_schema_entry, relocate_entry, schema_entry
from spark_abs.snapshots.state_storage import locate
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

METADATA = "metadata"
_OPERATOR_V2 = re.compile(r"state/\d+/_metadata/v2/\d+")


def is_rewritten(path: str) -> bool:
    """Say whether materialising changes a file, so that its bytes differ from the manifest."""
    return path == METADATA or is_relocated(path)


def is_relocated(path: str) -> bool:
    """Say whether a file of a native checkpoint holds absolute paths into it."""
    return _OPERATOR_V2.fullmatch(path) is not None or is_schema_entry(path)


def relocated(path: str, text: str, native: Place, source: str | None = None) -> str:
    """Return the text of such a file for another native checkpoint.

    Args:
        path: its path in the checkpoint.
        text: its text in the original checkpoint.
        native: the other checkpoint.
        source: for an entry of a schema log, the name of its source in the new checkpoint; None: unchanged.
    """
    if is_schema_entry(path):
        where = native.uri if "://" in native.uri else f"file:{native.uri}"
        return relocate_entry(text, where, source or schema_entry(text).source)
    return relocate_operator(text, native.below("state").in_spark_files)


def fresh_query_id() -> str:
    """Return a query id for `materialise`. A plan records it, so that a repeat writes the same id."""
    return str(uuid.uuid4())


def materialise(
    root: Root,
    files: Sequence[StoredFile],
    *,
    target: Place,
    query_id: str,
    progress: Callable[[int], None] = lambda _: None,
    lands: Place | None = None,
) -> None:
    """Write the files of one stage's cut into `target`, under the query id `query_id`, several at a time.

    `metadata`, the file with the id, is written last: a directory with it is complete, a directory without it
    is emptied and written again. So the call can be repeated after a kill at any point. The caller must
    exclude two calls at a time (one run restores an attempt).

    Args:
        root: where `state/` is.
        files: `StageSnapshot.files`; empty for a stage that had run no batch and starts from the beginning.
        target: the new checkpoint directory, which no query has used.
        query_id: the new query's id. It must differ from the id of the copied query: two queries must not
            share one.
        progress: told the bytes of each file written.
        lands: the final directory, if the caller moves the target once it is complete.

    Raises:
        DamageError: bytes are missing from `state/` or altered; the directory stays marked as incomplete.
        Refused: the directory belongs to another query.
    """
    if is_whole(target, query_id):
        return
    empty(target)
    if not files:
        return
    _write_all(root, files, target, lands or target, progress)
    target.write(METADATA, json.dumps({"id": query_id}).encode())


def is_whole(target: Place, query_id: str) -> bool:
    """Say whether a directory was completely materialised under a query id.

    Raises:
        Refused: it belongs to another query.
    """
    found = _query_id(target)
    if found is not None and found != query_id:
        raise Refused(f"{target} belongs to query {found}: a restored stage needs an empty directory")
    return found is not None


def continue_at(target: Place, sources: Sequence[str], version: int) -> None:
    """Let Delta sources of a materialised checkpoint continue at the beginning of a version. Repeatable.

    Spark plans the last finished batch again at a start, from the offsets of the batch before. So all offset
    files get the position: that plan then reads nothing, and what lies before the version is in no plan.

    Args:
        target: the checkpoint directory; no query has used it.
        sources: as its offset files name them.
        version: a version that need not exist yet.
    """
    for info in target.fs.get_file_info(fs.FileSelector(f"{target.path}/offsets", allow_not_found=True)):
        if is_number(info.base_name):
            path = f"offsets/{info.base_name}"
            text = decoded(target.read(path) or b"", path)
            target.write(path, jumped(text, dict.fromkeys(sources, version)).encode())


def _write_all(
    root: Root, files: Sequence[StoredFile], target: Place, lands: Place, progress: Callable[[int], None]
) -> None:
    with PackReader(root) as reader:
        where = locate(root, reader, files)
        for directory in sorted({checked_relative(f.path).rpartition("/")[0] for f in files}):
            make_directory(target, directory)

        def write(file: StoredFile) -> None:
            chunks: Iterable[Chunk] = reader.pieces(where[file.sha256, file.at.pack], file.sha256, file.size)
            if is_relocated(file.path):
                chunks = [relocated(file.path, decoded(b"".join(chunks), file.path), lands).encode()]
            put(target, file.path, chunks)

        wanted = [file for file in files if file.path != METADATA]
        wanted.sort(key=lambda file: (file.at.pack, file.at.row))
        for_each(wanted, write, lambda file: progress(file.size))


def _query_id(target: Place) -> str | None:
    data = target.read(METADATA)
    return None if data is None else str(parsed(data, dict, f"{target}/{METADATA}").get("id"))


def empty(target: Place) -> None:
    """Create a directory, or empty an existing one."""
    make_directory(target, "")
    target.fs.delete_dir_contents(target.path, missing_dir_ok=True)


def make_directory(target: Place, relative: str) -> None:
    """Create a directory where the store has directories: in an object store a name is enough."""
    if target.local:
        target.fs.create_dir(f"{target.path}/{relative}", recursive=True)


def put(target: Place, relative: str, chunks: Iterable[Chunk]) -> None:
    """Write a file of any size. After a kill it is there completely, or not at all, or, in Azure, empty."""
    path = f"{target.path}/{relative}"
    written = f"{path}.tmp" if target.local else path
    with target.fs.open_output_stream(written, compression=None) as stream:
        for chunk in chunks:
            stream.write(chunk)
    if target.local:
        target.fs.move(written, path)


_AHEAD = "ahead-"


def passing_place(natives: Place, newest: RunId | None) -> Place:
    """Return a place for a native directory that is void once there is a run after `newest`."""
    return natives.below(f"{_AHEAD}{newest or 0}-{uuid.uuid4().hex}")


def clear_ahead(natives: Place, run: RunId) -> None:
    """Remove temporary directories of restores, edits and readers of state from before a run began.

    Their writers were killed, or their plan is void: it is refused once a newer run has begun. Every start,
    restore and edit calls this. It costs a listing of the attempts.
    """
    for info in natives.fs.get_file_info(fs.FileSelector(natives.path, allow_not_found=True)):
        planned, _, chance = info.base_name.removeprefix(_AHEAD).partition("-")
        if info.base_name.startswith(_AHEAD) and chance and is_number(planned) and int(planned) < run:
            with contextlib.suppress(FileNotFoundError):
                natives.fs.delete_dir(info.path)
