"""Copy a native checkpoint for a query whose sources are others, or in another order.

Spark knows a source by its place among the lines of an offset file, and by the directory `sources/<place>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

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
"""The sources in their new order: the place that each had, the offset at which it begins, None if Spark is to
begin it."""

_CHUNK = 8 << 20


def source_offsets(text: str) -> tuple[str | None, ...]:
    """Return the offset of every source in the text of `offsets/<b>`, None for one that has none yet.

    Raises:
        Refused: a newer log version, or sources that Spark knows by names.
        DamageError: it is not what Spark writes.
    """
    parsed, lines = parse_offsets(text), text.split("\n")[2:]
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
    """Write into `target` the native checkpoint of `source` as of a finished batch, its sources rearranged.

    `metadata`, the file with the id, is written last. Killed anywhere, it is done again in another directory.

    Args:
        source: where the query ran; none runs there now.
        target: a directory that no query has used.
        batch: the batch; with `NO_BATCH` nothing but the id is written.
        query_id: the id that Spark will find there.
        sources: the sources in their new order.
        heartbeat: called with each file.

    Raises:
        Refused, DamageError: the checkpoint is not one that can be rearranged.
        CaptureIncomplete: a file of it is missing.
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
            chunks = iter([with_sources(b"".join(chunks).decode(), sources).encode()])
        elif is_relocated(file.path):
            text = b"".join(chunks).decode()
            place = schema_entry(text).source if is_schema_entry(file.path) else None
            if place is not None and place not in moved:
                return  # its source is read no more
            chunks = iter([relocated(file.path, text, target, moved.get(place or "")).encode()])
        put(target, paths[file], chunks)

    for_each(list(paths), write, lambda _: heartbeat())
    put(target, METADATA, [json.dumps({"id": query_id}).encode()])


def _moved(path: str, moved: dict[str, str]) -> str | None:
    """Return where a file goes, None if it belongs to a source that is read no more."""
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
    """Record that a batch has ended whose outputs all hold it, of a query without state that does not run.

    What Spark would write is what it wrote for the batch before: the watermark of a batch is what the one
    before ended with, and goes up again with the rows that come.

    Raises:
        DamageError: the end of the batch before is not recorded.
    """
    if batch == NO_BATCH + 1:
        text: bytes | None = b'v1\n{"nextBatchWatermarkMs":0}'
    else:
        text = native.read(f"commits/{int(batch) - 1}")
    if text is None:
        raise DamageError(f"{native}/commits/{int(batch) - 1} is missing: run `spark-abs verify`")
    make_directory(native, "commits")
    put(native, f"commits/{int(batch)}", [text])
