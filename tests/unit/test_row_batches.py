"""Batches of rows that are bounded in memory, out of real files: what a file hides is found beforehand."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_abs.store.row_batches import BATCH_BYTES, BATCH_ROWS, pieces, read_batches

WIDE = "x" * 20_000
MOST = 2**19


def column(kind: str, rows: int) -> pa.Array:
    """Rows that are twenty kilobytes each, and less than two hundred in the file."""
    match kind:
        case "one value":
            return pa.array([WIDE] * rows)
        case "few values":
            return pa.array([f"{WIDE}{n % 7}" for n in range(rows)])
        case "each its own":
            return pa.array([f"{WIDE}{n}" for n in range(rows)])
        case "wide at the end":
            return pa.array(["narrow"] * (rows // 2) + [f"{WIDE}{n % 3}" for n in range(rows - rows // 2)])
        case "nulls first":
            return pa.array([None] * (rows // 2) + [WIDE] * (rows - rows // 2))
        case "bytes":
            return pa.array([WIDE.encode()] * rows)
        case "struct":
            return pa.array([{"deep": {"in": WIDE}, "n": n} for n in range(rows)])
        case "list":
            return pa.array([[]] * 10 + [[WIDE]] * (rows - 10))
        case "map":
            return pa.array([[("k", WIDE)]] * rows, pa.map_(pa.string(), pa.string()))
        case "many numbers":
            return pa.array([[1] * 2500] * rows)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "one value",
        "few values",
        "each its own",
        "wide at the end",
        "nulls first",
        "bytes",
        "struct",
        "list",
        "map",
        "many numbers",
    ],
)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_batches_are_bounded_and_hold_all_rows_in_order(tmp_path: Path, kind: str, version: str) -> None:
    table = pa.table({"n": pa.array(range(1000)), "wide": column(kind, 1000)})
    pq.write_table(table, tmp_path / "f", row_group_size=700, write_batch_size=32, data_page_version=version)
    before = pa.total_allocated_bytes()
    found, held = [], 0
    with pa.OSFile(str(tmp_path / "f")) as source:
        for batch in read_batches(source, ["wide", "absent", "n"], most_bytes=MOST):
            assert batch.nbytes <= MOST
            assert batch.schema.names == ["wide", "n"]
            held = max(held, pa.total_allocated_bytes() - before)
            found.append(batch["n"].to_pylist())
            assert batch["wide"].equals(table["wide"].combine_chunks().slice(found[-1][0], batch.num_rows))
    assert [n for some in found for n in some] == list(range(1000))
    assert len(found) < 3 * table.nbytes // MOST  # neither in crumbs
    assert held < table.nbytes / 2  # nor decoded as a whole before it was cut


def test_narrow_rows_come_in_large_batches(tmp_path: Path) -> None:
    """Among them texts of a dictionary: a look at it shows that they are short."""
    rows = 2 * BATCH_ROWS
    table = pa.table({"n": pa.array(range(rows)), "name": [f"name {n % 1000}" for n in range(rows)]})
    pq.write_table(table, tmp_path / "f")
    with pa.OSFile(str(tmp_path / "f")) as source:
        assert [b.num_rows for b in read_batches(source, table.schema.names)] == [BATCH_ROWS, BATCH_ROWS]


def test_a_row_that_is_larger_than_a_batch_comes_alone() -> None:
    batch = pa.record_batch({"wide": ["x" * BATCH_BYTES, "y", "z" * 2 * BATCH_BYTES]})
    found = list(pieces(batch))
    assert [value for piece in found for value in piece["wide"].to_pylist()] == batch["wide"].to_pylist()
    assert all(piece.num_rows == 1 or piece.nbytes <= BATCH_BYTES for piece in found)


def test_files_without_rows_or_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "empty")
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "other")
    for name, rows in (("empty", 0), ("other", 2)):
        with pa.OSFile(str(tmp_path / name)) as source:
            assert sum(batch.num_rows for batch in read_batches(source, ["absent"])) == rows
