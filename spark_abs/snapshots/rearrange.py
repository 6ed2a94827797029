"""Copy a native checkpoint for a query with different sources, or with its sources in another order.

Spark identifies a source by its position among the lines of an offset file, and by the directory
`sources/<position>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from spark_abs.codec import decoded
from spark_abs.errors import DamageError, Refused
from spark_abs.model import NO_BATCH, BatchId, checked_relative
from spark_abs.snapshots.capture import CapturedFile, capture
from spark_abs.snapshots.layout import VOID_OFFSET, parse_offsets
from spark_abs.snapshots.materialise import METADATA, empty, is_relocated, make_directory, put, relocated
from spark_abs.snapshots.packs import Chunk
from spark_abs.snapshots.parallel import for_each
from spark_abs.snapshots.schema_log import is_schema_entry, schema_entry
from spark_abs.store.storage import Place

Sources = Sequence[int | str | None]
"""The sources in their new order: for each its old position and the offset at which it begins, None if Spark
chooses it."""

_CHUNK = 8 << 20


def source_offsets(text: str, where: str = "") -> tuple[str | None, ...]:
    """Return the offset of each source in the text of `offsets/<b>`, None for a source without one.

    Args:
        text: the text.
        where: the file from which it comes, for the message.

    Raises:
        Refused: a newer log version, or sources that Spark identifies by names.
        DamageError: the text does not have Spark's format.
    """
    parsed, lines = parse_offsets(text, where), text.split("\n")[2:]
    if parsed.version == 1:
        return tuple(None if line == VOID_OFFSET else line for line in lines)
    names = [line.partition(":")[0] for line in lines]
    if names != [str(place) for place in range(len(names))]:
        raise Refused(
            f"the query names its sources ({', '.join(names)}), so they cannot be added, removed or reordered"
        )
    return tuple(parsed.offsets.get(name) for name in names)


def with_sources(text: str, sources: Sources) -> str:
    """Return the text of `offsets/<b>` with its sources rearranged.

    Raises:
        Refused, DamageError: as `source_offsets`.
    """
    before = source_offsets(text)
    given = [before[one] if isinstance(one, int) else one for one in sources]
    offsets = [VOID_OFFSET if offset is None else offset for offset in given]
    head, metadata, *_ = text.split("\n")
    if parse_offsets(text).version != 1:
        offsets = [f"{place}:{offset}" for place, offset in enumerate(offsets)]
    return "\n".join([head, metadata, *offsets])


def rearrange(
    source: Place,
    target: Place,
    *,
    batch: BatchId,
    query_id: str,
    sources: Sources,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Copy the native checkpoint `source` as of a finished batch to `target`, with its sources rearranged.

    `metadata`, the file with the id, is written last. After a kill the caller repeats it in another
    directory.

    Args:
        source: the checkpoint of a query that does not run now.
        target: a directory that no query has used.
        batch: the batch; with `NO_BATCH` only the id is written.
        query_id: the id of the new query.
        sources: the sources in their new order.
        heartbeat: called for each file.

    Raises:
        Refused, DamageError: the checkpoint cannot be rearranged.
        CaptureIncomplete: a file of the checkpoint is missing.
    """
    empty(target)
    moved = {str(old): str(new) for new, old in enumerate(sources) if isinstance(old, int)}
    files = capture(source.fs, source.path, batch).files
    paths = {f: path for f in files if (path := _moved(f.path, moved)) is not None and path != METADATA}
    for directory in sorted({path.rpartition("/")[0] for path in paths.values()}):
        make_directory(target, directory)

    def write(file: CapturedFile) -> None:
        chunks = _read(source, file.path)
        if file.path.startswith("offsets/"):
            chunks = iter(
                [with_sources(decoded(b"".join(chunks), f"{source}/{file.path}"), sources).encode()]
            )
        elif is_relocated(file.path):
            text = decoded(b"".join(chunks), f"{source}/{file.path}")
            place = schema_entry(text).source if is_schema_entry(file.path) else None
            if place is not None and place not in moved:
                return  # its source is read no more
            chunks = iter([relocated(file.path, text, target, moved.get(place or "")).encode()])
        put(target, paths[file], chunks)

    for_each(list(paths), write, lambda _: heartbeat())
    target.write(METADATA, json.dumps({"id": query_id}).encode())


def _moved(path: str, moved: dict[str, str]) -> str | None:
    """Return the new path of a file, None if it belongs to a removed source."""
    head, _, rest = checked_relative(path).partition("/")
    if head != "sources":
        return path
    place, _, name = rest.partition("/")
    return f"sources/{moved[place]}/{name}" if place in moved else None


def _read(source: Place, path: str) -> Iterator[Chunk]:
    with source.fs.open_input_stream(f"{source.path}/{path}") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def finish_batch(native: Place, batch: BatchId) -> None:
    """Record the end of a batch that all outputs hold, for a stopped query without state.

    The record of the batch before is repeated, so the watermark stays as it was; it advances again with the
    next rows.

    Raises:
        DamageError: the end of the batch before is not recorded.
    """
    if batch == NO_BATCH + 1:
        text: bytes | None = b'v1\n{"nextBatchWatermarkMs":0}'
    else:
        text = native.read(f"commits/{int(batch) - 1}")
    if text is None:
        raise DamageError(f"{native}/commits/{int(batch) - 1} is missing: run `spark-abs verify`")
    native.write(f"commits/{int(batch)}", text)
