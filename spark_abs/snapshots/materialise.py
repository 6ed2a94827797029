"""Bring a native checkpoint back: write the files of a cut from `state/` into a fresh directory."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

from pyarrow import fs

from spark_abs.errors import DamageError, Refused
from spark_abs.manifest import StoredFile
from spark_abs.model import checked_relative
from spark_abs.snapshots.kept import active_packs
from spark_abs.snapshots.layout import relocate_operator
from spark_abs.snapshots.packs import PATH, PackReader, resolve
from spark_abs.store.root import Root, location_of
from spark_abs.store.table import Table

METADATA = "metadata"
_OPERATOR_V2 = re.compile(r"state/\d+/_metadata/v2/\d+")


def is_rewritten(path: str) -> bool:
    """Say whether materialising changes a file, so that its bytes are not those of the manifest."""
    return path == METADATA or is_operator_metadata(path)


def is_operator_metadata(path: str) -> bool:
    """Say whether a file of a native checkpoint holds absolute paths into it."""
    return _OPERATOR_V2.fullmatch(path) is not None


def fresh_query_id() -> str:
    """Return a query id for `materialise`; a plan keeps it, so that a repeat writes the same one."""
    return str(uuid.uuid4())


def materialise(
    root: Root,
    files: Sequence[StoredFile],
    target_uri: str,
    query_id: str,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the files of one stage's cut into `target_uri`, under the query id `query_id`.

    `metadata`, the file with the id, is written last: a directory that has it is whole, one without it is
    emptied and written again. So killed anywhere it can be repeated; two at a time must be kept apart by the
    caller (the attempt is being restored by one run).

    Args:
        root: where `state/` is.
        files: `StageSnapshot.files`; none for a stage that had run no batch: it then starts afresh.
        target_uri: the new checkpoint directory, which no query has used.
        query_id: the id that Spark will find there, not that of the query copied: two queries must not share
            one.
        progress: told the bytes of each file written.

    Raises:
        DamageError: bytes are missing from `state/` or altered; nothing that is left looks whole.
        Refused: the directory belongs to another query.
    """
    filesystem, target = fs.FileSystem.from_uri(location_of(target_uri))
    match _query_id(filesystem, f"{target}/{METADATA}"):
        case None:
            pass
        case found if found == query_id:
            return
        case found:
            raise Refused(f"{target_uri} belongs to query {found}: a restored stage needs a fresh directory")
    filesystem.create_dir(target, recursive=True)
    filesystem.delete_dir_contents(target)
    if not files:
        return
    _write_all(root, files, filesystem, target, progress or (lambda _: None))
    put(filesystem, f"{target}/{METADATA}", [json.dumps({"id": query_id}).encode()])


def _write_all(
    root: Root,
    files: Sequence[StoredFile],
    filesystem: fs.FileSystem,
    target: str,
    progress: Callable[[int], None],
) -> None:
    state_uri = spark_uri(filesystem, f"{target}/state")
    with PackReader(root) as reader:
        where = resolve(reader, active_packs(_state(root)), files)
        for directory in sorted({checked_relative(f.path).rpartition("/")[0] for f in files}):
            filesystem.create_dir(f"{target}/{directory}", recursive=True)
        for file in files:
            if file.path == METADATA:
                continue
            if (at := where.get((file.sha256, file.at.pack))) is None:
                raise DamageError(
                    f"the bytes of {file.path} (sha256 {file.sha256}) are not in {PATH}/ any more"
                )
            chunks: Iterable[bytes] = reader.chunks(at, file.sha256, file.size)
            if is_operator_metadata(file.path):
                chunks = [relocate_operator(b"".join(chunks).decode(), state_uri).encode()]
            put(filesystem, f"{target}/{file.path}", chunks)
            progress(file.size)


def _state(root: Root) -> Table:
    try:
        return Table.open(root.at(PATH))
    except FileNotFoundError as error:
        raise DamageError(f"{root.uri}/{PATH} is missing") from error


def spark_uri(filesystem: fs.FileSystem, path: str) -> str:
    """Return a path as Spark writes it into files: `file:/…` for local ones."""
    if isinstance(filesystem, fs.LocalFileSystem):
        return f"file:{quote(path)}"
    return f"{filesystem.type_name}://{path}"


def _query_id(filesystem: fs.FileSystem, path: str) -> str | None:
    try:
        with filesystem.open_input_stream(path) as stream:
            plain = json.loads(stream.read())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamageError(f"{path} is not the metadata of a query: {error}") from error
    return str(plain.get("id")) if isinstance(plain, dict) else ""


def put(filesystem: fs.FileSystem, path: str, chunks: Iterable[bytes]) -> None:
    """Write a file whole or not at all: through a rename on a local disk, as one object elsewhere."""
    local = isinstance(filesystem, fs.LocalFileSystem)
    written = f"{path}.tmp" if local else path
    with filesystem.open_output_stream(written) as stream:
        for chunk in chunks:
            stream.write(chunk)
    if local:
        filesystem.move(written, path)
