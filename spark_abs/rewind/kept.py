"""Cuts that `spark-abs watch` has kept at a root, for batches whose files Spark has deleted.

A stage of such a root is a query. It is the query of a checkpoint directory if its file `metadata` was the
same, byte for byte: the file has the query's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyarrow import fs

from spark_abs.codec import from_json, to_json
from spark_abs.errors import DamageError, Refused, RootNotFound
from spark_abs.manifest import StageSnapshot, StoredFile
from spark_abs.manifests.find import list_manifests, load
from spark_abs.model import NO_TABLE, CheckpointId, checked_relative
from spark_abs.protocol.control import WATCHED_JOB
from spark_abs.rewind.journal import Brought
from spark_abs.rewind.query import KeptBatch, QueryFacts, rewinds_of
from spark_abs.rewind.table import TableFacts
from spark_abs.snapshots.identity import identity, of_text
from spark_abs.snapshots.materialise import METADATA, make_directory, put
from spark_abs.snapshots.operators import stored_texts
from spark_abs.snapshots.packs import CHUNK, PackReader
from spark_abs.snapshots.parallel import for_each
from spark_abs.snapshots.state_storage import locate
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class KeptCut:
    """A cut of some queries that is kept."""

    root: Root
    checkpoint: CheckpointId
    moment_ms: int
    """When its last batch had ended."""
    parts: Mapping[str, StageSnapshot]
    """Checkpoint directory to what is kept of its query."""

    def batches(self, queries: Sequence[QueryFacts]) -> dict[str, int]:
        """Return the last batch of each query by its name."""
        return {query.name: int(self.parts[query.place.uri].cut_batch) for query in queries}

    def read(self) -> dict[str, KeptBatch]:
        """Read the offsets of its batches: checkpoint directory to batch.

        Raises:
            DamageError: bytes are missing from `state/` or altered.
        """
        found = {}
        for uri, part in self.parts.items():
            path = f"offsets/{part.cut_batch - 1}"
            texts = stored_texts(self.root, [file for file in part.files if file.path == path])
            found[uri] = KeptBatch(int(part.cut_batch), self.moment_ms, part.offsets, texts.get(path))
        return found

    def files(self, uri: str) -> tuple[StoredFile, ...]:
        """Return the files of a query that a rewind brings back."""
        return tuple(file for file in self.parts[uri].files if file.path != METADATA)

    def is_of(self, tables: Sequence[TableFacts]) -> bool:
        """Say whether each table still has the rows that it had at the cut.

        It has not if a rewind has undone them, or if the table was dropped and made anew where it was.
        """
        ids = {table.uri: table.id for table in tables}
        paths = {table.id: {commit.version for commit in table.path} for table in tables}
        outputs = [output for part in self.parts.values() for output in part.outputs]
        if any(ids.get(output.table, output.table_id) != output.table_id for output in outputs):
            return False
        return all(
            output.version in paths[output.table_id]
            for output in outputs
            if output.table_id in paths and output.version != NO_TABLE
        )


def kept_cuts(root: Root, queries: Sequence[QueryFacts]) -> Iterator[KeptCut]:
    """Iterate the cuts of these queries that a root keeps and no rewind has abandoned, newest first.

    Args:
        root: of a watcher.
        queries: as they are now.

    Raises:
        RootNotFound: there is nothing at the root.
        Refused: it is the root of a job.
        DamageError: a manifest cannot be read.
    """
    try:
        state = Control.open(root).state
    except RootNotFound as none:
        raise RootNotFound(
            f"there is no root of `spark-abs watch` at {root.uri}: give the root of that command, and if it "
            "is on a disk of its own, mount the disk"
        ) from none
    if state.job != WATCHED_JOB:
        raise Refused(
            f"{root.uri} is the root of job {state.job!r}: its checkpoints are restored by `spark-abs "
            "restore`; give the root of `spark-abs watch`"
        )
    listing = list_manifests(root, state.job)
    if listing.damaged:
        said = ", ".join(row.path for row in listing.damaged)
        raise DamageError(
            f"kept cuts at {root.uri} cannot be read: {said}; see `spark-abs verify {root.uri}`"
        )
    known = {of_text(query.metadata): query for query in queries}
    rewinds = {query.id: rewinds_of(query.place) for query in queries}
    for summary in sorted(listing.completed, key=lambda s: (s.acked_ms, s.id), reverse=True):
        manifest = load(root, summary)
        parts = {
            query.place.uri: part
            for part in manifest.stages
            if (query := known.get(identity(part))) is not None
            and _is_past(query, part)
            and not any(
                r.batch < part.cut_batch and manifest.triggered_ms < r.at_ms for r in rewinds[query.id]
            )
        }
        if len(parts) == len(known):
            yield KeptCut(root, manifest.id, manifest.acked_ms, parts)


def _is_past(query: QueryFacts, part: StageSnapshot) -> bool:
    """Say whether a query has ended a batch, and not planned it anew since, as far as Spark's logs say."""
    now = query.texts.get(int(part.cut_batch))
    return part.cut_batch <= query.committed and (now is None or _planned(now) == _planned(part.offsets))


def _planned(text: str) -> str:
    """Return the line of an offset file that has the time of the plan: no two plans of a batch share it."""
    return "".join(text.split("\n")[1:2])


KEPT = "kept"
"""The directory, below that of a rewind, with files of a kept cut on their way."""
_BROUGHT = "brought.json"


def require_whole(cut: KeptCut, uri: str) -> None:
    """See that all bytes of a query's part are there; they are read when they are copied.

    Raises:
        DamageError: some are missing.
    """
    with PackReader(cut.root) as reader:
        locate(cut.root, reader, cut.files(uri))


def bring(cut: KeptCut, place: Place, top: str) -> None:
    """Copy the files of a kept cut that a checkpoint directory lacks beside its own. Repeatable.

    Args:
        cut: the cut.
        place: the checkpoint directory.
        top: the directory of the rewind in it.

    Raises:
        DamageError: bytes are missing from `state/` or altered.
    """
    wanted = [file for file in cut.files(place.uri) if not _is_there(place, file)]
    there = {file.path for file in wanted if place.below(file.path).exists()}
    new = tuple(file.path for file in wanted if file.path not in there)
    record_brought(place, top, Brought(tuple(file.path for file in wanted), new))
    below = place.below(f"{top}/{KEPT}")
    with PackReader(cut.root) as reader:
        where = locate(cut.root, reader, wanted)

        def copy(file: StoredFile) -> None:
            at = where[file.sha256, file.at.pack]
            make_directory(below, checked_relative(file.path).rpartition("/")[0])
            put(below, file.path, reader.pieces(at, file.sha256, file.size))

        for_each(sorted(wanted, key=lambda f: (f.at.pack, f.at.row)), copy, lambda _: None)


def brought(place: Place, top: str) -> Brought:
    """Return which files of a kept cut a rewind brings back to a checkpoint directory."""
    data = place.read(f"{top}/{_BROUGHT}")
    found = Brought((), ()) if data is None else from_json(Brought, data)
    for path in found.files:
        checked_relative(path)
    return found


def record_brought(place: Place, top: str, files: Brought) -> None:
    """Record which files of a kept cut a rewind brings back, before they come."""
    place.write(f"{top}/{_BROUGHT}", to_json(files).encode())


def forget_brought(place: Place, top: str) -> None:
    """Delete the files that a rewind has not put in, and will not."""
    for path in brought(place, top).files:
        place.remove(f"{top}/{KEPT}/{path}")
    place.remove(f"{top}/{_BROUGHT}")


def _is_there(place: Place, file: StoredFile) -> bool:
    """Say whether a checkpoint directory has a file with the same bytes."""
    path = f"{place.path}/{checked_relative(file.path)}"
    info = place.fs.get_file_info(path)
    if info.type is not fs.FileType.File or info.size != file.size:
        return False
    digest = hashlib.sha256()
    with place.fs.open_input_stream(path, compression=None) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.sha256
