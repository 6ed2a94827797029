"""State stores of Spark's HDFS-backed provider: Spark itself reads and writes entries for RocksDB only.

A file is a compressed stream of size and bytes of each key and value, big-endian, and -1 at the end; a value
of size -1 says that its key is removed. A store is its newest `<version>.snapshot`, then each `.delta`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs

from spark_abs.errors import DamageError, Refused
from spark_abs.model import checked_relative
from spark_abs.snapshots.layout import DEFAULT_STORE, StateFileKind, state_file
from spark_abs.snapshots.lineage import decompress
from spark_abs.spark.state_rewriter import FAMILY, KEY, PARTITION_KEY, VALUE, Store
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WRITTEN_WITH = "zstd"
"""The codec in which files are written."""
ENTRY = f"{KEY} binary, {VALUE} binary, {FAMILY} string"
_END = struct.pack(">i", -1)


def read_snapshots(
    session: SparkSession, source: Place, store: Store, partitions: int, codec: str
) -> DataFrame:
    """Return the entries of a store, in its partitions, without the column that Spark partitions by.

    Args:
        session: a session.
        source: a native checkpoint that has the files of one version and no others.
        store: the store to read.
        partitions: the number of its partitions.
        codec: the codec of its files.

    Raises:
        Refused: a codec that we cannot read.
        DamageError: a file is not what Spark writes; from the executors.
    """

    def read(partition: int) -> Iterator[tuple[bytes, bytes, str]]:
        place = _place(source, store, partition)
        infos = place.fs.get_file_info(fs.FileSelector(place.path, allow_not_found=True))
        names = [info.base_name for info in infos if state_file(info.base_name) is not None]
        for key, value in loaded({name: place.read(name) or b"" for name in names}, codec).items():
            yield key, value, DEFAULT_STORE

    entries = session.sparkContext.parallelize(range(partitions), partitions).flatMap(read)
    return session.createDataFrame(entries, ENTRY)


def keyed_as(like: DataFrame, entries: DataFrame) -> DataFrame:
    """Return entries in the columns of others; Spark's partitioning column is null: it is not stored."""
    from pyspark.sql import functions as F

    if PARTITION_KEY not in like.columns:
        return entries.select(KEY, VALUE, FAMILY)
    nothing = F.lit(None).cast(like.schema[PARTITION_KEY].dataType).alias(PARTITION_KEY)
    return entries.select(nothing, KEY, VALUE, FAMILY)


def write_snapshots(entries: DataFrame, target: Place, store: Store, version: int) -> None:
    """Write all partitions of a store as of a version, from the executors.

    Args:
        entries: a partition of the frame for each of the store.
        target: the native checkpoint.
        store: the store to write.
        version: the state version.

    Raises:
        Refused: the store has column families, which only RocksDB supports.
    """
    families = [row[0] for row in entries.select(FAMILY).distinct().collect()]
    if set(families) - {DEFAULT_STORE}:
        raise Refused(
            f"operator {store.operator} keeps its state in column families, which only RocksDB supports: "
            f"{', '.join(sorted(families))}"
        )

    def write(partition: int, rows: Iterable[Any]) -> Iterable[int]:
        place = _place(target, store, partition)
        if place.local:
            place.fs.create_dir(place.path, recursive=True)
        with place.fs.open_output_stream(f"{place.path}/{version}.snapshot", compression=None) as stream:
            write_snapshot(stream, ((bytes(row[KEY]), bytes(row[VALUE])) for row in rows))
        yield partition

    entries.select(KEY, VALUE).rdd.mapPartitionsWithIndex(write).collect()


def write_snapshot(stream: pa.NativeFile, entries: Iterable[tuple[bytes, bytes]]) -> None:
    """Write the content of a snapshot file."""
    with pa.CompressedOutputStream(stream, WRITTEN_WITH) as packed:
        for entry in entries:
            for part in entry:
                packed.write(struct.pack(">i", len(part)))
                packed.write(part)
        packed.write(_END)


def loaded(files: Mapping[str, bytes], codec: str) -> dict[bytes, bytes]:
    """Return the entries of one partition of a store.

    Args:
        files: snapshots and changes, by their names.
        codec: the codec of the files.

    Raises:
        DamageError: a file is not what Spark writes.
        Refused: a codec that we cannot read.
    """
    known = sorted((f for f in map(state_file, files) if f is not None), key=lambda f: f.version)
    base = max((f.version for f in known if f.kind is StateFileKind.SNAPSHOT), default=0)
    found: dict[bytes, bytes] = {}
    for file in known:
        if file.version > base or (file.version == base and file.kind is StateFileKind.SNAPSHOT):
            for key, value in _entries(file.name, decompress(files[file.name], codec)):
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = value
    return found


def _entries(name: str, data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    at = 0

    def part() -> bytes | None:
        nonlocal at
        try:
            (size,) = struct.unpack_from(">i", data, at)
        except struct.error as error:
            raise DamageError(f"state file {name} ends early") from error
        at += 4
        if size < 0:
            return None
        if at + size > len(data):
            raise DamageError(f"state file {name} ends early")
        at += size
        return data[at - size : at]

    while (key := part()) is not None:
        yield key, part()


def _place(native: Place, store: Store, partition: int) -> Place:
    below = "" if store.name == DEFAULT_STORE else f"/{checked_relative(store.name)}"
    return native.below(f"state/{store.operator}/{partition}{below}")
