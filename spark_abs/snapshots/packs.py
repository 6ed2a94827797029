"""`state/`: the bytes of state files, kept once each in packs.

A pack is one Parquet data file: rows of (sha256, size, chunk, bytes), chunks of at most 8 MiB in order, one
row group per row, so that a `Location` opens without a scan. What the table's log does not name does not
exist; what it names is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from spark_abs.errors import DamageError
from spark_abs.manifest import Location, StoredFile
from spark_abs.model import RunId
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile

PATH = "state"
CHUNK = 8 * 2**20
SCHEMA = pa.schema(
    [("sha256", pa.string()), ("size", pa.int64()), ("chunk", pa.int32()), ("bytes", pa.binary())]
)
_INDEX = ["sha256", "size", "chunk"]
_NAME = re.compile(r"(pack|merged)-(\d+)-[0-9a-f]{32}\.parquet")


@dataclass(frozen=True, slots=True)
class PackName:
    """What the name of a pack says."""

    run: RunId
    """The run that wrote it: an unnamed file of an older run is a leftover."""
    merged: bool
    """Whether it holds what sweeping took over from other packs: manifests name those, not this one."""


def pack_name(name: str) -> PackName | None:
    """Read the name of a pack; None for another file."""
    match = _NAME.fullmatch(name)
    return PackName(RunId(int(match[2])), match[1] == "merged") if match else None


class PackWriter:
    """Writes one pack, in memory a chunk at a time. The file counts once its `AddFile` is committed."""

    def __init__(self, root: Root, run: RunId, *, merged: bool = False) -> None:
        self.name = f"{'merged' if merged else 'pack'}-{int(run)}-{uuid.uuid4().hex}.parquet"
        self._root = root
        self._path = root.path(f"{PATH}/{self.name}")
        self._sink = root.fs.open_output_stream(self._path)
        self._writer = pq.ParquetWriter(
            self._sink, SCHEMA, compression="NONE", use_dictionary=False, write_statistics=_INDEX
        )
        self._rows = 0

    def add(self, sha256: str, size: int, chunks: Iterable[bytes]) -> Location:
        """Append the bytes of one file, an empty file as one empty chunk.

        Raises:
            DamageError: the bytes are not of that size and hash; the pack must be given up.
        """
        first, digest, written = self._rows, hashlib.sha256(), 0
        for number, chunk in enumerate(chunks):
            digest.update(chunk)
            written += len(chunk)
            row = pa.record_batch([[sha256], [size], [number], [chunk]], schema=SCHEMA)
            self._writer.write_batch(row, row_group_size=1)
            self._rows += 1
        if (written, digest.hexdigest()) != (size, sha256):
            raise DamageError(f"{written} bytes were read where {size} bytes with sha256 {sha256} should be")
        return Location(self.name, first, self._rows - first)

    def close(self) -> AddFile:
        """End the file, and return what to commit. Repeatable."""
        self._writer.close()
        self._sink.close()
        size = self._root.fs.get_file_info(self._path).size
        return AddFile(self.name, size, json.dumps({"numRecords": self._rows}))


@dataclass(frozen=True, slots=True)
class Packed:
    """One file inside a pack."""

    size: int
    at: Location


class PackReader:
    """Reads packs; keeps the ones it read from open. Not thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._open: dict[str, pq.ParquetFile] = {}

    def __enter__(self) -> PackReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all packs."""
        for pack in self._open.values():
            pack.close(force=True)
        self._open.clear()

    def index(self, pack: str) -> dict[str, Packed]:
        """List what a pack holds, by hash, off its footer alone.

        Raises:
            DamageError: it is missing or not a pack.
        """
        found: dict[str, Packed] = {}
        try:
            metadata = self._pack(pack).metadata
            for row in range(metadata.num_row_groups):
                group = metadata.row_group(row)
                sha256, size, chunk = (group.column(i).statistics.min for i in range(3))
                if chunk == 0:
                    found[sha256] = Packed(size, Location(pack, row, 1))
                else:
                    at = found[sha256].at
                    found[sha256] = Packed(size, Location(pack, at.row, at.chunks + 1))
        except (pa.ArrowException, OSError, AttributeError, KeyError) as error:
            raise DamageError(f"pack {PATH}/{pack} cannot be read: {error}") from error
        return found

    def chunks(self, at: Location, sha256: str, size: int) -> Iterator[bytes]:
        """Read the bytes of one file, checked: the last chunk comes only if size and hash are right.

        Raises:
            DamageError: the pack is missing or torn, or holds other bytes.
        """
        where = f"pack {PATH}/{at.pack}, rows {at.row} to {at.row + at.chunks - 1}"
        digest, count, last = hashlib.sha256(), 0, None
        try:
            pack = self._pack(at.pack)
            for row in range(at.row, at.row + at.chunks):
                column = pack.read_row_group(row, columns=["bytes"]).column(0)
                chunk = column[0].as_py()
                digest.update(chunk)
                count += len(chunk)
                if last is not None:
                    yield last
                last = chunk
        except (pa.ArrowException, OSError, IndexError, TypeError) as error:
            raise DamageError(f"{where} cannot be read: {error}") from error
        if (count, digest.hexdigest()) != (size, sha256):
            raise DamageError(f"{where}: the bytes are not those of sha256 {sha256}")
        if last is not None:
            yield last

    def _pack(self, name: str) -> pq.ParquetFile:
        if name not in self._open:
            if pack_name(name) is None:
                raise DamageError(f"{name!r} is not the name of a pack")
            file = self._root.fs.open_input_file(self._root.path(f"{PATH}/{name}"))
            self._open[name] = pq.ParquetFile(file)
        return self._open[name]


def resolve(
    reader: PackReader, active: Collection[str], files: Iterable[StoredFile]
) -> dict[tuple[str, str], Location]:
    """Find where the bytes of stored files are now; what is in no active pack is left out.

    A manifest names the pack that was written then. Sweeping may have moved the bytes to a merged pack since.

    Args:
        reader: for the footers of merged packs, which are read only if something has moved.
        active: the packs that the log of `state/` names.
        files: as manifests name them.

    Returns:
        By hash and by the pack that the manifest names.
    """
    found: dict[tuple[str, str], Location] = {}
    moved: dict[str, set[str]] = {}
    for file in files:
        if file.at.pack in active:
            found[file.sha256, file.at.pack] = file.at
        else:
            moved.setdefault(file.sha256, set()).add(file.at.pack)
    for pack in sorted(active):
        if not moved:
            break
        if (name := pack_name(pack)) is not None and name.merged:
            inside = reader.index(pack)
            for sha256 in moved.keys() & inside.keys():
                found.update(((sha256, named), inside[sha256].at) for named in moved.pop(sha256))
    return found
