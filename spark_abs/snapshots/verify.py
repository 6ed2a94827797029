"""Verify stored data byte by byte and report damage. No JVM.

Every retained manifest, and every byte that it names, is read and hashed. Data pages of the other tables are
compared with their checksums, and native files with manifests and checksums where they exist. Data with
neither hash nor checksum is reported only if it cannot be read: Parquet footers, commit files and the batches
that Spark has planned since the last checkpoint. Bytes of packs that no manifest names are not read: they are
not needed, and sweeping removes them.

The job may run meanwhile: files that it purges, moves or retires during the check are not damage. A store
that does not answer is not damage either: the caller gets the `OSError`.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from zipfile import BadZipFile, ZipFile

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_abs.errors import DamageError, Refused
from spark_abs.manifest import Location, Manifest, StoredFile
from spark_abs.model import (
    NO_BATCH,
    BatchId,
    ChannelId,
    CheckpointId,
    StageId,
    Version,
    checked_relative,
    is_number,
)
from spark_abs.snapshots.capture import CaptureIncomplete, capture
from spark_abs.snapshots.layout import StateFileKind, state_file
from spark_abs.snapshots.materialise import is_rewritten
from spark_abs.snapshots.packs import PATH, Packed, PackReader, resolve
from spark_abs.snapshots.parallel import for_each
from spark_abs.snapshots.state_storage import active_packs
from spark_abs.store.log import LogCommit, log_file
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """One damaged file, row or table."""

    path: str
    """The path, relative to the root if it is inside."""
    problem: str
    checkpoint: CheckpointId | None = None
    """The checkpoint that cannot be restored because of it."""
    stage: StageId | None = None


def verify_state(
    root: Root, manifests: Iterable[Manifest], progress: Callable[[int], None] = lambda _: None
) -> tuple[Finding, ...]:
    """Read all bytes that manifests name; each byte once, however many checkpoints share it.

    Args:
        root: the job's root.
        manifests: the checkpoints to check.
        progress: told the size of each stored file after it is read.

    Raises:
        OSError: the store cannot be read now.
    """
    manifests = tuple(manifests)
    first = _verify_state(root, manifests, progress)
    # Sweeping may have moved bytes after the log was read: what is damage is so on a second look too.
    return first and _verify_state(root, manifests, lambda _: None)


def _verify_state(
    root: Root, manifests: tuple[Manifest, ...], progress: Callable[[int], None]
) -> tuple[Finding, ...]:
    files = [f for m in manifests for s in m.stages for f in s.files]
    problems: dict[tuple[str, str], str | None] = {}
    findings: list[Finding] = []
    with PackReader(root) as reader:
        try:
            table = Table.open(root.place(PATH))
            where = resolve(reader, active_packs(table), files)
        except FileNotFoundError:
            where = {}
        except DamageError as error:
            return tuple(Finding(PATH, str(error), m.id) for m in manifests)

        def read(file: StoredFile) -> None:
            at = where.get((file.sha256, file.at.pack))
            problems[file.sha256, file.at.pack] = "missing" if at is None else _problem(reader, at, file)

        distinct = {(f.sha256, f.at.pack): f for f in files}
        in_order = sorted(distinct.values(), key=lambda file: (file.at.pack, file.at.row))
        for_each(in_order, read, lambda file: progress(file.size))
    for manifest in manifests:
        for stage in manifest.stages:
            for file in stage.files:
                key = (file.sha256, file.at.pack)
                if (problem := problems[key]) is not None:
                    pack = f"{PATH}/{where[key].pack if key in where else file.at.pack}"
                    findings.append(Finding(pack, f"{problem} ({file.path})", manifest.id, stage.stage))
    return tuple(findings)


def verify_packs(root: Root, manifests: Iterable[Manifest]) -> tuple[Finding, ...]:
    """Check that the footers of packs list the files that manifests name: sweeping relies on footers."""
    manifests = tuple(manifests)
    first = _verify_packs(root, manifests)
    return first and _verify_packs(root, manifests)


def _verify_packs(root: Root, manifests: tuple[Manifest, ...]) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    indexes: dict[str, Mapping[str, Packed]] = {}
    with PackReader(root) as reader:
        try:
            active = active_packs(Table.open(root.place(PATH)))
        except (FileNotFoundError, DamageError):
            return ()  # said by who reads the bytes
        for manifest in manifests:
            for stage in manifest.stages:
                for file in stage.files:
                    if (pack := file.at.pack) not in active:
                        continue
                    if pack not in indexes:
                        try:
                            indexes[pack] = reader.index(pack)
                        except DamageError:
                            indexes[pack] = {}
                    if indexes[pack].get(file.sha256) != Packed(file.size, file.at):
                        problem = f"its footer lacks sha256 {file.sha256} ({file.path})"
                        findings.append(Finding(f"{PATH}/{pack}", problem, manifest.id, stage.stage))
    return tuple(findings)


def _problem(reader: PackReader, at: Location, file: StoredFile) -> str | None:
    try:
        for _ in reader.pieces(at, file.sha256, file.size):
            pass
    except DamageError as error:
        return str(error)
    return None


def verify_table(root: Root, relative: str) -> tuple[Finding, ...]:
    """Read every data file of a table and compare its pages with their checksums, if it has any.

    Raises:
        OSError: the store cannot be read now.
    """
    try:
        table = Table.open(root.place(relative))
    except FileNotFoundError:
        return (Finding(relative, "missing"),)
    except DamageError as error:
        return (Finding(relative, str(error)),)
    findings = []
    for name, size in active_packs(table).items():
        path = f"{relative}/{checked_relative(name)}"
        if (problem := _parquet_problem(root, path, size)) is not None:
            findings.append(Finding(path, problem))
    table.refresh()
    still = active_packs(table)
    return tuple(f for f in findings if f.path.removeprefix(f"{relative}/") in still)


def _any(_: LogCommit) -> bool:
    return True


def verify_channel(
    root: Root, channel: ChannelId, after: Version, is_read: Callable[[LogCommit], bool] = _any
) -> tuple[Finding, ...]:
    """Check that each entry after a version exists with complete data files. Their pages are read.

    Args:
        root: the job's root.
        channel: the channel.
        after: the last entry that its slowest reader has consumed.
        is_read: whether readers open the files of an entry; they pass over others, whose files may be gone.

    Raises:
        OSError: the store cannot be read now.
    """
    relative = root.channel(channel)
    try:
        table = Table.open(root.place(relative))
    except FileNotFoundError:
        return (Finding(relative, "missing"),)
    except DamageError as error:
        return (Finding(relative, str(error)),)
    findings = []
    for version in range(after + 1, table.version + 1):
        log = f"{relative}/{log_file(version)}"
        try:
            commit = table.read_commit(version)
            adds = commit.adds if commit is not None and is_read(commit) else ()
        except DamageError as error:
            findings.append(Finding(log, str(error)))
            continue
        if commit is None:
            findings.append(Finding(log, "missing"))
        for file in adds:
            path = f"{relative}/{checked_relative(file.path)}"
            if (problem := _parquet_problem(root, path, file.size)) is not None:
                findings.append(Finding(path, problem))
    return tuple(findings)


def verify_native(native: Place, stored: Iterable[StoredFile] = ()) -> tuple[Finding, ...]:
    """Check a stage's native checkpoint: that a start from its last batch is possible, and the known bytes.

    Bytes are known from Spark's checksum files on a local disk, from manifests, and for RocksDB's snapshots
    from the checksums inside.

    Args:
        native: the checkpoint directory.
        stored: files of the stage in manifests: all files of the manifest that the directory was materialised
            from, and the `written_once` files of manifests captured from the directory.
    """
    filesystem, base = native.fs, native.path
    if filesystem.get_file_info(base).type is not fs.FileType.Directory:
        return (Finding(native.uri, "missing"),)
    by_path = {f.path: f for f in stored if not is_rewritten(f.path) and not f.path.endswith(_SCHEMA)}
    findings = []
    for path, sidecar in sorted(_files(filesystem, base).items()):
        try:
            if sidecar is not None:
                problem = _crc_problem(filesystem, f"{base}/{path}", f"{base}/{sidecar}")
            elif path in by_path:
                problem = _sha_problem(filesystem, f"{base}/{path}", by_path[path])
            elif path.endswith(".zip"):
                problem = _zip_problem(filesystem, f"{base}/{path}")
            else:
                continue
        except FileNotFoundError:
            continue
        if problem is not None:
            findings.append(Finding(f"{native}/{path}", problem))
    newest = _newest_commit(filesystem, base)
    ends = (path for path in by_path if path.startswith("commits/"))
    findings += [Finding(f"{native}/{p}", "missing") for p in ends if int(p.partition("/")[2]) > newest]
    start = _start_problem(filesystem, base)
    return tuple(findings) if start is None else (*findings, Finding(native.uri, start))


def written_once(path: str) -> bool:
    """Say whether Spark never rewrites a file of a native checkpoint after the end of the file's batch.

    Snapshots of a store may be uploaded late, by an executor that repeats their batch.
    """
    parent, _, name = path.rpartition("/")
    if path.startswith("state/"):
        state = state_file(name)
        return parent.endswith(("/SSTs", "/logs")) or (
            state is not None and state.kind is StateFileKind.CHANGES
        )
    return path.startswith(("offsets/", "commits/", "sources/"))


def _files(filesystem: fs.FileSystem, base: str) -> dict[str, str | None]:
    """List files with their checksum files, and files of which only the checksum file is left."""
    selector = fs.FileSelector(base, recursive=True)
    infos = filesystem.get_file_info(selector)
    paths = [i.path.removeprefix(f"{base}/") for i in infos if i.type is fs.FileType.File]
    found: dict[str, str | None] = {}
    for path in paths:
        parent, slash, name = path.rpartition("/")
        if match := _SIDECAR.fullmatch(name):
            found[f"{parent}{slash}{match[1]}"] = path
        elif not name.startswith("."):
            found.setdefault(path, None)
    return found


_SIDECAR = re.compile(r"\.([^.].*)\.crc")
_SCHEMA = "/_metadata/schema"
"""A file that Spark rewrites when the schema of state changes."""


def _crc_problem(filesystem: fs.FileSystem, path: str, sidecar: str) -> str | None:
    with filesystem.open_input_stream(sidecar) as stream:
        sums = bytes(stream.read())
    if sums[:4] != b"crc\0" or len(sums) % 4 or len(sums) < 8:
        return "its checksum file is torn"
    (step,) = struct.unpack_from(">i", sums, 4)
    wanted = struct.unpack_from(f">{len(sums) // 4 - 2}I", sums, 8)
    if filesystem.get_file_info(path).type is fs.FileType.NotFound:
        gone = filesystem.get_file_info(sidecar).type is fs.FileType.NotFound
        return None if gone else "missing"
    count = 0
    with filesystem.open_input_stream(path) as stream:
        for block in iter(lambda: bytes(stream.read(step)), b""):
            if count >= len(wanted) or zlib.crc32(block) != wanted[count]:
                return f"altered: bytes {count * step} to {count * step + len(block)} have a wrong checksum"
            count += 1
    return None if count == len(wanted) else f"torn: it ends after {count * step} bytes or less"


def _sha_problem(filesystem: fs.FileSystem, path: str, stored: StoredFile) -> str | None:
    digest = hashlib.sha256()
    with filesystem.open_input_stream(path) as stream:
        for block in iter(lambda: bytes(stream.read(_BLOCK)), b""):
            digest.update(block)
    return None if digest.hexdigest() == stored.sha256 else "altered: it is not what the manifest names"


def _zip_problem(filesystem: fs.FileSystem, path: str) -> str | None:
    try:
        with filesystem.open_input_file(path) as file, ZipFile(_Reads(file)) as archive:
            spoilt = archive.testzip()
    except (BadZipFile, EOFError, zlib.error) as error:
        return f"altered: {error}"
    return None if spoilt is None else f"altered: the checksum of {spoilt} in it is wrong"


def _start_problem(filesystem: fs.FileSystem, base: str) -> str | None:
    """Return why a query could not resume after the last finished batch; None if it could."""
    while (batch := _newest_commit(filesystem, base)) != NO_BATCH:
        try:
            capture(filesystem, base, batch)
        except (CaptureIncomplete, DamageError, Refused) as error:
            if _newest_commit(filesystem, base) != batch:
                continue
            return str(error)
        return None
    return None


def _newest_commit(filesystem: fs.FileSystem, base: str) -> BatchId:
    selector = fs.FileSelector(f"{base}/commits", allow_not_found=True)
    names = (info.base_name for info in filesystem.get_file_info(selector))
    return max((BatchId(int(name)) for name in names if is_number(name)), default=NO_BATCH)


def _parquet_problem(root: Root, path: str, size: int) -> str | None:
    info = root.fs.get_file_info(root.path(path))
    if info.type is fs.FileType.NotFound:
        return "missing"
    if info.size != size:
        return f"torn: it has {info.size} bytes, the log says {size}"
    try:
        file = _Reads(root.fs.open_input_file(root.path(path)))
    except FileNotFoundError:
        return "missing"
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        for group in range(parquet.num_row_groups):
            parquet.read_row_group(group)
    except (pa.ArrowException, OSError, ValueError) as error:
        if file.failure is not None:
            raise file.failure from None
        return f"altered: {error}"
    finally:
        file.close()
    return None


class _Reads:
    """A file that remembers its read errors: Arrow does not distinguish them from wrong bytes.

    It asks a store for nothing but bytes that there are: Google's refuses a position at the end of a file.
    """

    def __init__(self, file: pa.NativeFile) -> None:
        self._file, self._at = file, 0
        self.failure: OSError | None = None
        self.close = file.close

    @property
    def closed(self) -> bool:
        """Whether it is closed; Arrow asks for it."""
        return bool(self._file.closed)

    def seekable(self) -> bool:
        """Say that there are positions."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size()}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes from the present position; all that there are if it is negative."""
        left = max(0, self._file.size() - self._at)
        wanted = left if size < 0 else min(size, left)
        try:
            data = bytes(self._file.read_at(wanted, self._at)) if wanted else b""
        except OSError as error:
            self.failure = error
            raise
        self._at += len(data)
        return data
