"""State as rows and back: what a group holds is what was put into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.manifest import StateFunction
from spark_abs.model import BatchId
from spark_abs.state.arrow_types import schema_of
from spark_abs.state.operator import BatchTime, Cache, Operator, Timeout, run_group
from spark_abs.state.per_key import GroupState, per_key
from spark_abs.state.rows import HeldGroup, StateRows, group_numbers, read_group, write_groups
from spark_abs.state.values import table, tuples

KEY = pa.schema([("k", pa.string()), ("d", pa.float64())])
STATE = pa.schema([("total", pa.int64()), ("seen", pa.map_(pa.string(), pa.int64()))])
FORM = StateFunction(
    "sums", 3, ("k: string", "d: double"), ("total: int64", "seen: map<string, int64>"), "event-time"
)
ROWS = StateRows(FORM)

TYPES = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(),
    pa.binary(), pa.date32(), pa.time64("ns"), pa.timestamp("us"), pa.timestamp("us", "UTC"),
    pa.duration("us"), pa.decimal128(38, 18), pa.struct([]),
]  # fmt: skip
kinds = st.recursive(
    st.sampled_from(TYPES),
    lambda inner: st.one_of(
        inner.map(lambda t: pa.list_(pa.field("element", t))),
        st.tuples(inner, st.booleans()).map(lambda t: pa.list_(pa.field("element", t[0], t[1]))),
        inner.map(lambda t: pa.map_(pa.int32(), t)),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda ts: pa.struct([pa.field(f"f{i}", t) for i, t in enumerate(ts)])
        ),
    ),
    max_leaves=6,
)


@given(kinds)
def test_the_type_of_a_column_is_read_from_its_text(kind: pa.DataType) -> None:
    assert schema_of([f"c: {kind}"]).field("c").type.equals(kind)


def test_a_text_that_says_no_type_is_refused() -> None:
    for text in (
        "c: dictionary<values=string, indices=int32, ordered=0>",
        "c",
        "c: list<>",
        "c: struct<a: b: int8>",
    ):
        with pytest.raises(Refused, match="state column"):
            schema_of([text])


keys = st.tuples(st.sampled_from([None, "", "a", "b"]), st.sampled_from([None, 0.0, -0.0, float("nan"), 1.5]))
values = st.tuples(st.integers(-9, 9) | st.none(), st.dictionaries(st.text(max_size=2), st.integers(0, 9)))


@given(st.dictionaries(keys.map(lambda k: (k[0], str(k[1]).removeprefix("-"))), values, max_size=8))
def test_what_is_written_is_read(states: dict[tuple[str | None, str], tuple[Any, ...]]) -> None:
    """Null, NaN and 0.0 are keys, each in its one group."""
    plain = {(k, None if d == "None" else float(d)): v for (k, d), v in states.items()}
    given_rows = rows_of(
        [(*key, *value, number if number % 2 else None) for number, (key, value) in enumerate(plain.items())]
    )
    groups = write_groups(ROWS, given_rows)
    found: list[Any] = []
    for number, held in groups.items():
        assert held.head is not None
        mine = read_group(ROWS, number, held.head, held.segments)
        assert set(group_numbers(ROWS, mine).to_pylist()) == {number}
        found += mine.to_pylist()
        due = [row["timeout_ms"] for row in mine.to_pylist() if row["timeout_ms"] is not None]
        assert held.timer == (min(due) + 1 if due else None)
    assert sorted(map(repr, found)) == sorted(map(repr, given_rows.to_pylist()))


def rows_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    plain = [
        {
            "key": {"k": k, "d": d},
            "value": None
            if total is None and seen is None
            else {"total": total, "seen": list((seen or {}).items())},
            "timeout_ms": at,
            "expires_ms": None,
        }
        for k, d, total, seen, at in rows
    ]
    return pa.Table.from_pylist(plain, schema=ROWS.schema)


def test_a_function_goes_on_with_what_was_written() -> None:
    """Its state, its timeout, and a key that has a timeout and no state."""

    def add(key: tuple[Any, ...], rows: Iterator[Row], state: GroupState) -> Iterator[tuple[Any, ...]]:
        total, seen = state.get if state.exists else (0, {})
        if state.hasTimedOut:
            yield key[0], total, True
            state.remove()
            return
        total += sum(row.n for row in rows)
        state.update((total, {**seen, "again": 1}))
        yield key[0], total, False

    rows = pa.schema([*KEY, ("n", pa.int64())])
    out = pa.schema([("k", pa.string()), ("total", pa.int64()), ("timed_out", pa.bool_())])
    operator = Operator("", "sums", 3, ("k", "d"), rows, STATE, out, Timeout.EVENT_TIME)
    assert operator.form == FORM
    groups = write_groups(
        ROWS, rows_of([("a", 0.0, 5, {"x": 1}, 70), ("b", 0.0, None, None, 80), ("c", 0.0, 9, {}, None)])
    )
    arriving = table([("a", -0.0, 2)], rows)
    home = group_numbers(ROWS, rows_of([("a", 0.0, 1, {}, None)])).to_pylist()[0]
    answers = []
    for number, held in groups.items():
        mine = arriving if number == home else arriving.slice(0, 0)
        time = BatchTime(BatchId(0), 0, 100)
        answers += tuples(
            run_group(
                operator,
                per_key(operator, add, True),
                store=held,
                cache=Cache(),
                scope="",
                group=number,
                rows=mine,
                time=time,
            )
        )
    assert sorted(answers) == [("a", 7, False), ("b", 0, True)]
    left = {
        row["key"]["k"]: row
        for number, held in groups.items()
        if held.head is not None
        for row in read_group(ROWS, number, held.head, held.segments).to_pylist()
    }
    assert {k: row["value"]["total"] for k, row in left.items()} == {"a": 7, "c": 9}
    assert dict(left["a"]["value"]["seen"]) == {"x": 1, "again": 1}


def test_rows_that_cannot_be_a_state_are_refused() -> None:
    with pytest.raises(UsageError, match="2 rows of state have only 1 keys"):
        write_groups(ROWS, rows_of([("a", 0.0, 1, {}, None), ("a", -0.0, 2, {}, None)]))
    with pytest.raises(UsageError, match="neither a value nor a timeout"):
        write_groups(ROWS, rows_of([("a", 0.0, None, None, None)]))


def test_a_group_that_lacks_a_segment_is_damage() -> None:
    (held,) = write_groups(ROWS, rows_of([("a", 0.0, 1, {}, None)])).values()
    assert isinstance(held, HeldGroup)
    assert held.head is not None
    with pytest.raises(DamageError, match="segment 0 of key group 1 is missing"):
        read_group(ROWS, 1, held.head, {})
