"""The names of queries at a watcher's root, and which clean-up of a table comes too soon."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_abs.keep import keep_words
from spark_abs.model import checked_name
from spark_abs.rewind.query import QueryFacts
from spark_abs.store.storage import Place
from spark_abs.watch.pins import interval_ms, warnings
from spark_abs.watch.taking import stage_names

DAY = 86_400_000


def query(uri: str) -> QueryFacts:
    return QueryFacts(
        name=uri,
        place=Place(uri),
        metadata="",
        id="",
        batches=(),
        offsets={},
        texts={},
        planned=-1,
        committed=-1,
        times={},
        others=(),
        made={},
        logs={},
    )


def test_a_query_is_named_after_its_directory() -> None:
    uris = ["/c/silver", "/a/orders v2", "/b/orders v2", "/c/2024", "/c/" + 70 * "x", "s3a://bucket/c/größe"]
    names = stage_names([query(uri) for uri in uris])
    found = [names[uri] for uri in uris]
    assert found[0] == "silver"
    assert found[1].startswith("orders_v2-")
    assert found[2].startswith("orders_v2-")
    assert found[3:] == ["q2024", 40 * "x", "gr__e"]
    assert len({*found}) == len(found)
    for name in found:
        checked_name(name, "stage")


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("interval 7 days", 7 * DAY),
        ("interval 1 week", 7 * DAY),
        ("INTERVAL 1 week 12 hours", 7 * DAY + DAY // 2),
        ("168 hours", 7 * DAY),
        ("interval 2 months", None),
        ("soon", None),
        ("", None),
    ],
)
def test_intervals_of_delta_are_read(text: str, ms: int | None) -> None:
    assert interval_ms(text) == ms


def test_a_table_is_named_if_it_is_cleaned_up_before_a_cut_is_too_old(tmp_path: Path) -> None:
    DeltaTable.create(
        str(tmp_path / "t"),
        pa.schema([("id", pa.int64())]),
        configuration={"delta.logRetentionDuration": "interval 2 days"},
    )
    place = Place(str(tmp_path / "t"))
    assert warnings([place], keep_words("2d:all")) == ()
    (said,) = warnings([place], keep_words("2d:all 7d:1h"))
    assert "delta.logRetentionDuration" in said
    assert len(warnings([place], keep_words("8d:all"))) == 2
