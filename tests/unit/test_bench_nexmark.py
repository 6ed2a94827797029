"""The events of the Nexmark benches, and what a query must give."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
from bench import nexmark_events
from bench.nexmark_queries import QUERIES

_EVENTS = 5_000


def _events(directory: Path, kind: str, hot: float = 0.0) -> pd.DataFrame:
    nexmark_events.write(directory / kind, kind, files=2, events=_EVENTS, hot=hot)
    found: pd.DataFrame = pq.read_table(directory / kind).to_pandas()
    return found


def test_events_have_nexmarks_proportions_and_refer_to_each_other(tmp_path: Path) -> None:
    persons, auctions, bids = (_events(tmp_path, kind) for kind in ("person", "auction", "bid"))
    assert [len(persons), len(auctions), len(bids)] == [2 * _EVENTS // 50 * share for share in (1, 3, 46)]
    assert persons["id"].is_unique
    assert auctions["id"].is_unique
    assert set(auctions["seller"]) <= set(persons["id"])
    assert set(bids["bidder"]) <= set(persons["id"])
    assert set(bids["auction"]) <= set(auctions["id"])


def test_events_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for kind in nexmark_events.SCHEMAS:
        one, two = (_events(tmp_path / run, kind, hot=0.3) for run in ("one", "two"))
        pd.testing.assert_frame_equal(one, two)


def test_three_of_ten_bids_are_for_hot_auctions(tmp_path: Path) -> None:
    uniform, hot = (_events(tmp_path / str(share), "bid", share) for share in (0.0, 0.3))
    shares = [((bids["auction"] - 1000) % 100 == 0).mean() for bids in (uniform, hot)]
    assert shares[0] < 0.05
    assert 0.28 < shares[1] < 0.34


def test_what_the_cyclic_query_must_give_goes_round_a_circle_once() -> None:
    cyclic = next(query for query in QUERIES if query.name == "cyclic")
    links = pd.DataFrame([(1, 2), (2, 3), (3, 1), (7, 8)], columns=["start", "end"])
    found = cyclic.expected({"link": links, "source": pd.DataFrame({"node": [1, 1, 8]})})
    assert list(found.itertuples(index=False, name=None)) == [(1, 1), (1, 2), (1, 3), (8, 8)]
