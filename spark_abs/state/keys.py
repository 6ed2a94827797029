"""Keys: their canonical form, their hash, and the key group that each belongs to.

The hash determines where a key's state is stored: it is part of the stored format and never changes.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_abs.errors import UsageError

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

assert sys.byteorder == "little", "key hashes and state are little-endian"

_LONGEST = 128
"""The longest text or binary key, in bytes, that is hashed as words; of a longer key its BLAKE2b digest is
hashed."""
_SEED = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xA5A5F00D5EED0B57)
_NAN = np.uint64(0x7FF8000000000000)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = (np.uint64(n) for n in (30, 27, 31, 32))
_WORD = 8


def check_key_groups(groups: int, who: str) -> None:
    """Refuse an invalid number of key groups.

    Raises:
        UsageError: the number is not valid; the message names its owner.
    """
    if not 1 <= groups <= 2**15:
        raise UsageError(f"{who}: the number of key groups must be 1 to 32768, found {groups}")


def check_key_type(name: str, kind: pa.DataType) -> None:
    """Refuse a key column that is not of an atomic type.

    Raises:
        UsageError: the type is not atomic; the message names the column.
    """
    if pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_dictionary(kind):
        raise UsageError(f"key column {name!r} is {kind}: a key has one or more columns of atomic types")


def canonical(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a key column in canonical form, as Spark groups keys: -0.0 is 0.0, all NaNs are one.

    Raises:
        UsageError: the column is not of an atomic type.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # no chunk at all
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    check_key_type("key", array.type)
    if not pa.types.is_floating(array.type):
        return array
    values = array.fill_null(0.0).to_numpy(zero_copy_only=False).copy()
    values[values == 0] = 0.0
    values[np.isnan(values)] = np.nan
    return pa.array(values, array.type, mask=_nulls(array))


def hashes(columns: list[pa.Array]) -> Hashes:
    """Hash keys given as canonical columns. The hash of an integer does not depend on its width."""
    rows = len(columns[0])
    found = np.full(rows, _SEED, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            _fold(found, column)
    return found


def group_of(hashed: Hashes, groups: int) -> npt.NDArray[np.int32]:
    """Return the key group of each hash."""
    return ((hashed >> _S32) % np.uint64(groups)).astype(np.int32)


def same(left: list[pa.Array], right: list[pa.Array]) -> npt.NDArray[np.bool_]:
    """Compare two lists of canonical keys row by row; null is equal to null, NaN to NaN."""
    equal = np.ones(len(left[0]), np.bool_)
    for one, other in zip(left, right, strict=True):
        a, b = _comparable(one), _comparable(other)
        matches = pc.equal(a, b)
        if matches.null_count:
            both = pc.and_(a.is_null(), b.is_null())
            matches = pc.if_else(both, True, matches.fill_null(False))
        equal &= matches.to_numpy(zero_copy_only=False)
    return equal


def _comparable(array: pa.Array) -> pa.Array:
    if pa.types.is_float64(array.type):
        return array.view(pa.int64())
    if pa.types.is_float32(array.type):
        return array.view(pa.int32())
    return array


def _nulls(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    if not array.null_count:
        return None
    found: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return found


def _mix(into: Hashes, words: Hashes) -> Hashes:
    """Fold a word into each hash: the finaliser of splitmix64."""
    mixed = (into ^ words) + _SEED
    mixed = (mixed ^ (mixed >> _S30)) * _M1
    mixed = (mixed ^ (mixed >> _S27)) * _M2
    folded: Hashes = mixed ^ (mixed >> _S31)
    return folded


def _fold(found: Hashes, column: pa.Array) -> None:
    kind = column.type
    if pa.types.is_decimal(kind):
        _fold_decimal(found, column)
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        _fold_bytes(found, column)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        _fold_bytes(found, column.cast(pa.binary()))
    else:
        _fold_words(found, _words(column), _nulls(column))


def _fold_words(found: Hashes, words: Hashes, nulls: npt.NDArray[np.bool_] | None) -> None:
    if nulls is not None:
        words = np.where(nulls, _NULL, words)
    found[:] = _mix(found, words)


def _words(column: pa.Array) -> Hashes:
    """Return a column of fixed width as 64-bit words: integers sign-extended, floats as doubles."""
    kind = column.type
    if pa.types.is_floating(kind):
        doubles = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        bits: Hashes = doubles.view(np.uint64)
        return np.where(np.isnan(doubles), _NAN, bits)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if not pa.types.is_integer(column.type):
        raise UsageError(f"keys of type {kind} are not supported")
    integers = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    words: Hashes = integers.view(np.uint64)
    return words


def _fold_decimal(found: Hashes, column: pa.Array) -> None:
    wide = column.cast(pa.decimal128(38, column.type.scale))
    data = np.frombuffer(wide.buffers()[1], np.uint64)[2 * wide.offset : 2 * (wide.offset + len(wide))]
    nulls = _nulls(column)
    _fold_words(found, data[0::2], nulls)
    _fold_words(found, data[1::2], nulls)


def _fold_bytes(found: Hashes, column: pa.Array) -> None:
    """Fold texts or bytes into each hash: words in order, the last padded with zeros, then the length."""
    nulls = _nulls(column)
    if nulls is not None:
        found[nulls] = _mix(found[nulls], np.full(int(nulls.sum()), _NULL, np.uint64))
    _, offsets_buffer, data_buffer = column.cast(pa.binary()).buffers()
    rows = len(column)
    if not rows:
        return
    offsets = np.frombuffer(offsets_buffer, np.int32)[column.offset : column.offset + rows + 1]
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    filled = np.ones(rows, np.bool_) if nulls is None else ~nulls
    raw = b"" if data_buffer is None else data_buffer
    bytes_ = np.frombuffer(raw, np.uint8)
    last = int(offsets[-1])
    padded = np.zeros(last + 2 * _WORD, np.uint8)
    padded[:last] = bytes_[:last]
    words = np.ndarray((last + _WORD,), "<u8", padded.data, strides=(1,))
    at = np.flatnonzero(filled & (lengths <= _LONGEST))
    for word in range(-(-_LONGEST // _WORD)):
        at = at[lengths[at] > word * _WORD]
        if not len(at):
            break
        left = np.minimum(lengths[at] - word * _WORD, _WORD).astype(np.uint64)
        mask = np.uint64(2**64 - 1) >> (np.uint64(64) - left * np.uint64(8))
        found[at] = _mix(found[at], words[starts[at] + word * _WORD] & mask)
    for row in np.flatnonzero(filled & (lengths > _LONGEST)):
        value = padded[starts[row] : starts[row] + lengths[row]].tobytes()
        digest = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")
        found[row : row + 1] = _mix(found[row : row + 1], np.array([digest], np.uint64))
    at = np.flatnonzero(filled)
    found[at] = _mix(found[at], lengths[at].astype(np.uint64))


def by_key(columns: list[pa.Array], hashed: Hashes) -> tuple[Places, Places]:
    """Return the row numbers in the order of their keys, and the start of each key; last comes the end."""
    order = np.argsort(hashed, kind="stable")
    if not len(order):
        return order, np.zeros(1, np.int64)
    ordered = hashed[order]
    equal = ordered[1:] == ordered[:-1]
    pairs = np.flatnonzero(equal)
    if len(pairs):
        left = [c.take(pa.array(order[pairs])) for c in columns]
        right = [c.take(pa.array(order[pairs + 1])) for c in columns]
        if not same(left, right).all():
            return _by_value(columns, order, ordered)
    starts = np.concatenate([[0], np.flatnonzero(~equal) + 1, [len(order)]])
    return order, starts.astype(np.int64)


def _by_value(columns: list[pa.Array], order: Places, ordered: Hashes) -> tuple[Places, Places]:
    """Distinguish keys with the same hash. Rare, so row by row."""
    values = list(zip(*(map(repr, c.take(pa.array(order)).to_pylist()) for c in columns), strict=True))
    again = sorted(range(len(order)), key=lambda i: (int(ordered[i]), values[i]))
    marks = [(int(ordered[i]), values[i]) for i in again]
    starts = [i for i in range(len(marks)) if i == 0 or marks[i] != marks[i - 1]]
    return order[np.array(again)], np.array([*starts, len(marks)], np.int64)
