"""Input of any size: clicks and orders as Parquet files, the same for the same seed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START_US = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1_000_000)
CAMPAIGNS = np.array([f"campaign-{n}" for n in range(8)])
SLICE_S = 5
"""Event time of one file, as in `generate_events`."""


def write_events(directory: Path, files: int, clicks: int, orders: int, users: int, seed: int = 7) -> None:
    """Write `files` files of each kind below `directory`, with so many clicks and orders in each.

    Events are in the order of their slices and at random within one; none is late by more than a slice.
    """
    for kind, count in (("clicks", clicks), ("orders", orders)):
        (directory / kind).mkdir(parents=True)
        for number in range(files):
            random = np.random.default_rng([seed, number, len(kind), count])
            at = START_US + number * SLICE_S * 1_000_000 + random.integers(0, SLICE_S * 1_000_000, count)
            names = np.char.add(f"{kind[0]}{number}-", np.arange(count).astype(str))
            user = np.char.add("user-", random.integers(0, users, count).astype(str))
            time = pa.array(at, pa.timestamp("us", tz="UTC"))
            columns = (
                {
                    "click_id": names,
                    "user": user,
                    "campaign": CAMPAIGNS[random.integers(0, 8, count)],
                    "click_time": time,
                }
                if kind == "clicks"
                else {
                    "order_id": names,
                    "user": user,
                    "amount_cents": random.integers(100, 50_000, count),
                    "order_time": time,
                }
            )
            pq.write_table(pa.table(columns), directory / kind / f"{kind}-{number:06d}.parquet")
