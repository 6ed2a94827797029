"""The snapshot file of Spark's HDFS-backed provider, and the settings that say who keeps state."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from spark_abs.errors import DamageError
from spark_abs.model import PROVIDER_KEY, Provider
from spark_abs.restore.hdfs_store import loaded, write_snapshot
from spark_abs.snapshots.layout import CODEC_KEY, parse_offsets, with_settings


def test_entries_are_written_with_their_sizes_and_an_end() -> None:
    sink = pa.BufferOutputStream()
    write_snapshot(sink, [(b"key", b"value"), (b"k", b"")])
    packed = pa.CompressedInputStream(pa.BufferReader(sink.getvalue()), "zstd").read()
    want = [struct.pack(">i", n) + data for n, data in ((3, b"key"), (5, b"value"), (1, b"k"), (0, b""))]
    assert bytes(packed) == b"".join(want) + b"\xff\xff\xff\xff"


def packed(*entries: tuple[bytes, bytes | None]) -> bytes:
    parts = b""
    for key, value in entries:
        parts += struct.pack(">i", len(key)) + key
        parts += struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    return bytes(pa.Codec("zstd").compress(parts + struct.pack(">i", -1), asbytes=True))


def test_a_store_is_loaded_from_a_snapshot_and_the_changes_after_it() -> None:
    files = {
        "2.delta": packed((b"a", b"old88888")),
        "4.delta": packed((b"c", b"new88888"), (b"a", None)),
        "3.snapshot": packed((b"a", b"mid88888"), (b"b", b"mid88888")),
    }
    assert loaded(files, "zstd") == {b"b": b"mid88888", b"c": b"new88888"}
    assert loaded({"1.delta": packed((b"a", b"one88888"))}, "zstd") == {b"a": b"one88888"}
    with pytest.raises(DamageError, match=r"4\.delta"):
        loaded({**files, "4.delta": pa.Codec("zstd").compress(b"\0\0\0\5ab", asbytes=True)}, "zstd")


def test_settings_of_a_planned_batch_are_changed_and_nothing_else() -> None:
    conf = f'{{"{PROVIDER_KEY}":"x","a":"b"}}'
    text = f'v1\n{{"batchWatermarkMs":7,"batchTimestampMs":8,"conf":{conf}}}\n{{"o":1}}\n-'
    found = parse_offsets(with_settings(text, {PROVIDER_KEY: Provider.HDFS, CODEC_KEY: "zstd"}))
    before = parse_offsets(text)
    assert (found.provider, found.codec, found.conf["a"]) == (Provider.HDFS, "zstd", "b")
    assert (found.offsets, found.watermark_ms, found.timestamp_ms) == (before.offsets, 7, 8)
    with pytest.raises(DamageError):
        with_settings("v1\n", {})
