"""The batch query that judges the demo, on a handful of events worked out by hand."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from oracle import Difference, attribute, difference, rows_of, total

MINUTE = pd.Timedelta(minutes=1)


def at(second: int) -> pd.Timestamp:
    return pd.Timestamp("2026-01-01", tz="UTC") + pd.Timedelta(seconds=second)


CLICKS = pd.DataFrame(
    [
        ("c1", "ann", "red", at(0)),
        ("c2", "ann", "blue", at(50)),
        ("c3", "bob", "red", at(70)),
    ],
    columns=["click_id", "user", "campaign", "click_time"],
)
ORDERS = pd.DataFrame(
    [
        ("o1", "ann", 100, at(60)),  # c1 a minute before, to the second, and c2
        ("o2", "ann", 200, at(61)),  # c1 is too old now
        ("o3", "bob", 300, at(69)),  # its click comes after it
        ("o4", "eve", 400, at(120)),  # never clicked
    ],
    columns=["order_id", "user", "amount_cents", "order_time"],
)


def test_an_order_gets_every_click_of_its_user_in_the_time_before_it_or_stays_alone() -> None:
    found = attribute(CLICKS, ORDERS, MINUTE)
    pairs = [(order, click) for order, _, _, click, _ in rows_of(found)]
    assert sorted(pairs, key=str) == [
        ("o1", "c1"),
        ("o1", "c2"),
        ("o2", "c2"),
        ("o3", None),
        ("o4", None),
    ]


def test_totals_count_per_campaign_and_window() -> None:
    assert rows_of(total(attribute(CLICKS, ORDERS, MINUTE), MINUTE)) == Counter(
        [
            (at(60), "blue", 2, 300),
            (at(60), "none", 1, 300),
            (at(60), "red", 1, 100),
            (at(120), "none", 1, 400),
        ]
    )


def test_a_difference_counts_what_is_due_and_missing_and_what_should_not_be_there() -> None:
    expected = Counter([("due",), ("due",), ("early",)])
    found = Counter([("due",), ("wrong",), ("early",), ("early",)])
    assert difference(expected, found, lambda row: row[0] == "due") == Difference(expected=2, lost=1, extra=2)
