"""The lineage in the head of a changelog (state format 2): the versions that it builds on."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import pyarrow as pa

from spark_abs.errors import DamageError, Refused
from spark_abs.snapshots.layout import CODEC_KEY

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
