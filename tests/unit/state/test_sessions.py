"""The functions of the session job, without Spark: against plain loops over all events, and their bounds."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pyarrow as pa
from sessions import Bounds, decide, millis, sessions, stamp

from spark_abs.testing.state import StateDriver

BOUNDS = Bounds(late_by_ms=10_000, gap_ms=30_000, match_within_ms=60_000, kept=50)
TIME = pa.timestamp("us", "UTC")
USER = ("user", pa.string())
START = 1_700_000_000_000


def drive(function: Any, rows: pa.Schema, state: pa.Schema, out: pa.Schema, bounds: Bounds) -> StateDriver:
    return StateDriver.per_key(
        partial(function, bounds), key=["user"], rows=rows, state=state, output=out, flat=True,
        timeout="event-time",
    )  # fmt: skip


def session_driver() -> StateDriver:
    span = pa.struct([("start", pa.int64()), ("end", pa.int64()), ("clicks", pa.int64())])
    out = pa.schema([USER, ("session_start", TIME), ("session_end", TIME), ("clicks", pa.int64())])
    rows = pa.schema([USER, ("click_time", TIME)])
    return drive(sessions, rows, pa.schema([("open", pa.list_(span))]), out, BOUNDS)


def order_driver(bounds: Bounds = BOUNDS) -> StateDriver:
    click = pa.struct([("at", pa.int64()), ("campaign", pa.string())])
    order = pa.struct([("at", pa.int64()), ("order_id", pa.string())])
    state = pa.schema([("clicks", pa.list_(click)), ("waiting", pa.list_(order))])
    rows = pa.schema([USER, ("at", TIME), ("campaign", pa.string()), ("order_id", pa.string())])
    out = pa.schema(
        [
            ("order_id", pa.string()),
            USER,
            ("order_time", TIME),
            ("campaign", pa.string()),
            ("why", pa.string()),
        ]
    )
    return drive(decide, rows, state, out, bounds)


def late_batches(chance: random.Random, count: int, users: str) -> list[list[tuple[str, int]]]:
    """Return batches of (user, time), none later than the watermark allows."""
    batches, now = [], START
    for _ in range(count):
        now += chance.randrange(15_000)
        batches.append(
            [(chance.choice(users), now - chance.randrange(9_000)) for _ in range(chance.randrange(6))]
        )
    return batches


def run(driver: StateDriver, batches: list[list[Any]], time_of: Any) -> list[tuple[Any, ...]]:
    newest, out = 0, []
    for batch in batches:
        out += driver.batch(batch, watermark_ms=max(0, newest - BOUNDS.late_by_ms))
        newest = max([newest, *(millis(time_of(row)) for row in batch)])
    for after in (1, 2):  # the end: orders and sessions first, then clicks that are kept
        out += driver.batch([], watermark_ms=newest + after * 10**6)
    return out


def test_sessions_are_those_of_all_clicks_in_order() -> None:
    batches = late_batches(random.Random(3), 150, "abcde")
    want = []
    for user in "abcde":
        times = sorted(at for batch in batches for who, at in batch if who == user)
        spans: list[list[int]] = []
        for at in times:
            if spans and at - spans[-1][-1] <= BOUNDS.gap_ms:
                spans[-1].append(at)
            else:
                spans.append([at])
        want += [(user, stamp(s[0]), stamp(s[-1]), len(s)) for s in spans]
    driver = session_driver()
    have = run(driver, [[(u, stamp(at)) for u, at in batch] for batch in batches], lambda row: row[1])
    assert sorted(have) == sorted(want)
    assert len(want) > 50
    assert driver.states == {}


def test_every_order_is_decided_once_by_the_newest_click_before_it() -> None:
    chance = random.Random(5)
    batches, events = [], []
    for number, batch in enumerate(late_batches(chance, 150, "ab")):
        rows = []
        for i, (user, at) in enumerate(batch):
            order = f"{number}-{i}" if chance.random() < 0.5 else None
            rows.append((user, stamp(at), None if order else f"c{number}-{i}", order))
        batches.append(rows)
        events += rows
    want = []
    for user, when, _, order in events:
        if order is not None:
            ms = millis(when)
            clicks = [(millis(t), c) for u, t, c, o in events if u == user and o is None]
            fit = sorted((t, c) for t, c in clicks if ms - BOUNDS.match_within_ms <= t <= ms)
            want.append((order, user, when, fit[-1][1] if fit else None, "known"))
    driver = order_driver()
    have = run(driver, batches, lambda row: row[1])
    assert sorted(have, key=repr) == sorted(want, key=repr)
    assert len(want) > 100
    assert driver.states == {}


def test_the_list_of_waiting_orders_has_a_bound() -> None:
    driver = order_driver()
    out = []
    for number in range(300):  # a hot user, and a watermark that stands still
        out += driver.batch([("hot", stamp(START + number), None, str(number))], watermark_ms=START - 1)
        ((_, waiting),) = driver.states.values()
        assert len(waiting) <= BOUNDS.kept
    assert [row[0] for row in out] == [str(n) for n in range(300 - BOUNDS.kept)]
    assert {row[4] for row in out} == {"given up"}
