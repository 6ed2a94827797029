"""Which files of one state store load a version: pure but for a callback that reads small files."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from spark_abs.errors import DamageError
from spark_abs.snapshots.layout import Provider, StateFile, StateFileKind, state_file
from spark_abs.snapshots.lineage import LineageItem, decompress_head, parse_lineage

Read = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version to load from one store."""

    provider: Provider
    version: int
    """State version: the batch of the cut + 1."""
    unique_ids: frozenset[str] | None
    """State format 2: the ids that the cut's commit gives for the partition, over all its stores."""
    codec: str


def files_of_version(
    wanted: Wanted, sizes: Mapping[str, int], read: Read, read_head: Read
) -> tuple[str, ...]:
    """Choose the newest snapshot at or below the version, what it refers to, and the changes after it.

    A newer file is never chosen: a store that finds one reads it in silence.

    Args:
        wanted: what to load.
        sizes: every file of the store, names relative to its directory (`SSTs/…` included), with its size.
        read: reads a file of the store whole.
        read_head: reads the beginning of one.

    Raises:
        LookupError: a file that the version needs is not there; the message says which.
        DamageError: a file is not what Spark writes.
        Refused: a codec or changelog version that is not known.
    """
    found = [f for f in map(state_file, sizes) if f is not None]
    if wanted.unique_ids is None:
        snapshot, changes = _by_version(wanted.version, [f for f in found if f.unique_id is None])
    else:
        snapshot, changes = _by_lineage(wanted, wanted.unique_ids, found, read_head)
    names = [f.name for f in changes]
    if snapshot is not None:
        names.append(snapshot.name)
        if wanted.provider is Provider.ROCKSDB:
            names.extend(_referred(snapshot.name, read(snapshot.name), sizes))
    return tuple(names)


def _by_version(version: int, found: Iterable[StateFile]) -> tuple[StateFile | None, list[StateFile]]:
    snapshots = {f.version: f for f in found if f.kind is StateFileKind.SNAPSHOT}
    changes = {f.version: f for f in found if f.kind is StateFileKind.CHANGES}
    base = max((v for v in snapshots if v <= version), default=0)
    missing = [v for v in range(base + 1, version + 1) if v not in changes]
    if missing:
        raise LookupError(f"no changes of version {missing[0]} after snapshot {base}, for version {version}")
    return snapshots.get(base), [changes[v] for v in range(base + 1, version + 1)]


def _by_lineage(
    wanted: Wanted, unique_ids: frozenset[str], found: Iterable[StateFile], read_head: Read
) -> tuple[StateFile | None, list[StateFile]]:
    by_id = {(f.kind, f.version, f.unique_id): f for f in found}
    targets = {f.unique_id for f in found if f.version == wanted.version and f.unique_id in unique_ids}
    if len(targets) != 1:
        raise LookupError(f"{len(targets)} versions {wanted.version} among the ids of the commit, not one")
    target = LineageItem(wanted.version, str(targets.pop()))
    if snapshot := by_id.get((StateFileKind.SNAPSHOT, target.version, target.unique_id)):
        return snapshot, []
    newest = by_id[StateFileKind.CHANGES, target.version, target.unique_id]
    lineage = parse_lineage(decompress_head(read_head(newest.name), wanted.codec))
    changes: list[StateFile] = []
    for item in reversed((*lineage, target)):
        if snapshot := by_id.get((StateFileKind.SNAPSHOT, item.version, item.unique_id)):
            return snapshot, changes
        change = by_id.get((StateFileKind.CHANGES, item.version, item.unique_id))
        if change is None or item.version != wanted.version - len(changes):
            raise LookupError(f"no changes of version {item.version}_{item.unique_id}, nor a snapshot of it")
        changes.insert(0, change)
    if changes[0].version != 1:
        raise LookupError(f"no snapshot that version {wanted.version} builds on")
    return None, changes


def _referred(name: str, data: bytes, sizes: Mapping[str, int]) -> list[str]:
    """Name the SST and log files that a RocksDB snapshot's metadata refers to."""
    referred = []
    for path, size in snapshot_references(name, data).items():
        if path not in sizes:
            raise LookupError(f"{path} of snapshot {name} is gone")
        if sizes[path] != size:
            raise DamageError(f"{path} has {sizes[path]} bytes, {size} in the metadata of {name}")
        referred.append(path)
    return referred


def snapshot_references(name: str, data: bytes) -> dict[str, int]:
    """Read what a RocksDB snapshot refers to: paths relative to the store, with their sizes.

    Raises:
        DamageError: it is not a snapshot that Spark wrote, or it is torn.
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
