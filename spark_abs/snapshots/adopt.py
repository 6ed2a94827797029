"""Take over a native checkpoint that a query has used so far."""

from __future__ import annotations

from functools import partial

from pyarrow import fs

from spark_abs.errors import DamageError
from spark_abs.snapshots.layout import is_ignored, relocate_operator
from spark_abs.snapshots.materialise import METADATA, is_operator_metadata, put, spark_uri
from spark_abs.store.root import location_of

_COPY_BYTES = 8 << 20


def adopt_native(source_uri: str, target_uri: str) -> None:
    """Copy a whole checkpoint directory, the planned batch included; the source is left alone.

    The query id stays, so that writes which are idempotent by it stay so. `metadata` is written last: a
    directory that has it is whole and is not touched again, one without it is emptied and written anew.

    Raises:
        DamageError: there is no native checkpoint at the source.
    """
    source_fs, source = fs.FileSystem.from_uri(location_of(source_uri))
    target_fs, target = fs.FileSystem.from_uri(location_of(target_uri))
    if target_fs.get_file_info(f"{target}/{METADATA}").type is fs.FileType.File:
        return
    if source_fs.get_file_info(f"{source}/{METADATA}").type is not fs.FileType.File:
        raise DamageError(f"{source_uri} is not the checkpoint of a query: it has no {METADATA} file")
    target_fs.create_dir(target, recursive=True)
    target_fs.delete_dir_contents(target)
    state_uri = spark_uri(target_fs, f"{target}/state")
    infos = source_fs.get_file_info(fs.FileSelector(source, recursive=True))
    for info in infos:
        path = info.path.removeprefix(f"{source}/")
        if info.type is fs.FileType.Directory:
            target_fs.create_dir(f"{target}/{path}", recursive=True)
    for info in infos:
        path = info.path.removeprefix(f"{source}/")
        if info.type is not fs.FileType.File or is_ignored(info.base_name) or path == METADATA:
            continue
        with source_fs.open_input_stream(info.path) as stream:
            chunks = iter(partial(stream.read, _COPY_BYTES), b"")
            if is_operator_metadata(path):
                chunks = iter([relocate_operator(b"".join(chunks).decode(), state_uri).encode()])
            put(target_fs, f"{target}/{path}", chunks)
    with source_fs.open_input_stream(f"{source}/{METADATA}") as stream:
        put(target_fs, f"{target}/{METADATA}", [stream.read()])
