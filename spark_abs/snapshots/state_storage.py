"""The writer's handle on `state/`: its packs, the pins of open captures, and new packs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import fs

from spark_abs.errors import AbsError, DamageError
from spark_abs.manifest import Location, Manifest, StoredFile
from spark_abs.model import CheckpointId, RunId
from spark_abs.snapshots.capture import CapturedFile
from spark_abs.snapshots.packs import (
    CHUNK,
    PATH,
    SCHEMA,
    Chunk,
    Packed,
    PackReader,
    PackWriter,
    checked,
    pack_name,
    resolve,
)
from spark_abs.snapshots.pins import Pins, follow
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.fence import require_newest, run_fence
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile, Commit, Table

log = logging.getLogger(__name__)

HELD = 96 * 2**20
"""Files up to this size, larger than RocksDB's, are held in memory between hashing and packing, two at a
time. A larger file is read twice, since the rows of a pack begin with the hash of the whole file."""


class StaleCapture(AbsError):
    """A captured file was replaced or purged before it was copied: the capture must be repeated."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The result of one copy: the stored files, and how many bytes were new."""

    files: tuple[StoredFile, ...]
    size_new: int


@dataclass(frozen=True, slots=True)
class _NewPack:
    """A pack that is written and not yet committed."""

    checkpoint: CheckpointId
    directory: str
    """Where its files were copied from."""
    add: AddFile
    fresh: Mapping[str, Location]
    """Its files, by hash."""
    committed: Future[None] = field(default_factory=Future)


class StateStorage:
    """`state/` as one run writes it. Thread-safe; one per process and root.

    All bytes that a capture names or reuses are pinned under the checkpoint's id until `unpin`, so that
    sweeping cannot remove them before the manifest names them. Pins of an aborted checkpoint stay until the
    next capture of the same stage is complete, which then need not copy them again.
    """

    def __init__(
        self, root: Root, job: str, run: RunId, table: Table, failpoint: Failpoint = no_failpoint
    ) -> None:
        self.root = root
        self.run = run
        self._job = job
        self._table = table
        self._failpoint = failpoint
        self.lock = threading.RLock()
        """Held while sweeping: nothing is pinned, released or committed meanwhile."""
        self._known: dict[str, Location] = {}
        self._pins = Pins()
        self._writing: set[str] = set()
        self._new: deque[_NewPack] = deque()
        """The packs that wait for their commit."""
        self._hashes: dict[str, dict[CapturedFile, str]] = {}
        self._indexes: dict[str, Mapping[str, Packed]] = {}
        self._damaged: set[str] = set()
        self._distrusted: set[str] = set()
        self._holding = threading.BoundedSemaphore(2)

    @classmethod
    def open(
        cls,
        root: Root,
        job: str,
        run: RunId,
        manifests: Sequence[Manifest] = (),
        failpoint: Failpoint = no_failpoint,
    ) -> StateStorage:
        """Open `state/` for a run, create it if it does not exist, and fence older runs.

        Args:
            root: the job's root.
            job: its name.
            run: this run.
            manifests: the retained manifests: bytes that they name are not written again, unless their pack
                is damaged.
            failpoint: called at named points; for tests of failures.

        Raises:
            Fenced: a newer run has opened it already.
            OSError: the store cannot be read now.
        """
        storage = cls(root, job, run, Table.ensure(root.place(PATH), SCHEMA), failpoint)
        with storage.lock:
            storage._table.commit(lambda table: run_fence(table, job, run))
            active = active_packs(storage._table)
            whole = storage._whole(active)
            files = (f for m in manifests for s in m.stages for f in s.files)
            where = resolve(storage, active, files)
            storage._known = {sha256: at for (sha256, _), at in where.items() if at.pack in whole}
        return storage

    def store(
        self,
        checkpoint: CheckpointId,
        filesystem: fs.FileSystem,
        directory: str,
        files: Iterable[CapturedFile],
    ) -> Stored:
        """Copy captured files that `state/` does not have yet into it, as one pack in one commit.

        A kill leaves a pack without a commit, which sweeping removes; a copy that fails before its commit
        deletes its pack. A repeated copy finds all files stored. The bytes stay pinned until
        `unpin(checkpoint)`.

        Raises:
            StaleCapture: a file has changed since the capture; files copied before it are kept.
            Fenced: a newer run owns the root.
            CommitStateUnknown: the outcome of the commit is unknown; the checkpoint must be declined.
            OSError: the store cannot be read or written now.
        """
        hashes: dict[CapturedFile, str] = {}
        fresh: dict[str, Location] = {}
        stored: list[StoredFile] = []
        size_new = 0
        writer: PackWriter | None = None
        whole, tried = True, False
        known_hashes = self._hashes.get(directory, {})
        try:
            for file in files:
                with self._holding if CHUNK < file.size <= HELD else contextlib.nullcontext():
                    data: Sequence[bytes] = ()
                    if (sha256 := known_hashes.get(file)) is None:
                        sha256, data = _hash(filesystem, directory, file)
                    hashes[file] = sha256
                    at = fresh.get(sha256) or self._reuse(checkpoint, directory, sha256)
                    if at is None:
                        writer = writer or self._begin()
                        chunks = data or _again(filesystem, directory, file, sha256)
                        whole = False
                        at = fresh[sha256] = writer.add(sha256, file.size, chunks)
                        whole = True
                        size_new += file.size
                    stored.append(StoredFile(file.path, file.size, sha256, at))
            if writer is not None:
                add = writer.close()
                self._failpoint("capture.pack.commit.before")
                tried = True
                self._commit(checkpoint, directory, add, fresh)
        except StaleCapture:
            if writer is not None and whole:
                add = writer.close()
                tried = True
                self._commit(checkpoint, directory, add, fresh)
            raise
        finally:
            if writer is not None:
                # One whose commit was tried may have it, whatever the store said: sweeping finds out.
                if not tried:
                    writer.give_up()
                with self.lock:
                    self._writing.discard(writer.name)
        self._hashes[directory] = hashes
        with self.lock:
            self._pins.captured(directory)
        return Stored(tuple(stored), size_new)

    def copied(self, directory: str) -> frozenset[CapturedFile]:
        """Return the files of a directory's last copy whose bytes still exist."""
        with self.lock:
            hashes = self._hashes.get(directory, {})
            return frozenset(file for file, sha256 in hashes.items() if sha256 in self._known)

    def unpin(self, checkpoint: CheckpointId, *, completed: bool) -> None:
        """Release the pins of a checkpoint, once its outcome is durable. Repeatable."""
        with self.lock:
            self._pins.unpin(checkpoint, completed=completed)

    def missing(self, files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
        """Return the files whose bytes `state/` has lost. Called before a manifest is committed.

        Checks the log and the size of each pack, not the bytes. The next captures copy missing files again.
        """
        files = tuple(files)
        with self.lock:
            active = self.active()
            found = resolve(self, active, files)
            whole = self._whole(active)
            there = {key for key, at in found.items() if at.pack in whole}
            missing = tuple(f for f in files if (f.sha256, f.at.pack) not in there)
            for file in missing:
                self._known.pop(file.sha256, None)
        return missing

    def active(self) -> dict[str, int]:
        """Return the packs in the log, with their sizes."""
        with self.lock:
            self._table.refresh()
            return active_packs(self._table)

    def pinned(self) -> set[tuple[str, str]]:
        """Return hash and pack of each file that open captures name, or that the next capture may reuse."""
        with self.lock:
            return self._pins.pinned()

    def index(self, pack: str) -> Mapping[str, Packed]:
        """Return the files in a pack, by hash; none if it is damaged. Its footer is read once in a run.

        Raises:
            DamageError: the log has a file that is not a pack.
            OSError: the store cannot be read now.
        """
        with self.lock:
            if pack not in self._indexes:
                try:
                    self._indexes[pack] = PackReader(self.root).index(pack)
                except DamageError as error:
                    if pack_name(pack) is None:
                        raise
                    self._forget({pack: str(error)})
                    return {}
            return self._indexes[pack]

    def read_indexes(self) -> None:
        """Read the footers that `indexes` needs while captures go on; a damaged pack is left to `indexes`.

        Raises:
            OSError: the store cannot be read now.
        """
        with self.lock:
            unread = self.active().keys() - self._indexes.keys()
        for pack in sorted(unread):
            with contextlib.suppress(DamageError):
                index = PackReader(self.root).index(pack)
                with self.lock:
                    self._indexes.setdefault(pack, index)

    def indexes(self) -> Mapping[str, Mapping[str, Packed]]:
        """Return the files in each intact active pack, by hash.

        Raises:
            DamageError: the log has a file that is not a pack.
            OSError: the store cannot be read now; packs that were already read are not read again.
        """
        with self.lock:
            active = self.active()
            whole = self._whole(active)
            found = {pack: self.index(pack) for pack in active}
            self._indexes = {pack: inside for pack, inside in found.items() if inside}
            return {p: inside for p, inside in self._indexes.items() if p in whole - self._distrusted}

    def distrust(self, pack: str, problem: str) -> None:
        """Count a pack with altered bytes as damaged for the rest of the run, although its size is right."""
        with self.lock:
            self._distrusted.add(pack)
            self._forget({pack: problem})

    def replace(
        self, removed: Collection[str], merged: AddFile | None, moved: Mapping[str, Location]
    ) -> None:
        """Replace packs in the log by a merged pack, in one commit. The caller holds `lock`.

        Raises:
            Fenced: a newer run owns the root; nothing was changed.
            CommitStateUnknown: the store did not say.
        """
        commit = Commit([merged] if merged else [], removes=sorted(removed))
        self._table.commit(lambda table: self._if_current(table, commit))
        gone = frozenset(removed)
        follow(self._known, gone, moved)
        self._pins.move(gone, moved)

    def leftovers(self) -> tuple[str, ...]:
        """Return the pack files that no commit names and that no copy of this process is writing.

        Packs of a newer run are never included.
        """
        with self.lock:
            selector = fs.FileSelector(self.root.path(PATH))
            names = {info.base_name for info in self.root.fs.get_file_info(selector)}
            unnamed = names - self.active().keys() - self._writing
            return tuple(n for n in sorted(unnamed) if (name := pack_name(n)) and name.run <= self.run)

    def _begin(self) -> PackWriter:
        with self.lock:
            writer = PackWriter(self.root, self.run)
            self._writing.add(writer.name)
            return writer

    def _reuse(self, checkpoint: CheckpointId, directory: str, sha256: str) -> Location | None:
        with self.lock:
            at = self._known.get(sha256)
            if at is not None:
                self._pins.pin(checkpoint, directory, {sha256: at})
            return at

    def _whole(self, active: Mapping[str, int]) -> frozenset[str]:
        """Return the packs in the log whose files exist with the right size. Only these are reused."""
        whole = whole_packs(self.root, active)
        self._forget({pack: f"pack {PATH}/{pack} is missing or torn" for pack in active.keys() - whole})
        return whole

    def _forget(self, damaged: Mapping[str, str]) -> None:
        """Do not reuse damaged packs. Warn of each once, with its problem."""
        for pack in sorted(damaged.keys() - self._damaged):
            log.warning(
                "%s: the next checkpoints copy again the files that they need from it; older checkpoints "
                "that need it cannot be restored, `spark-abs verify` lists them",
                damaged[pack],
            )
        if damaged:
            self._damaged |= damaged.keys()
            self._known = {sha256: at for sha256, at in self._known.items() if at.pack not in damaged}

    def _commit(
        self, checkpoint: CheckpointId, directory: str, add: AddFile, fresh: Mapping[str, Location]
    ) -> None:
        """Commit a new pack, together with all packs that wait for the lock meanwhile.

        Raises:
            Fenced, CommitStateUnknown, OSError: as of the commit, for each pack that was to be in it.
        """
        mine = _NewPack(checkpoint, directory, add, fresh)
        self._new.append(mine)
        with self.lock:
            if not mine.committed.done():
                self._commit_new()
        mine.committed.result()

    def _commit_new(self) -> None:
        """Commit all packs that wait, in one commit, and tell each. The caller holds `lock`."""
        together = [self._new.popleft() for _ in range(len(self._new))]
        try:
            commit = Commit([pack.add for pack in together])
            self._table.commit(lambda table: self._if_current(table, commit))
        except BaseException as error:  # noqa: BLE001 - a panic of deltalake, too: others wait for the outcome
            for pack in together:
                pack.committed.set_exception(error)
            return
        for pack in together:
            self._known.update(pack.fresh)
            self._pins.pin(pack.checkpoint, pack.directory, pack.fresh)
            pack.committed.set_result(None)

    def _if_current(self, table: Table, commit: Commit) -> Commit:
        """Return `commit` unless a newer run has fenced this run."""
        require_newest(table, self._job, self.run)
        return commit


def active_packs(table: Table) -> dict[str, int]:
    """Return the packs in the log of `state/`, with their sizes, as of the loaded version."""
    actions = pa.table(table.delta.get_add_actions(flatten=True))
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


def locate(root: Root, reader: PackReader, files: Sequence[StoredFile]) -> dict[tuple[str, str], Location]:
    """Find the present locations of all these files, by hash and by the pack that the manifest names.

    Raises:
        DamageError: the bytes of a file are in no pack any more; the message names the file.
    """
    try:
        active = active_packs(Table.open(root.place(PATH)))
    except FileNotFoundError as error:
        raise DamageError(f"{root.uri}/{PATH} is missing") from error
    where = resolve(reader, active, files)
    for file in files:
        if (file.sha256, file.at.pack) not in where:
            raise DamageError(f"{PATH}/ no longer has the bytes of {file.path} (sha256 {file.sha256})")
    return where


def whole_packs(root: Root, sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the packs whose files exist with the size in the log. Costs one listing."""
    infos = root.fs.get_file_info(fs.FileSelector(root.path(PATH)))
    there = {info.base_name: info.size for info in infos}
    return frozenset(pack for pack, size in sizes.items() if there.get(pack) == size)


def _hash(filesystem: fs.FileSystem, directory: str, file: CapturedFile) -> tuple[str, Sequence[bytes]]:
    """Hash a file; return its chunks too unless the file is too large to hold."""
    digest, count, held = hashlib.sha256(), 0, list[bytes]()
    for data in _chunks(filesystem, directory, file):
        digest.update(data)
        count += len(data)
        if max(file.size, count) <= HELD:
            held.append(data)
    info = filesystem.get_file_info(f"{directory}/{file.path}")
    if not (count == info.size == file.size and (info.mtime_ns or 0) == file.modified_ns):
        raise StaleCapture(f"{file.path} changed while it was copied")
    return digest.hexdigest(), held


def _again(filesystem: fs.FileSystem, directory: str, file: CapturedFile, sha256: str) -> Iterator[Chunk]:
    try:
        yield from checked(_chunks(filesystem, directory, file), sha256, file.size, file.path)
    except DamageError as error:
        raise StaleCapture(f"{file.path} changed while it was copied") from error


def _chunks(filesystem: fs.FileSystem, directory: str, file: CapturedFile) -> Iterator[bytes]:
    try:
        # Bytes as they are, whatever the name ends with.
        with filesystem.open_input_stream(f"{directory}/{file.path}", compression=None) as stream:
            yield bytes(stream.read(CHUNK))
            while chunk := bytes(stream.read(CHUNK)):
                yield chunk
    except FileNotFoundError as error:
        raise StaleCapture(f"{file.path} was purged before it was copied") from error
