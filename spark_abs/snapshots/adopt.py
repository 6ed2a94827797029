"""Take over the native checkpoint of a query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyarrow import fs

from spark_abs.codec import decoded
from spark_abs.errors import DamageError, Refused
from spark_abs.snapshots.layout import is_ignored
from spark_abs.snapshots.materialise import METADATA, empty, is_relocated, make_directory, put, relocated
from spark_abs.snapshots.parallel import for_each
from spark_abs.store.storage import Place

_COPY_BYTES = 8 << 20
_COPIES = 5
"""Attempts to copy: Spark may still upload or delete state of a query that has just stopped."""
_LEFT = "_rewind/"
"""What `spark-abs rewind` keeps in a checkpoint directory; a copy cannot be rewound by it."""


def adopt_native(source: Place, target: Place, heartbeat: Callable[[], None] = lambda: None) -> None:
    """Copy a whole checkpoint directory, the planned batch included. The source is not changed.

    The query id stays, so that writes which are idempotent by it stay so. If a file changes during the copy,
    the copy is repeated. `metadata` is written last: a directory with it is complete and not written again; a
    directory without it is emptied and written anew.

    Args:
        source: the checkpoint of a query that has stopped.
        target: a directory that no query has used.
        heartbeat: called from time to time, in this thread.

    Raises:
        DamageError: there is no native checkpoint at the source.
        Refused: the checkpoint keeps changing.
    """
    if target.below(METADATA).exists():
        return
    if not source.below(METADATA).exists():
        raise DamageError(f"{source} is not the checkpoint of a query: file {METADATA} is missing")
    gone: FileNotFoundError | None = None
    for _ in range(_COPIES):
        try:
            if _copied(source, target, heartbeat):
                break
        except FileNotFoundError as error:
            gone = error
    else:
        raise Refused(
            f"{source} changed during each attempt to copy it, so its query is still running: stop that query"
        ) from gone
    with source.fs.open_input_stream(f"{source.path}/{METADATA}") as stream:
        target.write(METADATA, stream.read())


def _copied(source: Place, target: Place, heartbeat: Callable[[], None]) -> bool:
    """Copy all but `metadata`; say whether the source did not change meanwhile.

    Raises:
        FileNotFoundError: a file was deleted.
    """
    empty(target)
    infos = _listed(source)
    for info in infos:
        if info.type is fs.FileType.Directory:
            make_directory(target, info.path.removeprefix(f"{source.path}/"))

    def copy(info: fs.FileInfo) -> None:
        path = info.path.removeprefix(f"{source.path}/")
        with source.fs.open_input_stream(info.path) as stream:
            chunks = iter(partial(stream.read, _COPY_BYTES), b"")
            if is_relocated(path):
                chunks = iter([relocated(path, decoded(b"".join(chunks), info.path), target).encode()])
            put(target, path, chunks)

    files = _files(infos)
    wanted = [info for info in files if info.path != f"{source.path}/{METADATA}"]
    for_each(wanted, copy, lambda _: heartbeat())
    now = _files(_listed(source))
    return {(i.path, i.size, i.mtime_ns) for i in files} == {(i.path, i.size, i.mtime_ns) for i in now}


def _listed(source: Place) -> list[fs.FileInfo]:
    infos = source.fs.get_file_info(fs.FileSelector(source.path, recursive=True))
    return [info for info in infos if not info.path.startswith(f"{source.path}/{_LEFT}")]


def _files(infos: list[fs.FileInfo]) -> list[fs.FileInfo]:
    return [i for i in infos if i.type is fs.FileType.File and not is_ignored(i.base_name)]
