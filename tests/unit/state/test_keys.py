"""Keys: equal ones have one hash and one group, and the hash never changes: it says where state lies."""

from __future__ import annotations

import datetime
import decimal
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.errors import UsageError
from spark_abs.state.keys import by_key, canonical, group_of, hashes, same

NAN = float("nan")


def hashed(*columns: pa.Array) -> list[int]:
    found: list[int] = hashes([canonical(column) for column in columns]).tolist()
    return found


def test_the_hash_of_a_key_never_changes() -> None:
    columns = [
        pa.array([1, None, -5], pa.int64()),
        pa.array(["", "a key", None]),
        pa.array([0.5, NAN, None], pa.float64()),
        pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")], pa.decimal128(10, 2)),
        pa.array([True, False, None]),
        pa.array([datetime.date(2026, 1, 1), None, datetime.date(1960, 1, 1)]),
        pa.array([b"x" * 300, b"\0\0", None]),
    ]
    assert hashed(*columns) == [6059941901225511830, 11464284814178045552, 14939166320982417268]


def test_zeros_and_nans_and_nulls_are_one_key_each() -> None:
    other_nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    keys = [
        canonical(pa.array([0.0, -0.0, NAN, other_nan, -NAN, None, None], kind)) for kind in (pa.float64(),)
    ]
    found = hashes(keys).tolist()
    assert found[0] == found[1]
    assert len(set(found[2:5])) == 1
    assert found[5] == found[6]
    assert len(set(found)) == 3
    order, starts = by_key(keys, hashes(keys))
    assert sorted(np.diff(starts).tolist()) == [2, 2, 3]
    assert same([keys[0].take(pa.array([0, 2, 5]))], [keys[0].take(pa.array([1, 4, 6]))]).all()
    assert not same([keys[0].take(pa.array([0, 2, 5]))], [keys[0].take(pa.array([2, 5, 0]))]).any()
    assert len(order) == 7


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32()])
def test_a_wider_integer_keeps_its_hash(kind: pa.DataType) -> None:
    values = [0, 1, -1, 127, -128, None]
    assert hashed(pa.array(values, kind)) == hashed(pa.array(values, pa.int64()))
    assert hashed(pa.array([0.5, NAN, None], pa.float32())) == hashed(
        pa.array([0.5, NAN, None], pa.float64())
    )


texts = st.one_of(st.none(), st.text(max_size=20), st.text(min_size=100, max_size=200))


@given(st.lists(st.tuples(texts, st.one_of(st.none(), st.integers(-3, 3))), max_size=40), st.integers(0, 10))
def test_equal_keys_and_only_they_are_gathered_wherever_they_stand(
    rows: list[tuple[str | None, int | None]], cut: int
) -> None:
    columns = [pa.array([r[0] for r in rows], pa.string()), pa.array([r[1] for r in rows], pa.int64())]
    found = hashes(columns)
    sliced = hashes([column.slice(min(cut, len(rows))) for column in columns])
    assert found[min(cut, len(rows)) :].tolist() == sliced.tolist()
    order, starts = by_key(columns, found)
    runs = [[rows[i] for i in order[a:b].tolist()] for a, b in pairwise(starts.tolist())]
    assert all(len(set(run)) == 1 for run in runs)
    assert len({run[0] for run in runs}) == len(runs) == len(set(rows))
    assert all(sorted(order[a:b]) == list(order[a:b]) for a, b in pairwise(starts.tolist()))


def test_keys_of_one_hash_are_told_apart() -> None:
    column = pa.array(["b", "a", "b", "c", "a"])
    order, starts = by_key([column], np.zeros(5, np.uint64))
    assert [column.take(pa.array(order)).to_pylist()[i] for i in starts[:-1]] == ["a", "b", "c"]
    assert np.diff(starts).tolist() == [2, 2, 1]


def test_keys_are_spread_over_all_groups() -> None:
    groups = group_of(hashes([pa.array(range(16_000), pa.int64())]), 16)
    counts = np.bincount(groups, minlength=16)
    assert counts.min() > 800
    assert counts.max() < 1200
    assert math.isclose(counts.sum(), 16_000)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.null()])
def test_a_key_that_is_not_atomic_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="a key has one or more columns of atomic types"):
        canonical(pa.nulls(1, kind))
