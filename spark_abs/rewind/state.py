"""The state of a batch under the number of a later batch: which files are copied, under which names. Pure.

The version of a state store is the number of its batch + 1. It stands in the names of files, and in the
lineage of changelogs of state format 2. A store that was never stored whole gets an empty snapshot before its
first change, since Spark would otherwise ask for all changes from version 1 on.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import NAMESPACE_OID, uuid5

from spark_abs.model import Provider
from spark_abs.snapshots.layout import StateFile, StateFileKind, state_file
from spark_abs.snapshots.lineage import LineageItem, compress, decompress, parse_lineage, with_lineage

_NO_KEYS = {"sstFiles": [], "numKeys": 0}
"""`RocksDBCheckpointMetadata` of an empty store."""
_END = b"\xff\xff\xff\xff"
"""In place of the size of a key: the end of an HDFS-backed snapshot."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The files of one store that Spark loads for a version."""

    directory: str
    files: tuple[StateFile, ...]

    @property
    def base(self) -> int:
        """The version of the snapshot, 0 if there is none."""
        return max((f.version for f in self.files if f.kind is StateFileKind.SNAPSHOT), default=0)


def chains(paths: Iterable[str]) -> tuple[Chain, ...]:
    """Sort the files of a cut by their stores. Paths are relative to the checkpoint directory."""
    found: dict[str, list[StateFile]] = {}
    for path in paths:
        directory, _, name = path.rpartition("/")
        file = state_file(name)
        if file is not None and directory.startswith("state/"):
            found.setdefault(directory, []).append(file)
    return tuple(Chain(directory, tuple(files)) for directory, files in sorted(found.items()))


def copies(chain: Chain, by: int) -> dict[str, str]:
    """Return the copies that raise the versions of a chain: new path to the path that is copied."""
    return {
        f"{chain.directory}/{_renamed(file, by)}": f"{chain.directory}/{file.name}" for file in chain.files
    }


def _renamed(file: StateFile, by: int) -> str:
    return f"{file.version + by}{file.name.removeprefix(str(file.version))}"


def empty_base(chain: Chain, by: int, provider: str, codec: str) -> dict[str, bytes]:
    """Return the empty snapshot below a chain that has none: path to content; nothing if it has one.

    Raises:
        Refused: a codec that is not known.
    """
    if chain.base or not chain.files:
        return {}
    if provider != Provider.ROCKSDB:
        return {f"{chain.directory}/{by}.snapshot": compress(_END, codec)}
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        # The date is that of no clock: a repeat writes the same bytes.
        archive.writestr(zipfile.ZipInfo("metadata"), f"v1\n{json.dumps(_NO_KEYS)}")
    unique = f"_{_base_id(chain)}" if chain.files[0].unique_id else ""
    return {f"{chain.directory}/{by}{unique}.zip": zipped.getvalue()}


def _base_id(chain: Chain) -> str:
    return str(uuid5(NAMESPACE_OID, chain.directory))


def with_lineage_of(chain: Chain) -> str | None:
    """Return the path of the changelog whose lineage Spark reads: the newest one of state format 2."""
    newest = max((f for f in chain.files if f.kind is StateFileKind.CHANGES), key=_version, default=None)
    return None if newest is None or newest.unique_id is None else f"{chain.directory}/{newest.name}"


def raised_lineage(chain: Chain, by: int, codec: str, content: bytes) -> bytes:
    """Return that changelog with raised versions in its lineage.

    Args:
        chain: the files of its store.
        by: by how much versions are raised.
        codec: how changelogs are compressed.
        content: of the changelog.

    Raises:
        Refused, DamageError: as for `decompress` and `parse_lineage`.
    """
    text = decompress(content, codec)
    items = [LineageItem(item.version + by, item.unique_id) for item in parse_lineage(text)]
    if not chain.base:
        items.insert(0, LineageItem(by, _base_id(chain)))
    return compress(with_lineage(text, items), codec)


def _version(file: StateFile) -> int:
    return file.version
