"""The expected result of the attribution job: a batch query over the input files, in pandas.

It shares no code with the job or with spark_abs, on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from deltalake import DeltaTable

ATTRIBUTED = ["order_id", "amount_cents", "order_time", "click_id", "campaign"]
TOTALS = ["window_start", "campaign", "orders", "amount_cents"]

Rows = Counter[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of a table from its expected rows."""

    expected: int
    lost: int
    extra: int
    """Rows that are in the table twice or are not expected."""


def read_events(directory: Path, time_column: str) -> pd.DataFrame:
    """Read all JSON files of a directory."""
    files = sorted(directory.glob("[!._]*.json"))
    frame = pd.concat([pd.read_json(file, lines=True, dtype=False, convert_dates=False) for file in files])
    frame[time_column] = pd.to_datetime(frame[time_column], utc=True)
    return frame


def attribute(clicks: pd.DataFrame, orders: pd.DataFrame, within: pd.Timedelta) -> pd.DataFrame:
    """Join every order with each click of its user in the time before it; keep orders without a click."""
    pairs = orders.merge(clicks, on="user")
    age = pairs["order_time"] - pairs["click_time"]
    hits = pairs[(age >= pd.Timedelta(0)) & (age <= within)]
    alone = orders[~orders["order_id"].isin(hits["order_id"])]
    return pd.concat([hits, alone])[ATTRIBUTED]


def total(attributed: pd.DataFrame, window: pd.Timedelta) -> pd.DataFrame:
    """Add up per campaign and window."""
    keyed = attributed.assign(
        window_start=attributed["order_time"].dt.floor(window), campaign=attributed["campaign"].fillna("none")
    )
    grouped = keyed.groupby(["window_start", "campaign"], as_index=False)
    return grouped.agg(orders=("order_id", "size"), amount_cents=("amount_cents", "sum"))[TOTALS]


def rows_of(frame: pd.DataFrame) -> Rows:
    """Return the rows as a multiset of plain values."""
    plain = frame.astype(object).where(frame.notna(), None)
    return Counter(plain.itertuples(index=False, name=None))


def table_rows(path: Path, columns: list[str]) -> Rows:
    """Return the rows of a Delta table; empty if the table does not exist yet."""
    if not DeltaTable.is_deltatable(str(path)):
        return Counter()
    return rows_of(DeltaTable(str(path)).to_pandas(columns=columns)[columns])


def difference(expected: Rows, found: Rows, due: Callable[[tuple[Any, ...]], bool]) -> Difference:
    """Compare a table with its expected rows.

    An expected row that is not yet `due` may be missing; an unexpected row is an error.
    """
    missing = {row: count for row, count in (expected - found).items() if due(row)}
    return Difference(
        expected=sum(count for row, count in expected.items() if due(row)),
        lost=sum(missing.values()),
        extra=sum((found - expected).values()),
    )


def compare(base: Path, cutoff: pd.Timestamp, within: pd.Timedelta, window: pd.Timedelta) -> list[Difference]:
    """Compare `attributed` and `totals` below `base` with the input below `base`.

    Orders before `cutoff` are due, and windows that end by it.
    """
    clicks = read_events(base / "input" / "clicks", "click_time")
    orders = read_events(base / "input" / "orders", "order_time")
    attributed = attribute(clicks, orders, within)
    return [
        difference(
            rows_of(attributed),
            table_rows(base / "attributed", ATTRIBUTED),
            lambda row: row[ATTRIBUTED.index("order_time")] < cutoff,
        ),
        difference(
            rows_of(total(attributed, window)),
            table_rows(base / "totals", TOTALS),
            lambda row: row[TOTALS.index("window_start")] + window <= cutoff,
        ),
    ]
