"""The batch query that judges the job with a loop, on a handful of orders worked out by hand."""

from __future__ import annotations

import pandas as pd
from retries import expected

CLICKS = pd.DataFrame(
    [(["c1", "ann"], "red", 1), (["c2", "ann"], "blue", 2), (["bob"], "green", 3)],
    columns=["keys", "campaign", "number"],
)
ORDERS = pd.DataFrame(
    [
        ("o1", ["c2", "ann"]),  # its own click
        ("o2", ["c9", "ann"]),  # its user has two, the earlier one counts
        ("o3", ["c9", "s9", "bob"]),
        ("o4", ["c9", "s9"]),
    ],
    columns=["order_id", "keys"],
)


def test_the_first_key_with_a_click_decides_and_without_one_the_order_is_given_up() -> None:
    attributed, given_up = expected(CLICKS, ORDERS)
    assert sorted(attributed.itertuples(index=False, name=None)) == [
        ("o1", 1, "blue"),
        ("o2", 2, "red"),
        ("o3", 3, "green"),
    ]
    assert list(given_up["order_id"]) == ["o4"]
