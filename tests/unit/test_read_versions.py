"""How far a query has read a table, from the offsets of its Delta sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spark_abs.cuts.cut import Batch, Read
from spark_abs.rewind.query import QueryFacts
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.store.storage import Place

LAST = {4: 1, 5: -1}
"""Version to the index of its last file."""


def is_last(version: int, index: int) -> bool:
    return version in LAST and index >= LAST[version]


def at(version: int, index: int = -1, *, initial: bool = False, table: str = "t") -> str:
    plain: dict[str, Any] = {"sourceVersion": 1, "reservoirId": table, "reservoirVersion": version}
    return json.dumps({**plain, "index": index, "isStartingVersion": initial})


def read(*batches: list[str]) -> Read | None:
    """Return how far a query has read table `t` that had these offsets after its batches."""
    texts = {b: "\n".join(["v1", "{}", *offsets]) for b, offsets in enumerate(batches)}
    query = QueryFacts(
        name="q",
        place=Place("/c/q"),
        metadata="",
        id="",
        batches=tuple(Batch(b, b) for b in texts),
        offsets={b: parse_offsets(text) for b, text in texts.items()},
        texts=texts,
        planned=len(texts) - 1,
        committed=len(texts) - 1,
        times={},
        others=(),
        made={},
        logs={},
    )
    return query.read("t", "/t/t", is_last)


@pytest.mark.parametrize(
    ("offset", "until"),
    [
        (at(4), 4),
        (at(4, 0), None),
        (at(4, 1), 5),
        # Of a commit that is not known any more.
        (at(3, 9), None),
        # Within the rows that the table had when the query began: its index counts the files of the table.
        (at(4, 1, initial=True), None),
        (at(5, -20), 5),
    ],
)
def test_a_version_is_read_whole_at_its_last_file(offset: str, until: int | None) -> None:
    assert read([offset]) == Read("q", "/t/t", (until,))


def test_two_sources_have_read_a_table_as_far_if_one_stays_at_the_last_file() -> None:
    assert read([at(4, 1), at(5)], [at(4, 0), at(4)]) == Read("q", "/t/t", (5, None))


def test_a_table_that_no_source_reads() -> None:
    assert read([at(4, table="other")], ['{"logOffset":1}']) is None
    assert read(['{"logOffset":1}', "-"], ['{"logOffset":2}', at(4)]) == Read("q", "/t/t", (0, 4))
