"""Native checkpoints as Spark would leave them, written without Spark."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from spark_abs.model import PROVIDER_KEY, Provider
from spark_abs.snapshots.layout import ENCODING_KEY

SCHEMA = b"\x00\x02v2 a state schema"


class Native:
    """A checkpoint directory under construction. One operator, number 0; no encoding: Spark before 4.0."""

    def __init__(
        self,
        directory: Path,
        *,
        provider: str = Provider.ROCKSDB,
        partitions: int = 1,
        stores: Sequence[str] = ("default",),
        codec: str = "lz4",
        encoding: str = "unsaferow",
    ) -> None:
        self.directory = directory
        self.provider, self.partitions, self.stores, self.codec = provider, partitions, stores, codec
        self.encoding = encoding
        self.put("metadata", '{"id":"9c5f3a5e-5b0f-4f0e-8f6e-0f0a8a4a5f10"}')
        self.put("state/0/_metadata/metadata", "v1\n" + json.dumps(self.operator()))
        for store in stores:
            self.put(f"{self.store(0, store)}/_metadata/schema", SCHEMA)

    def put(self, path: str, data: bytes | str) -> Path:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.encode() if isinstance(data, str) else data)
        return file

    def operator(self, schema_paths: Sequence[str] = ()) -> dict[str, object]:
        """The operator's metadata, of version 2 with the paths of schema files."""
        more = {"stateSchemaFilePaths": list(schema_paths)} if schema_paths else {}
        return {
            "operatorInfo": {"operatorId": 0, "operatorName": "stateStoreSave"},
            "stateStoreInfo": [
                {"storeName": s, "numColsPrefixKey": 0, "numPartitions": self.partitions} | more
                for s in self.stores
            ],
        }

    @staticmethod
    def store(partition: int, store: str = "default") -> str:
        return f"state/0/{partition}" + ("" if store == "default" else f"/{store}")

    def batch(
        self,
        batch: int,
        offsets: Sequence[str] = (),
        unique_ids: Sequence[Sequence[str]] | None = None,
        version: int = 1,
    ) -> None:
        """A batch that was planned and has ended."""
        conf = {
            PROVIDER_KEY: self.provider,
            "spark.sql.streaming.stateStore.compression.codec": self.codec,
            "spark.sql.shuffle.partitions": str(self.partitions),
        } | ({ENCODING_KEY: self.encoding} if self.encoding else {})
        metadata = {"batchWatermarkMs": batch * 1000, "batchTimestampMs": 5, "conf": conf}
        lines = offsets if version == 1 else [f"{i}:{line}" for i, line in enumerate(offsets)]
        self.put(f"offsets/{batch}", "\n".join([f"v{version}", json.dumps(metadata), *lines]))
        commit: dict[str, object] = {"nextBatchWatermarkMs": batch * 1000 + 1000}
        if unique_ids is not None:
            commit["stateUniqueIds"] = {"0": unique_ids}
        self.put(f"commits/{batch}", f"v{1 if unique_ids is None else 2}\n" + json.dumps(commit))

    def changes(self, version: int, name: str = "{}.changelog", partition: int = 0) -> Path:
        return self.put(f"{self.store(partition)}/{name.format(version)}", f"changes {version}")

    def changelog(
        self,
        version: int,
        unique_id: str,
        lineage: Sequence[tuple[int, str]],
        changes: bytes = b"\xff\xff\xff\xff",
    ) -> Path:
        """A changelog of state format 2."""
        items = json.dumps([{"version": v, "checkpointUniqueId": u} for v, u in lineage]).encode()
        head = b"\x00\x02v3" + struct.pack(">H", len(items)) + items + changes
        return self.put(f"{self.store(0)}/{version}_{unique_id}.changelog", compress(head, self.codec))

    def snapshot(self, version: int, ssts: Sequence[str], unique_id: str = "", partition: int = 0) -> Path:
        """A RocksDB snapshot and the files it refers to."""
        entries = []
        for sst in ssts:
            data = f"sorted {sst}".encode()
            self.put(f"{self.store(partition)}/SSTs/{sst}", data)
            entries.append({"localFileName": sst, "dfsSstFileName": sst, "sizeBytes": len(data)})
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as out:
            out.writestr("metadata", "v1\n" + json.dumps({"sstFiles": entries, "numKeys": 1}))
            out.writestr("CURRENT", "MANIFEST-000005\n")
        suffix = f"_{unique_id}" if unique_id else ""
        return self.put(f"{self.store(partition)}/{version}{suffix}.zip", archive.getvalue())


def compress(data: bytes, codec: str) -> bytes:
    """Compress as Spark's codecs do."""
    match codec:
        case "lz4":
            packed = bytes(pa.Codec("lz4_raw").compress(data, asbytes=True))
            end = b"LZ4Block\x15" + struct.pack("<iii", 0, 0, 0)
            return b"LZ4Block\x25" + struct.pack("<iii", len(packed), len(data), 0) + packed + end
        case "zstd":
            return bytes(pa.Codec("zstd").compress(data, asbytes=True))
        case "snappy":
            packed = bytes(pa.Codec("snappy").compress(data, asbytes=True))
            return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + struct.pack(">i", len(packed)) + packed
        case _:
            return data
