"""State files as Spark compresses them, and the lineage in the head of a changelog (state format 2)."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from spark_abs.errors import DamageError, Refused
from spark_abs.snapshots.layout import CODEC_KEY

_MAX_UTF = 65_535
MAX_LINEAGE = 65_600
"""A lineage is one string of Java's modified UTF-8, whose length has two bytes."""
HEAD_BYTES = 4 * MAX_LINEAGE
"""The size of a changelog's head: it contains the lineage, with the block sizes of the codecs."""


@dataclass(frozen=True, slots=True)
class LineageItem:
    """A version that a changelog builds on, with the unique id of its files."""

    version: int
    unique_id: str


def parse_lineage(head: bytes) -> tuple[LineageItem, ...]:
    """Read the lineage at the beginning of a decompressed changelog of state format 2.

    Raises:
        Refused: a changelog version whose lineage is not known.
        DamageError: the text is cut off.
    """
    try:
        version, rest = _utf(head)
        if version not in ("v3", "v4"):
            raise Refused(
                f"changelog version {version[:20]!r} is not supported: only v3 and v4 have a lineage"
            )
        items, _ = _utf(rest)
        return tuple(LineageItem(int(i["version"]), str(i["checkpointUniqueId"])) for i in json.loads(items))
    except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamageError(f"the lineage of a changelog cannot be read: {error}") from error


def with_lineage(changelog: bytes, items: Sequence[LineageItem]) -> bytes:
    """Return a decompressed changelog of state format 2 with another lineage. Errors as for `parse_lineage`.

    Raises:
        Refused: the lineage is longer than a string in a changelog.
    """
    parse_lineage(changelog)
    version, rest = _utf(changelog)
    _, entries = _utf(rest)
    plain = [{"version": item.version, "checkpointUniqueId": item.unique_id} for item in items]
    texts = (version.encode(), json.dumps(plain, separators=(",", ":")).encode())
    if len(texts[1]) > _MAX_UTF:
        raise Refused("the lineage of a changelog is longer than Spark can read")
    return b"".join(struct.pack(">H", len(text)) + text for text in texts) + entries


def decompress_head(data: bytes, codec: str) -> bytes:
    """Decompress the head of a changelog that Spark wrote with `codec`; an incomplete block is left out.

    Raises:
        Refused: a codec that is not known.
        DamageError: the bytes are not of that codec.
    """
    return decompress(data, codec, MAX_LINEAGE)


def decompress(data: bytes, codec: str, most: int | None = None) -> bytes:
    """Decompress a state file, one zstd stream to at most `most` bytes. Errors as for its head."""
    try:
        match codec:
            case "lz4":
                return _decompress_lz4_blocks(data)
            case "zstd":
                return bytes(pa.CompressedInputStream(pa.BufferReader(data), "zstd").read(most))
            case "snappy":
                return _decompress_snappy_blocks(data)
            case _:
                raise Refused(
                    f"state is compressed with {codec!r}, so its lineage cannot be read: set {CODEC_KEY} to "
                    "lz4, zstd or snappy"
                )
    except (struct.error, pa.ArrowException, OSError) as error:
        raise DamageError(f"not {codec} data: {error}") from error


def compress(data: bytes, codec: str) -> bytes:
    """Compress a state file as Spark reads it with `codec`; lz4 in blocks that are stored as they are.

    Raises:
        Refused: a codec that is not known.
    """
    match codec:
        case "lz4":
            blocks = [data[at : at + _LZ4_BLOCK] for at in range(0, len(data), _LZ4_BLOCK)]
            return b"".join(map(_lz4_block, [*blocks, b""]))
        case "zstd":
            return bytes(pa.compress(data, "zstd", asbytes=True))
        case "snappy":
            head = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
            block = pa.Codec("snappy").compress(data, asbytes=True)
            return bytes(head + struct.pack(">i", len(block)) + block)
        case _:
            raise Refused(
                f"state is compressed with {codec!r}, which cannot be written here: set {CODEC_KEY} to lz4, "
                "zstd or snappy"
            )


_LZ4_BLOCK = 2**16
_LZ4_STORED = 0x16
"""The token of a block that is not compressed, of at most 2^(10+6) bytes."""
_LZ4_SEED = 0x9747B28C


def _lz4_block(data: bytes) -> bytes:
    """Return a block of lz4-java's stream format; without data the last one."""
    checksum = xxh32(data, _LZ4_SEED) & 0xFFFFFFF if data else 0
    return b"LZ4Block" + struct.pack("<Biii", _LZ4_STORED, len(data), len(data), checksum) + data


_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


def xxh32(data: bytes, seed: int) -> int:
    """Return the hash xxHash32 of data."""
    first, second, third, fourth, fifth = _PRIMES
    size, at = len(data), 0
    if size >= 16:
        lanes = [(seed + first + second), (seed + second), seed, (seed - first)]
        while at + 16 <= size:
            words = struct.unpack_from("<4I", data, at)
            lanes = [
                _rotated(lane + word * second, 13) * first for lane, word in zip(lanes, words, strict=True)
            ]
            at += 16
        found = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
    else:
        found = seed + fifth
    found += size
    while at + 4 <= size:
        found = _rotated(found + struct.unpack_from("<I", data, at)[0] * third, 17) * fourth
        at += 4
    for byte in data[at:]:
        found = _rotated(found + byte * fifth, 11) * first
    found &= 0xFFFFFFFF
    found = (found ^ found >> 15) * second & 0xFFFFFFFF
    found = (found ^ found >> 13) * third & 0xFFFFFFFF
    return found ^ found >> 16


def _rotated(value: int, by: int) -> int:
    value &= 0xFFFFFFFF
    return (value << by | value >> 32 - by) & 0xFFFFFFFF


def _decompress_lz4_blocks(data: bytes) -> bytes:
    lz4, out, at = pa.Codec("lz4_raw"), bytearray(), 0
    while at + 21 <= len(data):
        if data[at : at + 8] != b"LZ4Block":
            raise DamageError("not lz4 data: a block header is missing")
        packed, size, _ = struct.unpack_from("<iii", data, at + 9)
        block = data[at + 21 : at + 21 + packed]
        if len(block) < packed:
            break
        if size:
            raw = data[at + 8] & 0xF0 == 0x10
            out += block if raw else lz4.decompress(block, decompressed_size=size).to_pybytes()
        at += 21 + packed
    return bytes(out)


def _decompress_snappy_blocks(data: bytes) -> bytes:
    if data[:8] != b"\x82SNAPPY\0":
        raise DamageError("not snappy data: the header is missing")
    snappy, out, at = pa.Codec("snappy"), bytearray(), 16
    while at + 4 <= len(data):
        (packed,) = struct.unpack_from(">i", data, at)
        block = data[at + 4 : at + 4 + packed]
        if len(block) < packed:
            break
        out += snappy.decompress(block, decompressed_size=_snappy_size(block)).to_pybytes()
        at += 4 + packed
    return bytes(out)


def _snappy_size(block: bytes) -> int:
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size
        shift += 7
    raise DamageError("not snappy data: the length is missing")


def _utf(data: bytes) -> tuple[str, bytes]:
    (size,) = struct.unpack_from(">H", data)
    if len(data) < 2 + size:
        raise ValueError("it ends early")
    return data[2 : 2 + size].decode(), data[2 + size :]
