"""Stateful functions without Spark: against a plain dict, over random batches, timeouts and restarts."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from spark_abs.errors import StateFunctionFailed, UsageError
from spark_abs.state import values
from spark_abs.state.batches import GroupAnswer, GroupBatch
from spark_abs.state.per_key import GroupState
from spark_abs.testing.state import StateDriver

ROWS = pa.schema([("k", pa.string()), ("n", pa.int64())])
STATE = pa.schema([("total", pa.int64()), ("seen", pa.list_(pa.int64()))])
OUT = pa.schema([("k", pa.string()), ("total", pa.int64()), ("timed_out", pa.bool_())])
KEY_GROUPS = 3

Key = tuple[Any, ...]


def story(key: Key, rows: Iterator[Row], state: GroupState) -> Iterator[tuple[Any, ...]]:
    """Sum up; 7 removes the state, a multiple of 5 sets no timeout, 11 sets one without a state."""
    given_rows = list(rows)
    if state.hasTimedOut:
        assert not given_rows
        yield key[0], state.get[0] if state.exists else -1, True
        if state.exists and state.get[0] % 2:
            state.update((state.get[0] + 1, [*state.get[1], 0]))
            state.setTimeoutDuration(30)
        else:
            state.remove()
        return
    total, seen = state.get if state.exists else (0, [])
    numbers = [row.n for row in given_rows]
    total += sum(numbers)
    yield key[0], total, False
    if 11 in numbers:
        state.remove()
        state.setTimeoutDuration(20)
    elif 7 in numbers:
        state.remove()
    else:
        state.update((total, [*seen, *numbers][-5:]))
        if total % 5:
            state.setTimeoutDuration(10 + total % 50)


@dataclass
class Plain:
    """What Spark documents, in a dict: a state and a timeout for each key."""

    states: dict[Key, tuple[Any, ...]] = field(default_factory=dict)
    timeouts: dict[Key, int] = field(default_factory=dict)

    def batch(self, rows: list[tuple[str | None, int]], now: int) -> list[tuple[Any, ...]]:
        out: list[tuple[Any, ...]] = []
        keys = list(dict.fromkeys((row[0],) for row in rows))
        due = [key for key, at in self.timeouts.items() if at < now and key not in keys]
        for key in [*keys, *due]:
            state = PlainState(self.states.get(key), key in due, now)
            mine = iter([Row(k=k, n=n) for k, n in rows if (k,) == key])
            out += story(key, mine, state)  # type: ignore[arg-type]
            if state.value is None:
                self.states.pop(key, None)
            else:
                self.states[key] = state.value
            if state.at is None:
                self.timeouts.pop(key, None)
            else:
                self.timeouts[key] = state.at
        return out


@dataclass
class PlainState:
    value: tuple[Any, ...] | None
    hasTimedOut: bool  # noqa: N815
    now: int
    at: int | None = None

    @property
    def exists(self) -> bool:
        return self.value is not None

    @property
    def get(self) -> tuple[Any, ...]:
        assert self.value is not None
        return self.value

    def update(self, value: tuple[Any, ...]) -> None:
        self.value = value

    def remove(self) -> None:
        self.value = None

    def setTimeoutDuration(self, ms: int) -> None:  # noqa: N802
        self.at = self.now + ms


def driver(**options: Any) -> StateDriver:
    given_ = {"timeout": "processing-time", "key_groups": KEY_GROUPS, **options}
    return StateDriver.per_key(story, key=["k"], rows=ROWS, state=STATE, output=OUT, flat=True, **given_)


def ordered(rows: list[tuple[Any, ...]]) -> list[str]:
    return sorted(map(repr, rows))


keys = st.one_of(st.none(), st.sampled_from("abcdefghijklm"))
batches = st.lists(
    st.tuples(st.lists(st.tuples(keys, st.integers(0, 15)), max_size=8), st.integers(0, 40), st.booleans()),
    max_size=30,
)


@given(batches)
def test_states_timeouts_and_removals_are_those_of_a_plain_dict(
    story_: list[tuple[list[tuple[str | None, int]], int, bool]],
) -> None:
    run, plain, now = driver(), Plain(), 1000
    for rows, passed, restarted in story_:
        now += passed
        if restarted:
            run.restart()
        assert ordered(run.batch(rows, processing_ms=now)) == ordered(plain.batch(rows, now))
        assert run.states == plain.states
        for number, group in run.groups.items():
            mine = [at for key, at in plain.timeouts.items() if run.group_of(key) == number]
            assert group.timers == ({min(mine) + 1} if mine else set())
            assert (group.head is not None) == bool(group.segments)


def test_a_key_without_state_has_no_bytes_left() -> None:
    run = driver(key_groups=1)
    run.batch([("a", 1), ("b", 2)])
    run.batch([("a", 7), ("b", 7), ("c", 7)])
    (group,) = run.groups.values()
    assert (group.head, group.segments, group.timers) == (None, {}, set())


def test_what_a_batch_writes_grows_with_the_keys_touched_not_with_those_kept() -> None:
    written = {}
    for kept in (6_000, 30_000):
        run = totals(key_groups=4)
        run.batch(numbers(range(kept)))
        before = sum(g.bytes_written for g in run.groups.values())
        for batch in range(50):
            run.batch(numbers((batch * 300 + i) * 7919 % kept for i in range(300)))
        written[kept] = sum(g.bytes_written for g in run.groups.values()) - before
    assert written[30_000] < 1.5 * written[6_000]
    assert written[30_000] < 3 * (50 * 300 * 16) + 50 * 4 * 3_000  # a segment and a head have some overhead


def test_a_process_that_was_away_reads_only_the_segments_that_it_missed() -> None:
    run = totals(key_groups=1)
    run.batch(numbers(range(20_000)))
    (group,) = run.groups.values()
    behind, run._cache = run._cache, type(run._cache)()
    run.batch(numbers(range(10)))
    run._cache, group.bytes_read = behind, 0
    run.batch(numbers(range(10)))
    assert 0 < group.bytes_read < 3_000
    assert run.states[(5,)] == (15,)


def totals(**options: Any) -> StateDriver:
    def sums(rows: pa.Table, states: pa.Table, _: GroupBatch) -> tuple[pa.Table, pa.Table]:
        both = pa.concat_tables([rows, states.rename_columns(["k", "n"])])
        new = both.group_by("k").aggregate([("n", "sum")]).rename_columns(["k", "total"])
        return new, new

    schema = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    state, out = pa.schema([("total", pa.int64())]), pa.schema([("k", pa.int64()), ("total", pa.int64())])
    return StateDriver.per_batch(sums, key=["k"], rows=schema, state=state, output=out, **options)


def numbers(keys_: Any) -> pa.Table:
    values = list(keys_)
    return pa.table({"k": pa.array(values, pa.int64()), "n": pa.array(values, pa.int64())})


def test_a_vectorised_function_sees_states_of_the_keys_that_occur_and_those_that_timed_out() -> None:
    seen: list[tuple[list[Any], list[Any], list[Any]]] = []

    def watch(rows: pa.Table, states: pa.Table, batch: GroupBatch) -> GroupAnswer:
        seen.append((rows.to_pylist(), states.to_pylist(), batch.timed_out.to_pylist()))
        now = pa.array([batch.processing_ms + 10] * rows.num_rows, pa.int64())
        new = pa.table({"k": rows["k"], "total": rows["n"], "timeout_ms": now})
        return GroupAnswer(states=new, output=None, removed=None if batch.batch < 2 else batch.timed_out)

    schema, state = ROWS, pa.schema([("total", pa.int64())])
    options: dict[str, Any] = {"timeout": "processing-time", "key_groups": 1}
    run = StateDriver.per_batch(watch, key=["k"], rows=schema, state=state, output=state, **options)
    run.batch([("a", 1), ("b", 2)], processing_ms=100)
    run.batch([("a", 3)], processing_ms=115)
    states = [{"k": "a", "total": 1}, {"k": "b", "total": 2}]
    assert seen[1] == ([{"k": "a", "n": 3}], states, [{"k": "b"}])
    run.batch([], processing_ms=120)  # the timeout of b has passed, its state is kept
    assert len(seen) == 2
    run.batch([], processing_ms=126)
    assert seen[2] == ([], [{"k": "a", "total": 3}], [{"k": "a"}])
    assert run.states == {("b",): (2,)}


def test_a_state_is_gone_when_its_time_to_live_is_over() -> None:
    run = StateDriver.per_key(
        lambda key, rows, state: _counted(key, rows, state),
        key=["k"],
        rows=ROWS,
        state=pa.schema([("total", pa.int64())]),
        output=pa.schema([("k", pa.string()), ("total", pa.int64())]),
        ttl_ms=100,
        key_groups=1,
    )
    assert sorted(run.batch([("a", 1), ("b", 1)], processing_ms=1000)) == [("a", 1), ("b", 1)]
    assert run.batch([("a", 1)], processing_ms=1099) == [("a", 2)]
    run.restart()
    assert run.batch([("b", 1)], processing_ms=1100) == [("b", 1)]
    assert run.batch([("a", 1)], processing_ms=1198) == [("a", 3)]
    assert run.batch([("a", 1)], processing_ms=1298) == [("a", 1)]


def test_time_to_live_counts_from_the_last_update_not_from_the_last_call() -> None:
    """A timeout that is set or has passed does not make a state younger; an update does."""

    def once(key: Key, rows: Iterator[Row], state: GroupState) -> tuple[Any, ...]:
        if not state.exists:
            state.update((state.getCurrentProcessingTimeMs(),))
        found = state.get[0]
        if not state.hasTimedOut:
            state.setTimeoutDuration(30)
        return key[0], found, state.hasTimedOut

    kind = pa.schema([("since", pa.int64())])
    options: dict[str, Any] = {"timeout": "processing-time", "ttl_ms": 100, "key_groups": 1}
    run = StateDriver.per_key(once, key=["k"], rows=ROWS, state=kind, output=OUT, **options)
    assert run.batch([("a", 1)], processing_ms=1000) == [("a", 1000, False)]
    assert run.batch([], processing_ms=1031) == [("a", 1000, True)]
    assert run.batch([("a", 1)], processing_ms=1099) == [("a", 1000, False)]
    run.restart()
    assert run.batch([("a", 1)], processing_ms=1100) == [("a", 1100, False)]
    assert run.batch([("a", 1)], processing_ms=1150) == [("a", 1100, False)]
    assert run.batch([("a", 1)], processing_ms=1240) == [("a", 1240, False)]


def test_a_vectorised_function_updates_the_states_that_it_returns_and_no_others() -> None:
    def some(rows: pa.Table, states: pa.Table, batch: GroupBatch) -> tuple[pa.Table, pa.Table]:
        fresh = pa.table({"k": rows["k"], "total": rows["n"]})
        known = states["k"].to_pylist()
        new = pa.concat_tables(
            [
                states.filter(pc.equal(states["k"], "again")),  # as it was given
                fresh.filter(pa.array([k not in known for k in rows["k"].to_pylist()], pa.bool_())),
            ]
        )
        at = pa.array([batch.processing_ms + 30] * new.num_rows, pa.int64())
        return new.append_column("timeout_ms", at), states

    kind, out = pa.schema([("total", pa.int64())]), pa.schema([("k", pa.string()), ("total", pa.int64())])
    options: dict[str, Any] = {"timeout": "processing-time", "ttl_ms": 100, "key_groups": 1}
    run = StateDriver.per_batch(some, key=["k"], rows=ROWS, state=kind, output=out, **options)
    both = {("again", 1), ("once", 2)}
    assert run.batch([("again", 1), ("once", 2)], processing_ms=1000) == []
    assert set(run.batch([], processing_ms=1031)) == both  # timed out: the state of one is kept for it
    assert set(run.batch([("once", 3)], processing_ms=1099)) == both
    assert run.batch([("once", 4), ("again", 5)], processing_ms=1100) == [("again", 1)]
    assert set(run.batch([("once", 6), ("again", 7)], processing_ms=1150)) == {("again", 1), ("once", 4)}


def test_another_time_to_live_holds_from_the_next_update_on() -> None:
    def run_with(ttl_ms: int | None) -> StateDriver:
        options: dict[str, Any] = {"timeout": "processing-time", "ttl_ms": ttl_ms, "key_groups": 1}
        return StateDriver.per_key(waits, key=["k"], rows=ROWS, state=kind, output=OUT, **options)

    def waits(key: Key, rows: Iterator[Row], state: GroupState) -> tuple[Any, ...]:
        if not state.exists or sum(row.n for row in rows):
            state.update((state.getCurrentProcessingTimeMs(),))
        state.setTimeoutDuration(1000)
        return key[0], state.get[0], state.hasTimedOut

    kind = pa.schema([("since", pa.int64())])
    run, after = run_with(100), run_with(None)
    run.batch([("a", 1), ("b", 1)], processing_ms=1000)
    after.go_on_from(run)
    assert len(after.batch([("a", 0), ("b", 1)], processing_ms=1050)) == 2
    assert sorted(after.batch([("a", 0), ("b", 0)], processing_ms=1200)) == [
        ("a", 1200, False),
        ("b", 1050, False),
    ]


def _counted(key: Key, rows: Iterator[Row], state: GroupState) -> tuple[Any, ...]:
    total = (state.get[0] if state.exists else 0) + sum(row.n for row in rows)
    state.update((total,))
    return key[0], total


def test_event_time_timeouts_go_by_the_watermark() -> None:
    def wait(key: Key, rows: Iterator[Row], state: GroupState) -> tuple[Any, ...]:
        last = max((row.n for row in rows), default=0)
        if not state.hasTimedOut:
            state.update((state.getCurrentWatermarkMs(),))
            state.setTimeoutTimestamp(last)
        return key[0], state.get[0], state.hasTimedOut

    state = pa.schema([("mark", pa.int64())])
    options: dict[str, Any] = {"timeout": "event-time", "key_groups": 2}
    run = StateDriver.per_key(wait, key=["k"], rows=ROWS, state=state, output=OUT, **options)
    assert run.batch([("a", 500)], watermark_ms=100) == [("a", 100, False)]
    assert run.batch([], watermark_ms=500) == []
    assert run.batch([], watermark_ms=501) == [("a", 100, True)]
    assert run.batch([], watermark_ms=900) == []
    with pytest.raises(
        StateFunctionFailed, match=r"key \('b',\), batch 4: ValueError: a timeout at 5 is before"
    ):
        run.batch([("b", 5)], watermark_ms=900)
    with pytest.raises(StateFunctionFailed, match="setTimeoutDuration needs timeout='processing-time'"):
        driver(timeout="event-time").batch([("b", 1)], watermark_ms=1)


def test_every_type_of_state_comes_back_as_it_went_in() -> None:
    kinds = pa.schema(
        [
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("tags", pa.map_(pa.string(), pa.list_(pa.int32()))),
            ("inner", pa.struct([("a", pa.float64()), ("b", pa.list_(pa.struct([("c", pa.string())])))])),
            ("raw", pa.binary()),
            ("clock", pa.time64("ns")),
        ]
    )
    when = datetime.datetime(2026, 3, 4, 5, 6, 7, 89)  # noqa: DTZ001 - as Spark gives it
    inner = Row(a=float("inf"), b=[Row(c="z"), None])
    value = (when, when, {"x": [1, None], "y": None}, inner, b"\0\1", datetime.time(5, 6, 7, 89))

    def keep(key: Key, rows: Iterator[Row], state: GroupState) -> tuple[Any, ...]:
        assert len(list(rows)) == 1
        if state.exists:
            assert state.get == value
        state.update(value)
        return key[0], 1, state.exists

    run = StateDriver.per_key(keep, key=["k"], rows=ROWS, state=kinds, output=OUT)
    for _ in range(3):
        run.restart()
        assert run.batch([("a", 1)]) == [("a", 1, True)]
    assert run.states == {("a",): value}


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "UTC"])
def test_each_moment_of_a_year_comes_back_as_itself_in_any_time_zone(
    monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """Also in the hour that comes twice when summer time ends."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        times = [begin + datetime.timedelta(minutes=30 * n) for n in range(365 * 48)]
        kinds = pa.schema([("at", pa.timestamp("us", "UTC"))])
        found = values.rows(pa.table({"at": pa.array(times, kinds.field(0).type)}))
        assert values.table(found, kinds).column(0).to_pylist() == times
    finally:
        monkeypatch.undo()
        time.tzset()


def bad(kind: str) -> Callable[[Key, Iterator[Row], GroupState], Any]:
    def function(key: Key, rows: Iterator[Row], state: GroupState) -> Any:
        numbers_ = [row.n for row in rows]
        state.update((sum(numbers_), numbers_))
        if 13 in numbers_ and kind == "raise":
            raise ZeroDivisionError("poison")
        if 13 in numbers_ and kind == "state":
            state.update((1, 2, 3))
        if 13 in numbers_ and kind == "state type":
            state.update(("text", []))
        if 13 in numbers_ and kind == "output":
            return [(key[0], "text", False)]
        return [(key[0], 1)] if 13 in numbers_ and kind == "width" else [(key[0], 1, False)]

    return function


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", r"key \('b',\), batch 1: ZeroDivisionError: poison"),
        ("state", r"key \('b',\), batch 1: the state has 3 values, its schema has 2"),
        ("state type", r"batch 1: its state does not fit its schema: ValueError: field 'total'"),
        ("output", r"batch 1: its output does not fit its schema: ValueError: field 'total'"),
        ("width", r"batch 1: its output does not fit its schema: ValueError: a row has 2 values"),
    ],
)
def test_a_function_that_breaks_its_contract_is_named_and_leaves_no_trace(kind: str, said: str) -> None:
    run = StateDriver.per_key(bad(kind), key=["k"], rows=ROWS, state=STATE, output=OUT, flat=True)
    run.batch([("a", 1), ("b", 1)])
    before = run.states
    with pytest.raises(StateFunctionFailed, match=said):
        run.batch([("a", 2), ("b", 13)])
    assert run.states == before
    run.batch([("a", 2), ("b", 2)])
    assert run.states == {("a",): (2, [2]), ("b",): (2, [2])}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "it returned NoneType"),
        ((pa.table({"k": ["a"]}), None), r"its states has the columns \['k'\]"),
        ((pa.table({"k": ["a", "a"], "total": [1, 2]}), None), "name a key twice"),
        ((pa.table({"k": ["z"], "total": [1]}), None), r"its states name the key \('z',\), which neither"),
        ((pa.table({"k": ["a"], "total": ["x"]}), None), "its states does not fit its schema"),
        ((None, [1]), "its output is list, not an Arrow table"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(answer: Any, said: str) -> None:
    state = pa.schema([("total", pa.int64())])
    run = StateDriver.per_batch(lambda *_: answer, key=["k"], rows=ROWS, state=state, output=state)
    with pytest.raises(StateFunctionFailed, match=said):
        run.batch([("a", 1)])


def test_a_group_past_its_limit_is_refused_with_its_size() -> None:
    run = totals(key_groups=1, max_group_bytes=100_000)
    with pytest.raises(
        StateFunctionFailed, match=r"the state of key group 0 has \d+ bytes, the limit .* 100000"
    ):
        run.batch(numbers(range(10_000)))
    assert run.states == {}
    run.batch(numbers(range(1_000)))
    assert len(run.states) == 1_000


def test_state_of_another_form_is_refused() -> None:
    run, other = driver(), driver(timeout="none")
    run.batch([("a", 1)], processing_ms=1)
    other.groups = run.groups
    with pytest.raises(StateFunctionFailed, match="was written by a definition of this function of which"):
        other.batch([("a", 1)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_groups": 0}, "key groups must be 1 to 32768, found 0"),
        ({"key": ["nope"]}, "the rows need exactly one key column 'nope'"),
        ({"key": []}, "give at least one key column"),
        ({"state": pa.schema([("k", pa.int64())])}, "state field 'k' is declared twice"),
    ],
)
def test_an_operator_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    given_ = {"key": ["k"], "rows": ROWS, "state": STATE, "output": OUT, **options}
    with pytest.raises(UsageError, match=said):
        StateDriver.per_key(story, **given_)
