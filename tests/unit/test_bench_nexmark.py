"""The events of the Nexmark benches, what a query must give, and rows that a kill makes read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from bench import nexmark_events
from bench.nexmark_queries import QUERIES
from bench.rows_again import rows_again
from deltalake import write_deltalake

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


def test_a_killed_query_reads_the_batch_again_that_was_planned_and_not_finished(tmp_path: Path) -> None:
    """Files by the log of the source, also where it was compacted; rows of a table by versions and files."""
    files = [tmp_path / f"{number}.parquet" for number in range(12)]
    for number, file in enumerate(files):
        pq.write_table(pa.table({"n": range(number + 1)}), file)
    first = tmp_path / "c1"
    _log(first, planned=["v1", "{}", '{"logOffset":8}'], committed=["v1", "{}", '{"logOffset":7}'])
    (first / "sources/0").mkdir(parents=True)
    lines = [json.dumps({"path": f"file://{file}", "batchId": n}) for n, file in enumerate(files)]
    (first / "sources/0/8").write_text("v1\n" + lines[8])
    for rows in (100, 10):
        write_deltalake(tmp_path / "rows", pa.table({"n": range(rows)}), mode="append")
    offset = '{"reservoirVersion":%d,"index":%d}'
    _log(tmp_path / "c2", planned=["v1", "{}", offset % (2, -1)], committed=["v1", "{}", offset % (1, -1)])
    assert rows_again("plain", tmp_path) == 9 + 10
    # The next batch takes two files; the log of the second one repeats all before it.
    _log(first, planned=["v1", "{}", '{"logOffset":10}'], committed=["v1", "{}", '{"logOffset":8}'])
    (first / "sources/0/9.compact").write_text("\n".join(["v1", *lines[:10]]))
    (first / "sources/0/10").write_text("v1\n" + lines[10])
    assert rows_again("plain", tmp_path) == 10 + 11 + 10


def _log(checkpoint: Path, planned: Sequence[str], committed: Sequence[str]) -> None:
    """Write a query's logs: batch 3 has ended, batch 4 is planned."""
    for log in ("offsets", "commits"):
        (checkpoint / log).mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets/3").write_text("\n".join(committed))
    (checkpoint / "offsets/4").write_text("\n".join(planned))
    (checkpoint / "commits/3").write_text("v1\n{}")
