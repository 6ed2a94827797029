"""`state/`: the bytes of state files, kept once each in packs.

A pack is one Parquet data file: rows of (sha256, size, chunk, bytes), chunks of at most 8 MiB in order, one
row group per row, so that a `Location` is read without a scan. Only packs in the table's log count, and those
are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from spark_abs.errors import DamageError
from spark_abs.manifest import Location, StoredFile
from spark_abs.model import RunId
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile

PATH = "state"
CHUNK = 8 * 2**20
Chunk = bytes | memoryview
"""A part of a file, passed on without a copy in memory."""
SCHEMA = pa.schema(
    [("sha256", pa.string()), ("size", pa.int64()), ("chunk", pa.int32()), ("bytes", pa.binary())]
)
_INDEX = ["sha256", "size", "chunk"]
_BYTES = 3
_ONE_VALUE = b"\x02\0\0\0\x02\x01"
"""Definition levels of a page with one non-null value; its length and the value follow."""
_PAGE_HEADER = 96
_PIECE = 256 * 2**10
"""Bytes per read from a local disk. A small buffer is reused; for one of 8 MB the system frees the pages and
clears new ones, which takes longer than the read."""
_END = 64 * 2**10
"""Bytes that are read first from the end of a pack: most footers are shorter."""
_OPEN = 32
"""Most packs that a reader keeps open: more than threads read at a time."""
_NAME = re.compile(r"(pack|merged)-(\d+)-[0-9a-f]{32}\.parquet")


@dataclass(frozen=True, slots=True)
class PackName:
    """The parts of a pack's name."""

    run: RunId
    """The run that wrote the pack. A file of an older run that is not in the log is a leftover."""
    merged: bool
    """Whether sweeping wrote it with files of other packs. Manifests name the other packs, not this one."""


def pack_name(name: str) -> PackName | None:
    """Parse the name of a pack; None for other files."""
    match = _NAME.fullmatch(name)
    return PackName(RunId(int(match[2])), match[1] == "merged") if match else None


class PackWriter:
    """Writes one pack with one chunk at a time in memory.

    The pack is part of `state/` after its `AddFile` is committed.
    """

    def __init__(self, root: Root, run: RunId, *, merged: bool = False) -> None:
        self.name = f"{'merged' if merged else 'pack'}-{int(run)}-{uuid.uuid4().hex}.parquet"
        self._root = root
        self._path = root.path(f"{PATH}/{self.name}")
        self._sink = root.fs.open_output_stream(self._path)
        self._rows = 0
        try:
            self._writer = pq.ParquetWriter(
                self._sink, SCHEMA, compression="NONE", use_dictionary=False, write_statistics=_INDEX
            )
        except OSError:
            self._delete()
            raise

    def add(self, sha256: str, size: int, chunks: Iterable[Chunk]) -> Location:
        """Append the bytes of one file, an empty file as one empty chunk.

        The chunks come from `checked`. If it raises, the pack must be given up.
        """
        first = self._rows
        for number, chunk in enumerate(chunks):
            ends = pa.py_buffer(bytes(4) + len(chunk).to_bytes(4, "little"))
            value = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(chunk)])
            row = pa.record_batch([[sha256], [size], [number], value], schema=SCHEMA)
            self._writer.write_batch(row, row_group_size=1)
            self._rows += 1
        return Location(self.name, first, self._rows - first)

    def close(self) -> AddFile:
        """End the file, and return its entry for the commit. Repeatable."""
        self._writer.close()
        self._sink.close()
        size = self._root.fs.get_file_info(self._path).size
        return AddFile(self.name, size, json.dumps({"numRecords": self._rows}))

    def give_up(self) -> None:
        """Delete the uncommitted file. If that fails, sweeping deletes it later."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._delete()

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._root.fs.delete_file(self._path)


@dataclass(frozen=True, slots=True)
class Packed:
    """One file inside a pack."""

    size: int
    at: Location


def checked(chunks: Iterable[Chunk], sha256: str, size: int, where: str) -> Iterator[Chunk]:
    """Pass chunks on. The last chunk comes only if size and hash of the whole are right.

    Raises:
        DamageError: size or hash is wrong; the message has `where`.
    """
    digest, count, last = hashlib.sha256(), 0, None
    for chunk in chunks:
        digest.update(chunk)
        count += len(chunk)
        if last is not None:
            yield last
        last = chunk
    if (count, digest.hexdigest()) != (size, sha256):
        raise DamageError(f"{where}: the bytes do not have sha256 {sha256}")
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class _Pack:
    """An open pack. Any thread may read `file` at a position."""

    file: pa.NativeFile
    parquet: pq.ParquetFile


class PackReader:
    """Reads packs and keeps the most recent ones open. Thread-safe, except `close`.

    A store that cannot be read now raises `OSError`, which is not damage.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._open: dict[str, _Pack] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> PackReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all packs."""
        for pack in self._open.values():
            pack.parquet.close(force=True)
        self._open.clear()

    def index(self, pack: str) -> dict[str, Packed]:
        """List the files in a pack by hash, from its footer alone. The pack does not stay open.

        Raises:
            DamageError: the file is missing or not a pack.
            OSError: the store cannot be read now.
        """
        found: dict[str, Packed] = {}
        try:
            with self._file(pack) as file:
                metadata = _footer(file, pack)
            for row in range(metadata.num_row_groups):
                group = metadata.row_group(row)
                sha256, size, chunk = (group.column(i).statistics.min for i in range(3))
                if chunk == 0:
                    found[sha256] = Packed(size, Location(pack, row, 1))
                else:
                    at = found[sha256].at
                    found[sha256] = Packed(size, Location(pack, at.row, at.chunks + 1))
        except (pa.ArrowException, FileNotFoundError, AttributeError, KeyError) as error:
            raise DamageError(f"pack {PATH}/{pack} cannot be read: {error}") from error
        return found

    def chunks(self, at: Location, sha256: str, size: int) -> Iterator[Chunk]:
        """Read the bytes of one file in the pack's chunks, verified, to write them to another pack.

        Raises:
            DamageError: the pack is missing or torn, or holds other bytes. Before the last part comes.
            OSError: the store cannot be read now.
        """
        return self._checked(at, sha256, size, None)

    def pieces(self, at: Location, sha256: str, size: int) -> Iterator[Chunk]:
        """Read the bytes of one file, verified, in parts of a size that is fast on its store.

        Raises:
            DamageError: the pack is missing or torn, or holds other bytes. Before the last part comes.
            OSError: the store cannot be read now.
        """
        return self._checked(at, sha256, size, _PIECE if self._root.top.local else None)

    def _checked(self, at: Location, sha256: str, size: int, piece: int | None) -> Iterator[Chunk]:
        where = f"pack {PATH}/{at.pack}, rows {at.row} to {at.row + at.chunks - 1}"
        return checked(self._values(at, where, piece), sha256, size, where)

    def _values(self, at: Location, where: str, piece: int | None) -> Iterator[Chunk]:
        try:
            pack = self._pack(at.pack)
            for row in range(at.row, at.row + at.chunks):
                yield from self._value(pack, row, where, piece)
        except (pa.ArrowException, FileNotFoundError, IndexError, TypeError) as error:
            raise DamageError(f"{where} cannot be read: {error}") from error

    def _value(self, pack: _Pack, row: int, where: str, piece: int | None) -> Iterator[Chunk]:
        """Read one chunk. A page is a header and the plain value, which can be read without a copy.

        A page of another layout is read by the Parquet reader.
        """
        column = pack.parquet.metadata.row_group(row).column(_BYTES)
        start, size = column.data_page_offset, column.total_compressed_size
        step = min(size, piece or size)
        head = pack.file.read_at(step, start)
        if column.compression == "UNCOMPRESSED":
            at = head.find(_ONE_VALUE, 0, _PAGE_HEADER) + len(_ONE_VALUE)
            if at >= len(_ONE_VALUE) and int.from_bytes(head[at : at + 4], "little") == size - at - 4:
                yield memoryview(head)[at + 4 :]
                for offset in range(step, size, step):
                    yield pack.file.read_at(min(step, size - offset), start + offset)
                return
        try:
            with self._lock:
                (value,) = pack.parquet.read_row_group(row, columns=["bytes"]).column(0)
        except OSError as error:  # of the bytes: the store has just given them
            raise DamageError(f"{where} cannot be read: {error}") from error
        yield memoryview(value.as_buffer())

    def _pack(self, name: str) -> _Pack:
        with self._lock:
            pack = self._open.pop(name, None)
            if pack is None:
                file = self._file(name)
                pack = _Pack(file, pq.ParquetFile(file, metadata=_footer(file, name)))
            self._open[name] = pack
            if len(self._open) > _OPEN:
                # The file is closed when the last who reads from it has ended.
                del self._open[next(iter(self._open))]
            return pack

    def _file(self, name: str) -> pa.NativeFile:
        if pack_name(name) is None:
            raise DamageError(f"{name!r} is not the name of a pack")
        return self._root.fs.open_input_file(self._root.path(f"{PATH}/{name}"))


def _footer(file: pa.NativeFile, pack: str) -> pq.FileMetaData:
    """Read the footer's bytes, then parse them: Arrow alone does not say which of the two failed."""
    size = file.size()
    end = file.read_at(min(size, _END), max(size - _END, 0))
    length = int.from_bytes(end[-8:-4], "little") + 8
    if _END < length <= size:
        end = file.read_at(length, size - length)
    try:
        return pq.read_metadata(pa.BufferReader(end))
    except OSError as error:
        raise DamageError(f"pack {PATH}/{pack} cannot be read: {error}") from error


class Index(Protocol):
    """Lists the files in packs."""

    def index(self, pack: str) -> Mapping[str, Packed]:
        """List the files in a pack, by hash."""


def resolve(
    packs: Index, active: Collection[str], files: Iterable[StoredFile]
) -> dict[tuple[str, str], Location]:
    """Find the present locations of stored files. Files in no active pack are left out.

    A manifest names the original pack. Sweeping may have moved the bytes to a merged pack since.

    Args:
        packs: lists the content of merged packs; used only if files have moved.
        active: the packs that the log of `state/` names.
        files: as manifests name them.

    Returns:
        By hash and by the pack that the manifest names.

    Raises:
        DamageError: a file is not found, and a merged pack cannot be read.
        OSError: the store cannot be read now.
    """
    found: dict[tuple[str, str], Location] = {}
    moved: dict[str, set[str]] = {}
    for file in files:
        if file.at.pack in active:
            found[file.sha256, file.at.pack] = file.at
        else:
            moved.setdefault(file.sha256, set()).add(file.at.pack)
    damage: DamageError | None = None
    for pack in sorted(active):
        if not moved:
            break
        if (name := pack_name(pack)) is not None and name.merged:
            try:
                inside = packs.index(pack)
            except DamageError as error:
                damage = damage or error
                continue
            for sha256 in moved.keys() & inside.keys():
                found.update(((sha256, named), inside[sha256].at) for named in moved.pop(sha256))
    if moved and damage is not None:
        raise damage
    return found
