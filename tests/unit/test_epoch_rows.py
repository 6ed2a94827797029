"""The rows of an epoch in parts: all of them, once, in order, also in another process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_abs.errors import DamageError
from spark_abs.model import ChannelId, DataFile
from spark_abs.sinks.sending import epoch_rows
from spark_abs.sinks.sending.epoch_rows import FileRows
from spark_abs.store.root import Root

CHANNEL = ChannelId("a.main")
SCHEMA = pa.schema([("id", pa.int64()), ("new", pa.string())])


def rows_of(tmp_path: Path, sizes: Sequence[int]) -> FileRows:
    """Files of two rows each, which say to be of certain sizes, from before there was a column `new`."""
    place = tmp_path / "channels" / "a.main"
    place.mkdir(parents=True)
    files = []
    for number, size in enumerate(sizes):
        pq.write_table(pa.table({"id": [2 * number, 2 * number + 1], "old": ["", ""]}), place / f"{number}")
        files.append(DataFile(f"{number}", size, 2))
    return FileRows(Root(str(tmp_path)), CHANNEL, files, SCHEMA)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([], []),
        ([1], [2]),
        ([5, 5, 5, 5], [4, 4]),  # ten bytes make a part
        ([9, 9, 1], [4, 2]),
        ([100, 1, 100], [2, 4]),
        ([10, 10, 10], [2, 2, 2]),
    ],
)
def test_parts_are_all_rows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], wanted: list[int]
) -> None:
    monkeypatch.setattr(epoch_rows, "PART_BYTES", 10)
    whole = rows_of(tmp_path, sizes)
    parts = [pickle.loads(pickle.dumps(part)) for part in whole.parts()]
    assert [part.count for part in parts] == wanted
    found = [batch for part in parts for batch in part]
    assert all(batch.schema == SCHEMA for batch in found)
    assert [n for batch in found for n in batch["id"].to_pylist()] == list(range(2 * len(sizes)))
    assert whole.count == 2 * len(sizes)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [1, 1])
    (tmp_path / "channels" / "a.main" / "1").unlink()
    with pytest.raises(DamageError, match=r"a\.main/1 is missing"):
        list(rows)
