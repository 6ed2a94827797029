"""Which files of a state store load a version. Pure, except for a callback that reads small files."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

from spark_abs.errors import DamageError, Refused
from spark_abs.model import Provider
from spark_abs.snapshots.layout import StateFile, StateFileKind, state_file
from spark_abs.snapshots.lineage import LineageItem, decompress_head, parse_lineage

Read = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version to load from one store."""

    provider: Provider
    version: int
    """State version: the batch of the cut + 1."""
    unique_ids: frozenset[str] | None
    """State format 2: the ids in the cut's commit for the partition, of all its stores."""
    codec: str


def files_of_version(
    wanted: Wanted,
    sizes: Mapping[str, int],
    read: Read,
    read_head: Read,
    kept: AbstractSet[str] = frozenset(),
) -> tuple[str, ...]:
    """Choose a snapshot at or below the version, the files that it refers to, and the changes after it.

    It is the newest snapshot, unless an older one is already stored and needs fewer new bytes (P12). The
    changes since must then be at most half of the files that it refers to, so that loading stays quick. A
    file newer than the version is never chosen: the store would silently load it.

    Args:
        wanted: the version to load.
        sizes: each file of the store with its size; names are relative to its directory (`SSTs/…` included).
        read: reads a whole file of the store.
        read_head: reads the beginning of a file.
        kept: the files that need not be copied.

    Raises:
        LookupError: a file that the version needs is missing; the message names it.
        DamageError: a file does not have Spark's format.
        Refused: a codec or changelog version that is not known.
    """
    found = [f for f in map(state_file, sizes) if f is not None]
    if wanted.unique_ids is None:
        ways = _by_version(wanted.version, [f for f in found if f.unique_id is None])
    else:
        ways = _by_lineage(
            wanted, wanted.unique_ids, found, lambda name: _lineage(name, wanted, read, read_head)
        )

    def size_of(names: Iterable[str]) -> int:
        return sum(sizes[name] for name in names)

    def based_on(way: _Way) -> tuple[str, ...]:
        if way.snapshot is None:
            return ()
        name = way.snapshot.name
        refers = _referred(name, read(name), sizes) if wanted.provider is Provider.ROCKSDB else []
        return (name, *refers)

    newest, *older = ways
    chosen = (*newest.changes, *based_on(newest))
    for way in older:
        if way.snapshot is None or way.snapshot.name not in kept:
            continue
        try:
            base = based_on(way)
        except LookupError:
            continue
        names = (*way.changes, *base)
        quick = 2 * size_of(way.changes) <= size_of(base)
        if quick and size_of(set(names) - kept) < size_of(set(chosen) - kept):
            chosen = names
    return chosen


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to load a version: a snapshot, if any, and the changes after it."""

    snapshot: StateFile | None
    changes: tuple[str, ...]


def _by_version(version: int, found: Iterable[StateFile]) -> tuple[_Way, ...]:
    """Return the ways to load a version, the newest snapshot first."""
    snapshots = {f.version: f for f in found if f.kind is StateFileKind.SNAPSHOT}
    changes = {f.version: f.name for f in found if f.kind is StateFileKind.CHANGES}
    bases = sorted((v for v in snapshots if v <= version), reverse=True) or [0]
    needed = range(bases[0] + 1, version + 1)
    if missing := [v for v in needed if v not in changes]:
        raise LookupError(
            f"version {version} cannot be loaded: {missing[0]}.changelog or {missing[0]}.delta, which "
            f"follows snapshot {bases[0]}, is missing"
        )
    first = min(takewhile(lambda v: v in changes, range(version, 0, -1)), default=version + 1)
    return tuple(
        _Way(snapshots.get(base), tuple(changes[v] for v in range(base + 1, version + 1)))
        for base in bases
        if base + 1 >= first
    )


def _lineage(name: str, wanted: Wanted, read: Read, read_head: Read) -> tuple[LineageItem, ...]:
    """Read the lineage of a changelog, from the whole file if its first block is longer than the head."""
    try:
        return parse_lineage(decompress_head(read_head(name), wanted.codec))
    except DamageError:
        return parse_lineage(decompress_head(read(name), wanted.codec))


def _by_lineage(
    wanted: Wanted,
    unique_ids: frozenset[str],
    found: Iterable[StateFile],
    lineage_of: Callable[[str], tuple[LineageItem, ...]],
) -> tuple[_Way, ...]:
    """Return the ways to load a version along its lineage, the newest snapshot first.

    After a snapshot Spark begins a new lineage with it: then there is only one way.
    """
    by_id = {(f.kind, f.version, f.unique_id): f for f in found}
    targets = {f.unique_id for f in found if f.version == wanted.version and f.unique_id in unique_ids}
    if len(targets) != 1:
        raise LookupError(f"the commit has {len(targets)} ids for version {wanted.version}, not one")
    target = LineageItem(wanted.version, str(targets.pop()))
    newest = by_id.get((StateFileKind.CHANGES, target.version, target.unique_id))
    lineage: tuple[LineageItem, ...] = ()
    try:
        if newest is not None:
            lineage = lineage_of(newest.name)
    except (DamageError, Refused):
        if (StateFileKind.SNAPSHOT, target.version, target.unique_id) not in by_id:
            raise
    ways, changes = list[_Way](), list[str]()
    for item in reversed((*lineage, target)):
        if snapshot := by_id.get((StateFileKind.SNAPSHOT, item.version, item.unique_id)):
            ways.append(_Way(snapshot, tuple(changes)))
        change = by_id.get((StateFileKind.CHANGES, item.version, item.unique_id))
        if change is None or item.version != wanted.version - len(changes):
            if ways:
                return tuple(ways)
            raise LookupError(
                f"version {item.version}_{item.unique_id} has neither a changelog nor a snapshot"
            )
        changes.insert(0, change.name)
    if wanted.version - len(changes) > 0 and not ways:
        raise LookupError(f"version {wanted.version} has no snapshot to start from")
    return tuple(ways) or (_Way(None, tuple(changes)),)


def _referred(name: str, data: bytes, sizes: Mapping[str, int]) -> list[str]:
    """Return the SST and log files that a RocksDB snapshot's metadata refers to."""
    referred = []
    for path, size in snapshot_references(name, data).items():
        if path not in sizes:
            raise LookupError(f"snapshot {name} needs {path}, which is missing")
        if sizes[path] != size:
            raise DamageError(f"{path} has {sizes[path]} bytes, the metadata of snapshot {name} says {size}")
        referred.append(path)
    return referred


def snapshot_references(name: str, data: bytes) -> dict[str, int]:
    """Read the files that a RocksDB snapshot refers to: paths relative to the store, with their sizes.

    Raises:
        DamageError: it is not a snapshot of Spark's format, or it is cut off.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            text = archive.read("metadata").decode()
        plain = json.loads(text.partition("\n")[2])
        files = {f"SSTs/{f['dfsSstFileName']}": int(f["sizeBytes"]) for f in plain["sstFiles"]}
        logs = {f"logs/{f['dfsLogFileName']}": int(f["sizeBytes"]) for f in plain.get("logFiles") or ()}
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise DamageError(f"snapshot {name} cannot be read: {error}") from error
    return files | logs
