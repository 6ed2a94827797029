"""Statistics of files: bounds that hold, or none."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.channels.files import Evaluation, directory_name, evaluation_of, read_written, statistics
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, BatchId, RunId
from spark_abs.store.root import Root


def stats_of(table: pa.Table, **options: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    buffer.seek(0)
    found = statistics(pq.read_metadata(buffer))
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def column(values: list[Any], kind: pa.DataType) -> tuple[Any, Any, Any]:
    found = stats_of(pa.table({"c": pa.array(values, kind)}))
    assert found["numRecords"] == len(values)
    return found["minValues"].get("c"), found["maxValues"].get("c"), found["nullCount"].get("c")


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([datetime.max.replace(tzinfo=UTC)], pa.timestamp("us", "UTC"), (None, None, 0)),
        ([3, None, -7], pa.int64(), (-7, 3, 1)),
        ([1, 2], pa.int8(), (1, 2, 0)),
        ([date(1500, 1, 2), date(2024, 2, 29)], pa.date32(), ("1500-01-02", "2024-02-29", 0)),
        (["b", "", "é"], pa.string(), ("", "é", 0)),
        (["x" * 33, "a"], pa.string(), (None, None, 0)),  # Delta shortens; we leave out
        ([1.5, float("nan")], pa.float64(), (None, None, 0)),  # Parquet's bounds ignore NaN
        ([Decimal("0.1")], pa.decimal128(38, 18), (None, None, 0)),  # JSON numbers may round
        ([b"\xff"], pa.binary(), (None, None, 0)),
        ([True, None], pa.bool_(), (None, None, 1)),
        ([None, None], pa.int64(), (None, None, 2)),
        ([datetime(2024, 1, 1)], pa.timestamp("us"), (None, None, 0)),  # noqa: DTZ001 - a local time
        ([[1, 2], None], pa.list_(pa.int64()), (None, None, None)),
        ([{"x": 1}], pa.struct([("x", pa.int64())]), (None, None, None)),
    ],
    ids=str,
)
def test_bounds_of_a_column(values: list[Any], kind: pa.DataType, expected: tuple[Any, Any, Any]) -> None:
    assert column(values, kind) == expected


@given(st.lists(st.none() | st.datetimes(timezones=st.just(UTC)), min_size=1))
def test_timestamps_are_bounded_outwards_in_milliseconds(moments: list[datetime | None]) -> None:
    least, greatest, nulls = column(list(moments), pa.timestamp("us", "UTC"))
    real = [moment for moment in moments if moment is not None]
    assert nulls == len(moments) - len(real)
    if least is None or greatest is None:
        assert not real or max(real).year == 9999
        return
    assert datetime.fromisoformat(least) <= min(real)
    assert datetime.fromisoformat(greatest) >= max(real)


@given(st.lists(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=4))
def test_bounds_span_the_row_groups(groups: list[list[int | None]]) -> None:
    """A row group of nulls only has no bounds; the others' still hold for the file."""
    schema, buffer = (
        pa.schema([("nested", pa.list_(pa.struct([("x", pa.int32())]))), ("n", pa.int64())]),
        io.BytesIO(),
    )
    with pq.ParquetWriter(buffer, schema) as writer:
        for group in filter(None, groups):
            writer.write_table(pa.table({"nested": [[{"x": 1}]] * len(group), "n": group}, schema=schema))
    buffer.seek(0)
    found = statistics(pq.read_metadata(buffer))
    values = [value for group in groups for value in group]
    real = [value for value in values if value is not None]
    assert found["numRecords"] == len(values)
    assert found["nullCount"].get("n", 0) == len(values) - len(real)
    assert found["minValues"] == ({"n": min(real)} if real else {})
    assert found["maxValues"] == ({"n": max(real)} if real else {})


def test_without_footer_statistics_there_is_a_row_count() -> None:
    found = stats_of(pa.table({"n": [1]}), write_statistics=False)
    assert found == {"numRecords": 1, "minValues": {}, "maxValues": {}, "nullCount": {}}


def test_files_without_rows_and_what_is_not_a_file_of_rows_go(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    place = tmp_path / "t" / "data" / "x"
    place.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1, 2]}), place / "part-1.parquet")
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), place / "part-0.parquet")
    (place / ".part-1.parquet.crc").write_bytes(b"x")
    written = read_written(root.fs, root.path("t"), "data/x")
    assert [file.path for file in written.entry_files] == ["data/x/part-1.parquet"]
    assert (written.rows, written.size) == (2, (place / "part-1.parquet").stat().st_size)
    assert not (place / "part-0.parquet").exists()
    (place / "part-1.parquet").unlink()
    assert read_written(root.fs, root.path("t"), "data/x").files == ()
    assert not place.exists()
    assert read_written(root.fs, root.path("t"), "data/x").files == ()


def test_a_torn_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part-0.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DamageError, match=r"part-0\.parquet, just written"):
        read_written(Root(str(tmp_path)).fs, str(tmp_path), "data")


def test_a_directory_tells_whose_it_is() -> None:
    name = directory_name(AttemptId(2), RunId(3), BatchId(4))
    assert evaluation_of(name) == Evaluation(AttemptId(2), RunId(3), BatchId(4))
    assert name != directory_name(AttemptId(2), RunId(3), BatchId(4))
    assert evaluation_of("part=3") is None
